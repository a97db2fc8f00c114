"""What messages of the Responses API are made of: input parts, output parts, summaries.

Input parts stay plain dicts, output parts are models; server code indexes the former
and reads attributes of the latter.
"""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from nemo_gym.schemas.wire import TaggedModel

_OPEN = ConfigDict(extra="allow")


@with_config(_OPEN)
class NeMoGymResponseInputText(TypedDict):
    """Text for the model."""

    text: str
    type: Literal["input_text"]


@with_config(_OPEN)
class NeMoGymResponseInputImage(TypedDict):
    """An image, by URL (also a data URL) or by the id of an uploaded file."""

    type: Literal["input_image"]
    detail: NotRequired[str | None]
    image_url: NotRequired[str | None]
    file_id: NotRequired[str | None]


@with_config(_OPEN)
class NeMoGymResponseInputFile(TypedDict):
    """A file, inline, by URL or by id."""

    type: Literal["input_file"]
    file_data: NotRequired[str | None]
    file_id: NotRequired[str | None]
    file_url: NotRequired[str | None]
    filename: NotRequired[str | None]


@with_config(_OPEN)
class NeMoGymResponseInputAudio(TypedDict):
    """Sound: base64 `data` and its `format`."""

    type: Literal["input_audio"]
    input_audio: dict[str, Any]


@with_config(_OPEN)
class NeMoGymResponseInputVideo(TypedDict):
    """A video, in exactly one of `video_url` and `video`."""

    type: Literal["input_video"]
    video_url: NotRequired[Any]
    video: NotRequired[Any]


def _has_one_source(part: NeMoGymResponseInputVideo) -> NeMoGymResponseInputVideo:
    if bool(part.get("video_url")) == bool(part.get("video")):
        raise PydanticCustomError("input_video_source", "input_video needs exactly one non-empty video_url or video")
    return part


NeMoGymResponseInputPart: TypeAlias = Annotated[
    NeMoGymResponseInputText
    | NeMoGymResponseInputImage
    | NeMoGymResponseInputFile
    | NeMoGymResponseInputAudio
    | Annotated[NeMoGymResponseInputVideo, AfterValidator(_has_one_source)],
    Field(discriminator="type"),
]
INPUT_PART_TYPES = ("input_text", "input_image", "input_file", "input_audio", "input_video")


class NeMoGymResponseOutputText(TaggedModel):
    """Text the model wrote. Absent `annotations` mean there are none."""

    always_dumped = ("annotations", "type")

    annotations: list[Any] = Field(default_factory=list)
    text: str
    type: Literal["output_text"] = "output_text"
    logprobs: list[Any] | None = None


class NeMoGymResponseOutputRefusal(TaggedModel):
    """What the model said instead of answering."""

    refusal: str
    type: Literal["refusal"] = "refusal"


NeMoGymResponseOutputPart: TypeAlias = Annotated[
    NeMoGymResponseOutputText | NeMoGymResponseOutputRefusal, Field(discriminator="type")
]
OUTPUT_PART_TYPES = ("output_text", "refusal")


class NeMoGymSummary(TaggedModel):
    """One paragraph of summarised reasoning."""

    text: str
    type: Literal["summary_text"] = "summary_text"


class NeMoGymReasoningText(TaggedModel):
    """One paragraph of reasoning as the model wrote it."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"
