"""`faults:` of a script: what can go wrong with an answer, and when."""

from typing import Annotated, Literal

from pydantic import Field

from responses_api_models.scripted_model.script_match import Match, StrictModel


class FaultBase(StrictModel):
    """When a fault strikes: where everything given agrees."""

    match: Match = Field(default_factory=Match)
    probability: float = Field(default=1.0, ge=0, le=1)
    """Drawn anew each time a request is repeated, so that trying again helps."""
    every: int | None = Field(default=None, ge=1)
    """Only the nth, 2nth, ... of the matching requests that reach this process."""
    times: int | None = Field(default=None, ge=1)
    """So often in the life of the process."""
    times_per_request: int | None = Field(default=None, ge=1)
    """So often for equal requests; 1: the second try succeeds."""


class StatusFault(FaultBase):
    """An error status instead of an answer."""

    kind: Literal["status"]
    status: int = Field(ge=400, le=599)
    message: str | None = None
    retry_after: float | None = Field(default=None, ge=0)
    """Seconds, in the header `Retry-After`."""


class DisconnectFault(FaultBase):
    """The connection is closed without a word."""

    kind: Literal["disconnect"]


class HangFault(FaultBase):
    """No answer for a long time, then the connection is closed."""

    kind: Literal["hang"]
    seconds: float = Field(default=3600.0, gt=0)


class MalformedFault(FaultBase):
    """A complete answer with status 200 that makes no sense."""

    kind: Literal["malformed"]
    body: str | None = None
    """What is sent; left out: the first half of the right answer."""


class TruncateFault(FaultBase):
    """The connection breaks in the middle of the answer."""

    kind: Literal["truncate"]
    keep: float = Field(default=0.5, ge=0, lt=1)
    """The share of the answer that gets through."""


class SlowDripFault(FaultBase):
    """The right answer, in many small pieces."""

    kind: Literal["slow_drip"]
    seconds: float = Field(default=10.0, gt=0)
    """From the first piece to the last."""
    pieces: int = Field(default=20, ge=2)


Fault = Annotated[
    StatusFault | DisconnectFault | HangFault | MalformedFault | TruncateFault | SlowDripFault,
    Field(discriminator="kind"),
]
