"""Arguments of the commands that need no module of their own."""

from pydantic import BaseModel, ConfigDict


class BaseNeMoGymCLIConfig(BaseModel):
    """Parent of every command's arguments.

    The whole merged config is passed in, so keys that belong to others are ignored.
    """

    model_config = ConfigDict(use_attribute_docstrings=True, extra="ignore")
