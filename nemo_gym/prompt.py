"""PUBLIC: prompt templates that turn the fields of a row into messages.

A template is a YAML file with `user` and, optionally, `system`: Python format strings over the row's
top-level fields (`{question}`, `{meta[key]}`, `{n:03d}`; a literal brace is doubled).
"""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails

from nemo_gym.errors import ConfigError, ConfigPathNotFoundError, similar_names
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.paths import candidates, make_folder, refuse_odd_file, resolve_for_reading, write_aside
from nemo_gym.row_files import read_rows
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig
from nemo_gym.schemas.path_text import PathText

Messages = list[dict[str, str]]

PROMPT_CONFIG_USED_KEY = "prompt_config_used"
_CACHED_PROMPTS = 64


class PromptFieldError(ConfigError, KeyError):
    """A template names a field that a row does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class PromptAttributeError(ConfigError, AttributeError):
    """A template asks for an attribute (`{meta.key}`) that a row's value does not have."""


class PromptTemplateError(ConfigError, ValueError):
    """A template that cannot be filled, whatever the row."""


class PromptConflictError(ConfigError, ValueError):
    """Rows that bring an input of their own although a prompt is to be filled in."""


class PromptConfig(BaseModel):
    """One prompt template."""

    user: str
    system: str | None = None


class MaterializePromptsConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_materialize_prompts`."""

    input_jsonl_fpath: PathText
    """Rows to fill the template with: .jsonl, plain or compressed, .csv or .parquet."""
    prompt_config: PathText
    """The YAML file of the template: `user`, optionally `system`."""
    output_jsonl_fpath: PathText
    """Where the rows with their messages go."""


def load_prompt_config(config_path: str | Path) -> PromptConfig:
    """Read a template; the same object again as long as the file has not changed.

    A relative path is looked for like an input file.

    Raises:
        ConfigPathNotFoundError: there is no such file.
        ConfigError: it is not YAML.
        pydantic.ValidationError: it is not a mapping with a `user` text.
    """
    path = _resolve_path(config_path)
    if not path.is_file():
        looked = ", ".join(map(str, candidates(config_path)))
        raise ConfigPathNotFoundError(f"prompt file {str(config_path)!r} not found (looked for {looked})")
    stat = path.stat()
    return _load(path, stat.st_mtime_ns, stat.st_size)


def load_prompt_or_explain(config_path: str | Path) -> PromptConfig:
    """The same for a command: whatever is wrong with the file is the user's to fix."""
    try:
        return load_prompt_config(config_path)
    except ValidationError as error:
        faults = "; ".join(map(_fault, error.errors()))
        raise PromptTemplateError(
            f"prompt file {str(config_path)!r}: {faults}. It is YAML with a text `user` and, if wanted, a text `system`"
        ) from error


def _resolve_path(path: str | Path) -> Path:
    return resolve_for_reading(path, Path.is_file)


def _fault(fault: Any) -> str:
    place = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        other = next(iter(similar_names(place, fault["input"])), None) if isinstance(fault["input"], dict) else None
        return f"it has no `{place}`" + (f" (is `{other}` meant to be it?)" if other else "")
    return f"{place}: {fault['msg']}" if place else "it is no mapping"


@lru_cache(_CACHED_PROMPTS)
def _load(path: Path, modified_ns: int, size: int) -> PromptConfig:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PromptTemplateError(f"prompt file {path} is not YAML: {error}") from error
    try:
        return PromptConfig.model_validate(content)
    except ValidationError as error:
        details = [
            InitErrorDetails(type=fault["type"], loc=fault["loc"], input=fault["input"], ctx=fault.get("ctx", {}))
            for fault in error.errors()
        ]
        raise ValidationError.from_exception_data(f"prompt file {path}", details) from None


load_prompt_config.cache_clear = _load.cache_clear  # type: ignore[attr-defined]
load_prompt_config.cache_info = _load.cache_info  # type: ignore[attr-defined]


def fill_prompt(prompt: PromptConfig, row: Mapping[str, Any]) -> Messages:
    """The messages for one row: the system message if the template has one, then the user's.

    Raises:
        KeyError: the row lacks a field; the message names it and lists the fields there are.
        ValueError: the template has positional fields or unbalanced braces.
    """
    templates = [("system", prompt.system), ("user", prompt.user)]
    return [{"role": role, "content": _fill(text, row)} for role, text in templates if text is not None]


def _fill(template: str, row: Mapping[str, Any]) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        raise PromptFieldError(
            f"the prompt names the field {error.args[0]!r}, which the row does not have; its fields are {list(row)}"
        ) from error
    except AttributeError as error:
        raise PromptAttributeError(
            f"the prompt cannot be filled: {error}; a key inside an object is written {{field[key]}}"
        ) from error
    except (ValueError, IndexError, TypeError) as error:
        raise PromptTemplateError(
            f"the prompt {template!r} cannot be filled: {error}; fields are written {{name}}, literal braces {{{{ }}}}"
        ) from error


def has_own_input(row: Mapping[str, Any]) -> bool:
    """Whether a row brings messages of its own, so that no prompt may replace them."""
    params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
    return isinstance(params, Mapping) and bool(params.get("input"))


def validate_prompt_compatibility(rows: Iterable[Mapping[str, Any]], prompt_config: PromptConfig) -> None:
    """Refuse rows that bring messages of their own.

    Raises:
        ValueError: naming the positions of all such rows, counted from 0.
    """
    violating = [position for position, row in enumerate(rows) if has_own_input(row)]
    if violating:
        raise PromptConflictError(conflict_message(violating))


def conflict_message(violating: Iterable[int], where: str = "") -> str:
    """What to say about rows at these positions (counted from 0) that bring messages of their own."""
    return (
        "prompt_config and a filled responses_create_params.input are mutually exclusive; "
        f"leave out the one or empty the other{where}. Violating rows: {list(violating)}"
    )


def apply_prompt_to_row(row: Mapping[str, Any], prompt_config: PromptConfig) -> dict[str, Any]:
    """A new row with the messages as `responses_create_params.input`; its other parameters stay."""
    params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
    kept = params if isinstance(params, Mapping) else {}
    return {**row, RESPONSES_CREATE_PARAMS_KEY_NAME: {**kept, "input": fill_prompt(prompt_config, row)}}


def materialize_prompts(input_jsonl: str | Path, prompt_config: str | Path, output_jsonl: str | Path) -> int:
    """Write every row with its messages, and with the template's path as `prompt_config_used`.

    All rows are checked first; the output appears as a whole or not at all.

    Returns:
        The number of rows.
    """
    prompt = load_prompt_or_explain(prompt_config)
    source = resolve_for_reading(input_jsonl, Path.is_file)
    if not source.is_file():
        raise ConfigPathNotFoundError(f"input file {str(input_jsonl)!r} not found (looked for {source})")
    output = Path(output_jsonl)
    _check_output(output)
    _check_rows(source, prompt)
    used = {PROMPT_CONFIG_USED_KEY: str(_resolve_path(prompt_config))}
    make_folder(output.parent)
    count = 0
    with write_aside(output) as file:
        for _, row in read_rows(source):
            file.write(json.dumps(apply_prompt_to_row(row, prompt) | used).encode() + b"\n")
            count += 1
    return count


def _check_output(path: Path) -> None:
    """Only rows that were made by this function are replaced: nobody's data are written over."""
    refuse_odd_file(path, "output_jsonl_fpath")
    if not path.exists():
        return
    with path.open("rb") as file:
        first = file.readline()
    if first.strip() and PROMPT_CONFIG_USED_KEY.encode() not in first:
        raise ConfigError(
            f"+output_jsonl_fpath={path} holds something that this command did not write (no {PROMPT_CONFIG_USED_KEY} "
            "in its first line), so it stays as it is; name another file, or move it away yourself"
        )


def _check_rows(source: Path, prompt: PromptConfig) -> None:
    positions, lines = [], []
    for position, (line, row) in enumerate(read_rows(source)):
        if has_own_input(row):
            positions.append(position)
            lines.append(line.number)
            continue
        try:
            fill_prompt(prompt, row)
        except (PromptFieldError, PromptAttributeError, PromptTemplateError) as error:
            raise type(error)(f"{source}, line {line.number}: {error}") from error
    if positions:
        raise PromptConflictError(conflict_message(positions, f" (lines {lines} of {source})"))


def materialize_prompts_cli() -> None:
    """What `ng_materialize_prompts` does."""
    import_module("nemo_gym.cli").run_command("materialize_prompts")
