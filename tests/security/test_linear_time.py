"""Time over text from elsewhere grows no faster than the text: every pattern, and all that masks, shows or reads it.

Servers share a process and an event loop, so one body or answer that takes minutes to look at stops all of them.
"""

import ast
import contextlib
import functools
import importlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nemo_gym
from nemo_gym.collect.failures import failure_of
from nemo_gym.config.secrets import is_secret_key, mask_message, mask_tree, mask_url_passwords
from nemo_gym.dialects.chat import is_too_long
from nemo_gym.dialects.to_chat import taken_apart
from nemo_gym.http.errors import MalformedResponseError, ServerResponseError, excerpt, readable
from nemo_gym.http.model_answers import EndpointSettings, explained_error
from nemo_gym.http.model_endpoint import retry_after_s
from nemo_gym.jsonl import malformation
from nemo_gym.judge import fenced, last_label, without_labels
from nemo_gym.row_files import _split
from nemo_gym.runs.manifest import masked_command, masked_options
from nemo_gym.terminal import harmless, harmless_json, shown
from resources_servers.code_gen.grading import same_text, same_value
from resources_servers.code_gen.submission import extract_code
from resources_servers.instruction_following.registry import INSTRUCTIONS, instructions_of
from resources_servers.instruction_following.tests.test_instructions import CASES
from resources_servers.mcqa.grading import extract_answer as extract_option
from resources_servers.reasoning_gym.answers import extract_answer
from resources_servers.reasoning_gym.rows import task_names
from resources_servers.string_match.app import StringMatchRunRequest, matches
from resources_servers.structured_outputs.schema import problem_with
from resources_servers.workplace_assistant.company import after
from resources_servers.workplace_assistant.world import made_up
from responses_api_models.token_model.parsers import TOOL_PARSERS, ToolParser, read_reasoning
from tests.security.growth import Text, applied, growing_too_fast, in_words_of, of_all_kinds

ROOT = Path(nemo_gym.__file__).parent.parent
PACKAGES = ("nemo_gym", "responses_api_agents", "responses_api_models", "resources_servers")
METHODS = frozenset({"search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer"})
SETTINGS = EndpointSettings("policy_model", "http://127.0.0.1:1/v1", "m")
OPTIONS = {"A": "one", "B": "two"}
ONLY_OFFERED = {r"<think>(.*?)</think>"}
"""A name that programs elsewhere expect, and nothing here uses: quadratic when blocks are left open."""
ANY_TREE = {"anyOf": [{"type": ["string", "number", "null"]}, {"type": ["array", "object"], "items": {"$ref": "#"}}]}
CONTAINED = StringMatchRunRequest(
    responses_create_params={"input": "go"}, expected_answer="Paris", match="contains", ignore_case=True
)
LABELS = ("[[A=B]]", "[[A!=B]]")
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Puzzles whose answers are calculated, in a process of their own that is stopped when that takes long."""
LIBRARIES = frozenset({"ray", "torch", "transformers", "wandb", "slurm"})
"""Not in every environment in which these tests run."""


def sources() -> list[Path]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if not {"tests", ".venv"} & {*path.relative_to(ROOT).parts}]


def modules() -> Iterator[ModuleType]:
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        try:
            yield importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        except ModuleNotFoundError as error:
            if error.name not in LIBRARIES:
                raise


def uses_by_name(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """With which methods the names of patterns are used."""
    found: dict[str, set[str]] = {}
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and node.attr in METHODS and isinstance(node.value, ast.Name):
            found.setdefault(node.value.id, set()).add(node.attr)
    return found


def inline_patterns(trees: dict[Path, ast.Module]) -> Iterator[tuple[str, "re.Pattern[str]", str]]:
    """Patterns that are written where they are used: `re.sub("...", ...)`."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
            if is_call and node.func.attr in METHODS and ast.unparse(node.func.value) == "re":  # type: ignore[attr-defined]
                written = node.args[0]  # type: ignore[attr-defined]
                if isinstance(written, ast.Constant) and isinstance(written.value, str):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]
                    yield where, re.compile(written.value), node.func.attr  # type: ignore[attr-defined]


