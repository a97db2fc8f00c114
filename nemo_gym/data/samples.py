"""The rows of a data set as they will be rolled out, and which of them cannot be.

A row is looked at after its prompt is filled in, or its `messages` turned into parameters: that is
what the model will be asked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from nemo_gym.data.accumulators import DatasetMetrics
from nemo_gym.data.chat_rows import ChatRowError, params_from_chat
from nemo_gym.data.declared import DeclaredDataset
from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import json_type, malformation, parse
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.prompt import (
    PromptAttributeError,
    PromptConfig,
    PromptFieldError,
    PromptTemplateError,
    apply_prompt_to_row,
    has_own_input,
)
from nemo_gym.row_files import iter_row_lines
from nemo_gym.schemas.openai_responses import NeMoGymResponseCreateParamsNonStreaming

_KEPT_OFFENCES = 10_000
_SHOWN_OFFENCES = 20


class OffendingRowsError(ConfigError, ValueError):
    """Rows that cannot be rolled out."""


class Offence(NamedTuple):
    """One row that cannot be rolled out."""

    path: Path
    line: int
    """Counted from 1."""
    position: int
    """Among the rows of the file, counted from 0, blank lines left out."""
    problem: str
    can_be_kept: bool
    """Whether it is a JSON object, so that it can be written with an agent's name."""

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.problem}"


@dataclass
class Examined:
    """What one pass over a data set found out."""

    metrics: DatasetMetrics = field(default_factory=DatasetMetrics)
    offences: list[Offence] = field(default_factory=list)
    """The first ones, which are plenty."""
    offending: int = 0
    """How many there are."""

    def note(self, offence: Offence) -> None:
        """Remember an offence."""
        self.offending += 1
        if len(self.offences) < _KEPT_OFFENCES:
            self.offences.append(offence)

    def offending_indices(self, repeats: int) -> list[int]:
        """The positions of offending rows among all rows with their repeats."""
        return [offence.position * repeats + repeat for offence in self.offences for repeat in range(repeats)]


class CompletedRow(NamedTuple):
    """A row as it will be rolled out, or as it is, with what stands in the way."""

    line: int
    row: dict[str, Any] | None
    """None when the line holds no JSON object."""
    problem: str | None


def completed_rows(dataset: DeclaredDataset) -> Iterator[CompletedRow]:
    """Every row of a data set with its prompt filled in; parameters are not checked."""
    prompt = dataset.prompt
    for line in iter_row_lines(dataset.path):
        try:
            row = parse(line.content)
        except ValueError as error:
            yield CompletedRow(line.number, None, malformation(line.content, error))
            continue
        if isinstance(row, dict):
            yield CompletedRow(line.number, *complete(row, prompt))
        else:
            yield CompletedRow(line.number, None, f"expected a JSON object, found {json_type(row)}")


def complete(row: dict[str, Any], prompt: PromptConfig | None) -> tuple[dict[str, Any], str | None]:
    """A row with its prompt filled in or its chat turned into parameters, or the row itself and the reason why not."""
    try:
        if prompt is not None:
            if has_own_input(row):
                return (
                    row,
                    f"it has a {RESPONSES_CREATE_PARAMS_KEY_NAME}.input of its own, so no prompt can be filled in",
                )
            return apply_prompt_to_row(row, prompt), None
        if row.get(RESPONSES_CREATE_PARAMS_KEY_NAME) is None:
            params = params_from_chat(row)
            return (row if params is None else {**row, RESPONSES_CREATE_PARAMS_KEY_NAME: params}), None
    except (PromptFieldError, PromptAttributeError, PromptTemplateError, ChatRowError) as error:
        return row, str(error)
    return row, None


def params_problem(row: dict[str, Any]) -> str | None:
    """Why a row's parameters are not what a model can be asked, or None."""
    params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
    if params is None:
        return f"it has no {RESPONSES_CREATE_PARAMS_KEY_NAME}, no messages and no prompt"
    try:
        NeMoGymResponseCreateParamsNonStreaming.model_validate(params)
    except ValidationError as error:
        faults = [_fault(item) for item in error.errors(include_url=False, include_input=False)]
        return "; ".join(faults[:3]) + (f" and {len(faults) - 3} more" if len(faults) > 3 else "")
    return None


def examine(dataset: DeclaredDataset) -> Examined:
    """Check and measure every row of a data set."""
    examined = Examined()
    path = dataset.path
    for position, (line, row, found) in enumerate(completed_rows(dataset)):
        problem = found if found is not None or row is None else params_problem(row)
        if problem is not None:
            examined.note(Offence(path, line, position, problem, can_be_kept=row is not None))
        elif row is not None:
            examined.metrics.observe(row, dataset.config.num_repeats)
    return examined


def refuse_offences(examined: list[Examined], *, keep: bool) -> None:
    """Refuse rows that cannot be rolled out, all of them in one error; with `keep`, only those that are no objects.

    Raises:
        OffendingRowsError: naming each by file and line.
    """
    offences = [offence for each in examined for offence in each.offences if not (keep and offence.can_be_kept)]
    if not offences:
        return
    total = len(offences) if keep else sum(each.offending for each in examined)
    shown = "".join(f"\n  {offence}" for offence in offences[:_SHOWN_OFFENCES])
    more = f"\n  and {total - _SHOWN_OFFENCES:,} more" if total > _SHOWN_OFFENCES else ""
    remedy = (
        "These are no JSON objects, so they cannot be kept: correct or remove them."
        if keep
        else "Correct or remove them, or pass +keep_offending_rows=true to write them as they are."
    )
    counted = "1 row cannot" if total == 1 else f"{total:,} rows cannot"
    raise OffendingRowsError(f"{counted} be rolled out, so nothing was written:{shown}{more}\n{remedy}")


def _fault(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    return f"{RESPONSES_CREATE_PARAMS_KEY_NAME}{'.' if where else ''}{where}: {item['msg']}"
