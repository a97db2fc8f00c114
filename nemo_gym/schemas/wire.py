"""What the types that travel to and from model endpoints have in common, and the token ids that ride on them.

They describe messages written by others, so fields this version does not know are
kept and passed on. Validators are built on first use, which keeps imports cheap.

Token ids and log-probs, for training on exactly what was sampled, are one bundle: ids without log-probs (or the
reverse) would train on something else than what was generated, so part of a bundle is an error and never ignored.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NotRequired, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

_Model = TypeVar("_Model", bound=BaseModel)
REQUIRED_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TOKEN_FIELDS = (*REQUIRED_TOKEN_FIELDS, "routed_experts")
WEIGHT_FIELDS = ("weight_versions", "weight_segments")
"""Beside token ids, where known: the versions of the weights at the first and the last token; `[version, tokens]` of
each part of an answer that was interrupted."""
RoutedExperts = str | list[list[list[int]]]
"""Mixture-of-experts routing: an encoded envelope, or indices per token, layer and choice."""


class WireModel(BaseModel):
    """A JSON object that comes back out as it went in, unknown fields included.

    It has the methods of OpenAI's own types that programs call on answers.
    """

    model_config = ConfigDict(extra="allow", defer_build=True)

    def to_dict(
        self,
        *,
        mode: Literal["json", "python"] = "python",
        use_api_names: bool = True,
        exclude_unset: bool = True,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        warnings: bool = True,
    ) -> dict[str, Any]:
        """As OpenAI's SDK has it: `model_dump` of the fields that were set."""
        return self.model_dump(
            mode=mode,
            by_alias=use_api_names,
            exclude_unset=exclude_unset,
            exclude_defaults=exclude_defaults,
            exclude_none=exclude_none,
            warnings=warnings,
        )

    def to_json(
        self,
        *,
        indent: int | None = 2,
        use_api_names: bool = True,
        exclude_unset: bool = True,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        warnings: bool = True,
    ) -> str:
        """As OpenAI's SDK has it: the same as JSON, for people to read."""
        return self.model_dump_json(
            indent=indent,
            by_alias=use_api_names,
            exclude_unset=exclude_unset,
            exclude_defaults=exclude_defaults,
            exclude_none=exclude_none,
            warnings=warnings,
        )


class TaggedModel(WireModel):
    """A JSON object that readers recognise by fields which have defaults here.

    Those fields are dumped even under `exclude_unset`, so what is built in Python
    with the defaults is complete for the provider or server that receives it.
    """

    always_dumped: ClassVar[tuple[str, ...]] = ("type",)

    def model_post_init(self, context: Any, /) -> None:
        """Count the fields that readers need as given."""
        self.model_fields_set.update(self.always_dumped)


def fastapi_body(model: type[_Model]) -> type[_Model]:
    """Decorates a model that is built on first use and serves as body or answer of a FastAPI route.

    FastAPI silences a warning of pydantic's while it makes its adapter of the model. With
    `defer_build` left in the model's config the adapter would be built, and warn, later.
    """
    model.model_config["defer_build"] = False
    return model


def fields_of(value: Any) -> Any:
    """A model of another library by the fields that were set; anything else as it is."""
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, BaseModel) else value


class OrObject:
    """Marks a JSON object, or a list of them, that Python programs may give as models of another library.

    What comes as JSON is none of these and is read without calling Python.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        plain = handler(source)
        return core_schema.json_or_python_schema(
            plain, core_schema.no_info_before_validator_function(_without_objects, plain)
        )


def _without_objects(value: Any) -> Any:
    if isinstance(value, list):
        return [fields_of(part) for part in value]
    return value if isinstance(value, WireModel) else fields_of(value)


class TextOrList:
    """Marks a `str | list[...]`, so that errors say `content.list.1` instead of spelling out the list's type."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text_type, list_type = get_args(source)
        return core_schema.union_schema(
            [(handler.generate_schema(text_type), "text"), (handler.generate_schema(list_type), "list")],
            mode="left_to_right",
        )


class TokenIDLogProbMixin(BaseModel):
    """What an item or message for training carries in addition."""

    model_config = ConfigDict(defer_build=True)

    prompt_token_ids: list[int]
    """Every token the model saw."""
    generation_token_ids: list[int]
    """The tokens it sampled."""
    generation_log_probs: list[float | None]
    """The log-probability of each sampled token; null where it was NaN, which JSON cannot say."""
    routed_experts: str | list[Any] | None = None
    """Mixture-of-experts routing: an encoded envelope, or nested lists of expert indices."""


class TokenIDLogProbTypedDictMixin(TypedDict):
    """The same for messages that stay plain dicts."""

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float | None]
    routed_experts: NotRequired[str | list[Any] | None]


def carries_token_ids(fields: Mapping[str, Any]) -> bool:
    """Whether `fields` hold a complete bundle; a null counts as absent.

    Raises:
        PydanticCustomError: only part of a bundle is there.
    """
    present = [name for name in TOKEN_FIELDS if fields.get(name) is not None]
    if not present:
        return False
    missing = [name for name in REQUIRED_TOKEN_FIELDS if name not in present]
    if missing:
        raise PydanticCustomError(
            "token_metadata_incomplete",
            "Token metadata must include all required fields; missing: {missing}. Supply these beside {present}, or "
            "leave all out",
            {"present": ", ".join(present), "missing": ", ".join(missing)},
        )
    return True