def patterns_in(value: Any, depth: int = 3) -> Iterator[tuple["re.Pattern[str]", str | None]]:
    """The patterns in a value, each with the method it is bound to, if it is."""
    if isinstance(value, re.Pattern):
        yield value, None
    elif isinstance(owner := getattr(value, "__self__", None), re.Pattern):
        yield owner, value.__name__
    elif depth and isinstance(value, dict | list | tuple | set | frozenset):
        for each in value.values() if isinstance(value, dict) else value:
            yield from patterns_in(each, depth - 1)
    elif depth and isinstance(value, type) and value.__module__.startswith(PACKAGES):
        yield from patterns_in(dict(vars(value)), depth - 1)


def every_pattern() -> dict[str, tuple["re.Pattern[str]", str]]:
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    uses = uses_by_name(trees)
    found: dict[tuple[re.Pattern[str], str], str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's libraries
        for module in modules():
            for name, value in list(vars(module).items()):
                for pattern, bound in patterns_in(value):
                    for method in [bound] if bound else sorted(uses.get(name, {"search"})):
                        found.setdefault((pattern, method), f"{module.__name__}.{name}.{method}")
    for where, pattern, method in inline_patterns(trees):
        found.setdefault((pattern, method), f"{where} {method}")
    return {f"{name} {number}": key for number, (key, name) in enumerate(found.items())}


def test_every_pattern_takes_linear_time() -> None:
    patterns = every_pattern()
    names = " ".join(patterns)
    for expected in ("secrets._URL_PASSWORD.sub", "rollout_correlation._ANY_PREFIX", "_FORMATS", "requirements.py"):
        assert expected in names
    assert len(patterns) > 90
    slow = {}
    for name, (pattern, method) in patterns.items():
        if pattern.pattern in ONLY_OFFERED:
            continue
        texts = [*in_words_of(pattern), *of_all_kinds()]
        slow[name] = growing_too_fast(applied(pattern, method), texts)
    assert {name: text for name, text in slow.items() if text} == {}


def refusal(text: str, status: int = 404) -> ServerResponseError:
    return ServerResponseError("http://127.0.0.1:1/v1/responses", status, text.encode(errors="replace"))


def called_by(parser: ToolParser, text: str) -> Any:
    return parser(text, {})


USES: dict[str, Callable[[str], Any]] = {
    "mask_url_passwords": mask_url_passwords,
    "mask_url_passwords of a URL": lambda text: mask_url_passwords(f"http://{text}"),
    "mask_tree": lambda text: mask_tree({"a": text, "api_key": text}),
    "mask_message": lambda text: mask_message(text, {"api_key": text[:100], "b": text}),
    "masked_command": lambda text: masked_command([text, f"+a={text}"]),
    "masked_options": lambda text: masked_options({"a": text.replace("$", "S")}),
    "is_secret_key": is_secret_key,
    "harmless": harmless,
    "harmless_json": harmless_json,
    "shown": shown,
    "excerpt": lambda text: excerpt(text.encode(errors="replace")),
    "readable": readable,
    "malformation": lambda text: malformation(text.encode(errors="replace"), ValueError("odd")),
    "an error answer in words": lambda text: str(refusal(text)),
    "an error answer explained": lambda text: explained_error(refusal(text), SETTINGS),
    "an error answer of too long a prompt": lambda text: is_too_long(refusal(text, 400)),
    "an error answer as a failure": lambda text: failure_of(refusal(text), "agent"),
    "an answer that is not JSON": lambda text: str(MalformedResponseError("odd", text.encode(errors="replace"))),
    "retry_after_s": lambda text: retry_after_s({"retry-after": text}),
    "think blocks": taken_apart,
    "answers of reasoning_gym": extract_answer,
    "texts of string_match": lambda text: matches(text, CONTAINED),
    "programs in a text": extract_code,
    "programs in a fence": lambda text: extract_code(f"```\n{text}\n```"),
    "what programs print": lambda text: same_text(text, f"{text}0"),
    "what programs return": lambda text: same_value(f"[{text}]", "[1]"),
    "JSON": lambda text: problem_with(text, ANY_TREE, strict=True),
    "JSON in quotes": lambda text: problem_with(f'["{text}"]', ANY_TREE, strict=True),
    "JSON in lists": lambda text: problem_with(f"[{text}]", ANY_TREE, strict=True),
    "JSON objects": lambda text: problem_with(f'{{"a": {text}}}', ANY_TREE, strict=True),
    "a judge's answer": lambda text: last_label(text, LABELS),
    "an answer for a judge": lambda text: fenced(without_labels(text, LABELS)),
    "thoughts": lambda text: read_reasoning(text, is_open=True),
    **{f"tool calls of {name}": functools.partial(called_by, parser) for name, parser in TOOL_PARSERS.items()},
    "options, boxed": lambda text: extract_option(text, OPTIONS, "lenient_boxed"),
    "options in a box": lambda text: extract_option(rf"\boxed{{{text}}}", OPTIONS, "lenient_boxed"),
    "options after a colon": lambda text: extract_option(f"answer: {text}", OPTIONS, "lenient_answer_colon"),
    "options in Markdown": lambda text: extract_option(f"answer: {text}", OPTIONS, "lenient_answer_colon_md"),
}


@pytest.mark.parametrize("what", USES)
def test_whatever_masks_shows_or_reads_a_text_takes_linear_time(what: str) -> None:
    assert growing_too_fast(USES[what], of_all_kinds()) is None


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_every_puzzle_is_scored_in_linear_time() -> None:
    import reasoning_gym  # takes a second

    from resources_servers.reasoning_gym import scoring

    slow = {}
    for task in task_names():
        if task in FORMULAS:
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            entry = json.loads(json.dumps(reasoning_gym.create_dataset(task, size=1, seed=1)[0]))
        scorer = scoring.scorer_of(task)
        assert scorer is not None
        slow[task] = growing_too_fast(
            functools.partial(scoring._score, scorer, task, entry), of_all_kinds(), (4_096, 16_384)
        )
    assert len(slow) > 90
    assert {task: text for task, text in slow.items() if text} == {}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_every_instruction_is_checked_in_linear_time(name: str) -> None:
    (instruction,) = instructions_of([name], [next(arguments for other, arguments, *_ in CASES if other == name)])
    assert growing_too_fast(instruction.is_followed, of_all_kinds()) is None


COMPANY = made_up()
SOMEBODY = COMPANY["email_addresses"][0]["email_address"]
CALLS: dict[str, tuple[str, dict[str, str]]] = {
    "mails": ("email_send_email", {"recipient": SOMEBODY, "subject": "s", "body": "b"}),
    "mails with a long text": ("email_send_email", {"recipient": SOMEBODY, "subject": "s", "body": "b" * 10_000}),
    "forwarded mails": ("email_forward_email", {"email_id": "00000001", "recipient": SOMEBODY}),
    "answers": ("email_reply_email", {"email_id": "00000001", "body": "b"}),
    "events": (
        "calendar_create_event",
        {"event_name": "e", "participant_email": SOMEBODY, "event_start": "2023-12-01 09:00:00", "duration": "30"},
    ),
    "changes": ("calendar_update_event", {"event_id": "00000001", "field": "event_name", "new_value": "n"}),
    "deletions": ("calendar_delete_event", {"event_id": "00000001"}),
    "plots": (
        "analytics_create_plot",
        {"time_min": "", "time_max": "", "value_to_plot": "total_visits", "plot_type": "bar"},
    ),
    "searches": ("email_search_emails", {"query": "budget"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_many_calls_take_time_in_proportion_to_their_number(name: str) -> None:
    use = lambda text: after(COMPANY, [CALLS[name]] * (len(text) // 10))  # noqa: E731

    assert growing_too_fast(use, [Text("", "c")], (5_000, 20_000, 80_000)) is None


def test_forwarding_a_mail_again_and_again_takes_time_in_proportion() -> None:
    def forward(text: str) -> None:
        first = len(COMPANY["emails"]) - 1
        calls = [{"email_id": f"{first + number:08d}", "recipient": SOMEBODY} for number in range(len(text) // 10)]
        after(COMPANY, [("email_forward_email", call) for call in calls])

    assert growing_too_fast(forward, [Text("", "c")], (5_000, 20_000, 80_000)) is None


class Trickle(io.BytesIO):
    """A file whose reader hands out little at a time, as those of compressed files may."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(64)


def test_lines_of_compressed_files_are_read_in_linear_time() -> None:
    def read(text: str) -> None:
        data = text.encode(errors="replace")
        assert b"\n".join(_split(Trickle(data))) == data

    assert growing_too_fast(read, of_all_kinds()) is None
