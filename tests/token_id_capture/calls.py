"""Calls of a rollout, made up."""

from typing import Any

from nemo_gym.token_id_capture.records import TokenEntry


def call(call_id: str, prompt: list[int], generation: list[int], **more: Any) -> TokenEntry:
    given: dict[str, Any] = {
        "rollout_id": "3-1",
        "model_call_id": call_id,
        "model": "m",
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.5] * len(generation),
        "output_items": [message(call_id)],
        "token_item_index": 0,
    }
    return TokenEntry(**{**given, **more})


def message(text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part], **more}
