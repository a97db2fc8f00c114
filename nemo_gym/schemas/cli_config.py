"""Arguments of the commands that need no module of their own."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class BaseNeMoGymCLIConfig(BaseModel):
    """Parent of every command's arguments.

    The whole merged config is passed in, so keys that belong to others are ignored.
    A field's docstring is what the help page says about the option.
    """

    # A help page must come at once, and every command reads the fields of all: validators are built when
    # they are first needed, and field docstrings are read by the help page instead of when a class is made.
    model_config = ConfigDict(extra="ignore", defer_build=True)


class HelpConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_help`."""


class VersionConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_version`."""

    json_format: bool = Field(False, alias="json")  # `json` itself is a method of every pydantic model
    """Print one JSON object instead of text."""


class DumpConfigConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_dump_config`."""


class ValidateConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_validate`."""


class CompletionConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_completion`."""

    shell: Literal["bash", "zsh"]
    """The shell to print a completion script for."""
