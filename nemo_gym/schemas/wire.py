"""What the types that travel to and from model endpoints have in common.

They describe messages written by others, so fields this version does not know are
kept and passed on. Validators are built on first use, which keeps imports cheap.
"""

from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class WireModel(BaseModel):
    """A JSON object that comes back out as it went in, unknown fields included."""

    model_config = ConfigDict(extra="allow", defer_build=True)


class TaggedModel(WireModel):
    """A JSON object that readers recognise by fields which have defaults here.

    Those fields are dumped even under `exclude_unset`, so what is built in Python
    with the defaults is complete for the provider or server that receives it.
    """

    always_dumped: ClassVar[tuple[str, ...]] = ("type",)

    def model_post_init(self, context: Any, /) -> None:
        """Count the fields that readers need as given."""
        self.__pydantic_fields_set__.update(self.always_dumped)


_Model = TypeVar("_Model", bound=BaseModel)


def fastapi_body(model: type[_Model]) -> type[_Model]:
    """Decorates a model that is built on first use and serves as body or answer of a FastAPI route.

    FastAPI silences a warning of pydantic's while it makes its adapter of the model. With
    `defer_build` left in the model's config the adapter would be built, and warn, later.
    """
    model.model_config["defer_build"] = False
    return model


class TextOrList:
    """Marks a `str | list[...]`, so that errors say `content.list.1` instead of spelling out the list's type."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text_type, list_type = get_args(source)
        return core_schema.union_schema(
            [(handler.generate_schema(text_type), "text"), (handler.generate_schema(list_type), "list")],
            mode="left_to_right",
        )
