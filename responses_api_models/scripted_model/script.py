"""What a script may say: the shape of the YAML file, checked key by key.

```yaml
seed: 0
rules:      what to reply to what; the first rule that matches is used
answers:    right (and sometimes wrong) answers from a JSONL file
latency_s:  how long answers take
usage:      how many tokens they claim to cost
faults:     what goes wrong, how often
```
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from nemo_gym import resolve_for_reading
from nemo_gym.config_types import ConfigError
from responses_api_models.scripted_model.script_faults import Fault
from responses_api_models.scripted_model.script_match import Match, StrictModel


class ToolCallReply(StrictModel):
    """A tool call."""

    name: str
    arguments: dict[str, Any] | str | None = None
    """A mapping; or text that is sent as it is, so that it may be malformed; left out: drawn from the conversation."""


class Reply(StrictModel):
    """What the model says; without any key it says nothing at all."""

    reasoning: str | None = None
    text: str | None = None
    tool_call: ToolCallReply | None = None
    tool_calls: list[ToolCallReply] = Field(default_factory=list)
    incomplete: str | None = Field(default=None, pattern="^(max_output_tokens|content_filter)$")
    """Claim that the answer was cut off for this reason."""

    @property
    def calls(self) -> list[ToolCallReply]:
        """All tool calls."""
        return [*([self.tool_call] if self.tool_call else []), *self.tool_calls]


class Rule(StrictModel):
    """`match` → `reply`."""

    match: Match = Field(default_factory=Match)
    reply: Reply
    probability: float = Field(default=1.0, ge=0, le=1)
    """How often the rule is used when it matches; else the next one is tried."""


class Answers(StrictModel):
    """Answers to the questions in a JSONL file."""

    jsonl: str
    """Looked for beside the script, then like every relative path."""
    question_field: str = "question"
    """Where a row has its question; dots go deeper, numbers count list items."""
    answer_field: str = "answer"
    template: str = "{answer}"
    probability_right: float = Field(default=1.0, ge=0, le=1)
    wrong_template: str | None = None
    """For wrong answers; `template` when left out."""


class Distribution(StrictModel):
    """A number that varies from request to request: exactly one of the four kinds."""

    fixed: float | None = Field(default=None, ge=0)
    uniform: tuple[float, float] | None = None
    """From the first to the second number."""
    exponential: float | None = Field(default=None, gt=0)
    """The mean."""
    lognormal: tuple[float, float] | None = None
    """Median, and the standard deviation of the logarithm."""
    max: float | None = Field(default=None, ge=0)
    """Nothing is larger than this."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Distribution":
        kinds = ("fixed", "uniform", "exponential", "lognormal")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(kinds)}, not {given or 'none'}")
        if self.uniform and not 0 <= self.uniform[0] <= self.uniform[1]:
            raise ValueError(f"uniform needs two numbers in ascending order, from 0, not {list(self.uniform)}")
        if self.lognormal and (self.lognormal[0] <= 0 or self.lognormal[1] < 0):
            raise ValueError(f"lognormal needs a median above 0 and a deviation from 0, not {list(self.lognormal)}")
        return self


def _number_is_fixed(value: Any) -> Any:
    return {"fixed": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


FlexibleNumber = Annotated[Distribution, BeforeValidator(_number_is_fixed)]


class Latency(Distribution):
    """Seconds until an answer."""

    per_output_token: float = Field(default=0.0, ge=0)
    """Added for every token of the answer."""


class Usage(StrictModel):
    """What `usage` claims; counted with the toy tokenizer unless said otherwise."""

    report: bool = True
    """False: answers have no `usage`, as with some endpoints."""
    details: bool = True
    """False: cached and reasoning tokens are not told."""
    input_tokens: FlexibleNumber | None = None
    output_tokens: FlexibleNumber | None = None


class Script(StrictModel):
    """A whole script; an empty one leaves the model to its own devices."""

    seed: int | str = 0
    """For requests that bring no seed of their own."""
    rules: list[Rule] = Field(default_factory=list)
    answers: Answers | None = None
    latency_s: Annotated[Latency, BeforeValidator(_number_is_fixed)] | None = None
    usage: Usage = Field(default_factory=Usage)
    faults: list[Fault] = Field(default_factory=list)


def load_script(source: str | dict[str, Any] | None) -> tuple[Script, Path]:
    """The script in a file or a mapping, and the folder its relative paths start from.

    Raises:
        ConfigError: it cannot be read, or says something it may not say; the message names file and key.
    """
    if source is None or isinstance(source, dict):
        return _validated(source or {}, "the `script` block"), Path.cwd()
    path = resolve_for_reading(source)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the script {path} cannot be read: {error.strerror}; correct `script`") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the script {path} is not YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(
            f"the script {path} must be a mapping with keys such as `rules`, not a {type(content).__name__}"
        )
    return _validated(content or {}, f"the script {path}"), path.parent


def _validated(content: dict[str, Any], where: str) -> Script:
    try:
        return Script.model_validate(content)
    except ValidationError as error:
        problems = "\n".join(f"  - {_problem(item)}" for item in error.errors(include_url=False))
        raise ConfigError(f"{where} does not work:\n{problems}") from error


def _problem(item: Any) -> str:
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
    where = parts.removeprefix(".") or "the whole script"
    if item["type"] != "extra_forbidden":
        return f"{where}: {item['msg'].removeprefix('Value error, ')}"
    alike = get_close_matches(str(item["loc"][-1]), _known_keys(StrictModel), n=1)
    return f"{where}: there is no such key" + (f"; did you mean `{alike[0]}`?" if alike else "")


def _known_keys(model: type[StrictModel]) -> set[str]:
    """Every key that some part of a script may have."""
    inner = [_known_keys(part) for part in model.__subclasses__()]
    return set(model.model_fields).union(*inner)
