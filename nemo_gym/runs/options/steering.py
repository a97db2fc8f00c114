"""What a run may be told about its pace: caps that adapt, the order of rows, what ends its tail, and its repeats.

Imported for every help page, so it stays light.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig
from nemo_gym.schemas.path_text import PathText

AUTO = "auto"
DEFAULT_GRACE_S = 60.0
_WRITTEN = re.compile(r"auto(?::(\d+)-(\d+))?")
STATISTICS_OF_A_TASK = (
    "n",
    "mean",
    "std",
    "min",
    "max",
    "pass_rate",
    "pass_rate_ci_low",
    "pass_rate_ci_high",
    "pass_rate_ci_width",
    "repeats",
)
"""The names that `stop_repeats_when` may use."""


@dataclass(frozen=True)
class Bounds:
    """Between which numbers a cap that adapts stays."""

    low: int = 1
    high: int = 1024

    @classmethod
    def of_text(cls, text: str) -> "Bounds":
        """The bounds that are written as `auto` or `auto:16-1024`.

        Raises:
            ValueError: they are not, or make no sense.
        """
        found = _WRITTEN.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is neither a number, nor auto, nor bounds for it such as auto:16-1024")
        if found[1] is None:
            return cls()
        low, high = int(found[1]), int(found[2])
        if low > high:
            raise ValueError(f"{text!r} has its bounds upside down; write auto:{high}-{low}")
        if low < 1:
            raise ValueError(f"{text!r}: at least one rollout has to be in flight; write auto:1-{max(1, high)}")
        return cls(low, high)

    def within(self, cap: float) -> int:
        """The whole number nearest to `cap` that the bounds allow."""
        return max(self.low, min(self.high, int(cap)))


def checked_cap(cap: Any) -> Any:
    """A cap as it was given, when it can be one; numbers that are written as text become numbers.

    Raises:
        ValueError: a number below 0, or text that is neither a number nor bounds.
    """
    if isinstance(cap, int) and cap < 0:
        raise ValueError(f"{cap} is less than 0; a number of rollouts is wanted, 0 for any number, or auto")
    if not isinstance(cap, str):
        return cap
    text = cap.strip()
    if text.isdigit():
        return int(text)
    Bounds.of_text(text)
    return text


def most_of(cap: int | str) -> int | None:
    """The highest number that a cap allows; None for any number."""
    return Bounds.of_text(cap).high if isinstance(cap, str) else cap or None


class SteeringOptions(BaseNeMoGymCLIConfig):
    """Arguments that say in which order rollouts are made, and which of them are not waited for, or not made."""

    order: Literal["input", "longest_first"] = "input"
    """In which order rollouts start: that of the input, or those that take longest first, so that the end of the run
    does not wait for them. How long a task takes is known from durations_from, else from its other repeats."""
    durations_from: PathText | None = Field(default=None, min_length=1)
    """The rollouts of an earlier run of the same rows, whose durations order=longest_first goes by."""
    finish_at: float | None = Field(default=None, gt=0, le=1)
    """When this fraction of the run is done and nothing is left to start, rollouts still in flight get
    straggler_grace_s and then end as failures of class straggler: not scored, and left to be resumed."""
    straggler_grace_s: float | None = Field(default=None, ge=0)
    """What rollouts in flight get once finish_at is reached; 60 seconds when unset."""
    stop_repeats_when: str | None = Field(default=None, min_length=1)
    """Make no more repeats of a task once this holds for it, such as 'pass_rate_ci_width < 0.2'. Names: n, mean, std,
    min, max, pass_rate, pass_rate_ci_low, pass_rate_ci_high, pass_rate_ci_width, repeats."""

    @field_validator("stop_repeats_when")
    @classmethod
    def _can_be_understood(cls, value: str | None) -> str | None:
        if value is not None:
            from nemo_gym.runs.select import Expression

            Expression.parse(value, "+stop_repeats_when").require_known(STATISTICS_OF_A_TASK)
        return value

    @model_validator(mode="after")
    def _go_together(self) -> "SteeringOptions":
        if self.straggler_grace_s is not None and self.finish_at is None:
            raise ValueError(
                f"straggler_grace_s={self.straggler_grace_s:g} has no effect without finish_at; add +finish_at=0.99"
            )
        if self.durations_from is not None and self.order != "longest_first":
            raise ValueError("durations_from has no effect without order=longest_first; add +order=longest_first")
        repeats = getattr(self, "num_repeats", None)
        most = max(repeats.values(), default=1) if isinstance(repeats, Mapping) else repeats
        if self.stop_repeats_when is not None and most == 1:
            raise ValueError(
                "stop_repeats_when has no effect with num_repeats=1; ask for more, such as +num_repeats=16"
            )
        return self

    @property
    def grace_s(self) -> float:
        """`straggler_grace_s`, or what applies when it is unset."""
        return DEFAULT_GRACE_S if self.straggler_grace_s is None else self.straggler_grace_s
