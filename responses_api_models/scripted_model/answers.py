"""Answers from a JSONL file: the row whose question occurs in what the user wrote last."""

from pathlib import Path
from typing import Any, NamedTuple

import orjson

from nemo_gym import resolve_for_reading
from nemo_gym.config_types import ConfigError
from responses_api_models.scripted_model.draws import Draws
from responses_api_models.scripted_model.script import Answers
from responses_api_models.scripted_model.templates import fill

_MAX_KEY_LENGTH = 32
_GUESSES = 8


class Row(NamedTuple):
    """One question and its answer; white space in questions does not matter."""

    question: str
    answer: str


class AnswerBook:
    """Finds the row for a message in one pass over the message, however many rows there are."""

    def __init__(self, spec: Answers, folder: Path) -> None:
        self._spec = spec
        self._rows = _read_rows(spec, folder)
        self._key_length = min(_MAX_KEY_LENGTH, *(len(row.question) for row in self._rows))
        self._by_key: dict[str, list[Row]] = {}
        for row in self._rows:
            self._by_key.setdefault(row.question[: self._key_length], []).append(row)

    def reply_to(self, message: str, draws: Draws) -> str | None:
        """What to answer; None when no question of the file is in the message."""
        row = self._find(message)
        if row is None:
            return None
        is_right = draws.happens("right answer", self._spec.probability_right)
        template = self._spec.template if is_right else self._spec.wrong_template or self._spec.template
        given = row.answer if is_right else self._wrong_answer(row, draws)
        return fill(template, {"answer": given, "right_answer": row.answer, "question": row.question})

    def _find(self, message: str) -> Row | None:
        text = _collapsed(message)
        found: Row | None = None
        for start in range(len(text) - self._key_length + 1):
            for row in self._by_key.get(text[start : start + self._key_length], ()):
                if text.startswith(row.question, start) and (found is None or len(row.question) > len(found.question)):
                    found = row
        return found

    def _wrong_answer(self, row: Row, draws: Draws) -> str:
        """Another row's answer if one differs, else one made up."""
        for guess in range(_GUESSES):
            answer = draws.choice(f"wrong answer {guess}", self._rows).answer
            if answer != row.answer:
                return answer
        return str(int(row.answer) + 1) if row.answer.lstrip("-").isdecimal() else f"not {row.answer}"


def _read_rows(spec: Answers, folder: Path) -> list[Row]:
    beside = folder / Path(spec.jsonl).expanduser()
    path = beside if beside.is_file() else resolve_for_reading(spec.jsonl)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"answers.jsonl: {path} cannot be read: {error.strerror}") from error
    rows = [_row(line, spec, f"line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"answers.jsonl: {path} has no rows")
    return rows


def _row(line: bytes, spec: Answers, where: str) -> Row:
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"answers.jsonl: {where} is not JSON: {error}") from error
    question = _collapsed(str(_look_up(content, spec.question_field, "question_field", where)))
    if not question:
        raise ConfigError(f"answers.question_field: {spec.question_field!r} is empty in {where}")
    return Row(question, str(_look_up(content, spec.answer_field, "answer_field", where)))


def _look_up(content: Any, field: str, key: str, where: str) -> Any:
    node = content
    for part in field.split("."):
        try:
            node = node[int(part)] if isinstance(node, list) else node[part]
        except (KeyError, IndexError, TypeError, ValueError):
            offered = ", ".join(node) if isinstance(node, dict) else type(node).__name__
            raise ConfigError(f"answers.{key}: {where} has no {field!r} (at {part!r} there is: {offered})") from None
    return node


def _collapsed(text: str) -> str:
    return " ".join(text.split())
