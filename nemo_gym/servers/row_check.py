"""Would a server take these rows? Held against the types that its handlers read, without calling one."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from nemo_gym.schemas.run_requests import BaseVerifyRequest, RowFault, faults_in
from nemo_gym.servers.routes import models_of

_SOME_RESPONSE = {
    "id": "resp_0",
    "created_at": 0,
    "model": "none",
    "object": "response",
    "status": "completed",
    "output": [
        {
            "id": "msg_0",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
Handler = Callable[..., Any]


def row_faults(rows: Iterable[Mapping[str, Any]], handlers: Iterable[Handler]) -> list[list[RowFault]]:
    """For each row what the types of these handlers refuse in it; the same place is named once."""
    models = [model for handler in handlers if (model := _body_type(handler)) is not None]
    return [list({fault.where: fault for model in models for fault in _faults(row, model)}.values()) for row in rows]


def _body_type(handler: Handler) -> type[BaseModel] | None:
    """The model that a handler reads; None when it takes something else, or more."""
    bodies = [model for name, model in models_of(handler).items() if name != "return"]
    return bodies[0] if len(bodies) == 1 else None


def _faults(row: Mapping[str, Any], model: type[BaseModel]) -> list[RowFault]:
    sent = {**row, "response": _SOME_RESPONSE} if issubclass(model, BaseVerifyRequest) else row
    try:
        model.model_validate_json(orjson.dumps(sent))
    except ValidationError as error:
        return faults_in(error, row, model.model_fields)
    except Exception:  # noqa: BLE001 - an author's validator may raise anything, and perhaps because of our response
        return []
    return []
