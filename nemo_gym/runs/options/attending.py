"""How a run is attended to: whether somebody sits at its terminal, and who is told when it ends."""

import shlex
import shutil

from pydantic import Field, field_validator, model_validator

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig


class AttendingOptions(BaseNeMoGymCLIConfig):
    """Arguments of the commands that collect rollouts, for the command itself: they are no part of the run."""

    detach: bool = Field(default=False, exclude=True)
    """Leave the terminal: the run goes on by itself and writes what it says to a log. ng_attach shows how it is doing,
    ng_control steers it."""
    log_fpath: str | None = Field(default=None, min_length=1, exclude=True)
    """With detach: the log, which is continued if it is there. <output without ending>.log when unset."""
    on_end: str | None = Field(default=None, exclude=True)
    """A command to run when the run has ended, however it did: split into words as a shell would, without a shell, and
    given the summary (that of +json=true) on its stdin. It has a minute; what becomes of it changes no exit code."""

    @field_validator("on_end")
    @classmethod
    def _can_be_run(cls, value: str | None) -> str | None:
        if value is None:
            return None
        words = words_of(value)
        if not words:
            raise ValueError("there is no command in it")
        if shutil.which(words[0]) is None:
            raise ValueError(f"there is no program {words[0]!r}")
        return value

    @model_validator(mode="after")
    def _only_a_detached_run_has_a_log(self) -> "AttendingOptions":
        if self.log_fpath is not None and not self.detach:
            raise ValueError("log_fpath is the log of a run with +detach=true; without it, redirect stderr")
        return self


def words_of(command: str) -> list[str]:
    """The words of a command line, as a shell would split it.

    Raises:
        ValueError: a quotation has no end.
    """
    return shlex.split(command)
