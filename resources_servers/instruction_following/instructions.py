"""What an instruction is: an id, the arguments it takes, and a check of a text."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Relation = Literal["less than", "at least"]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Words = Annotated[
    list[Text], Field(min_length=1), BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class Instruction(BaseModel):
    """One instruction with its arguments; subclasses say when it is followed."""

    model_config = ConfigDict(extra="forbid")

    ID: ClassVar[str]

    def is_followed(self, text: str) -> bool:
        """Whether `text`, which is not empty, does what was asked for."""
        raise NotImplementedError


def holds(count: int, relation: Relation, limit: int) -> bool:
    """Whether a count is as many as asked for."""
    return count < limit if relation == "less than" else count >= limit
