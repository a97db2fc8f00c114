"""A harness that knows no tokens, a model server that captures them, and what records and trainers get of it."""

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from nemo_gym.base_responses_api_model import CaptureStore
from nemo_gym.rl import completion_of_capture
from nemo_gym.server_utils import ServerClient, rollout_path_prefix
from nemo_gym.token_id_capture.delivery import finalize_rollout_token_capture, retire_rollout_token_capture
from nemo_gym.token_id_capture.store import TokenCaptureStore
from responses_api_models.token_model.app import TokenModel, TokenModelConfig
from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.token_model.tests.stand_in import StandInEngine, serving, tokenizer_folder, tool_user

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


Harness = Callable[..., None]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """Runs a conversation in Chat Completions, sending back nothing but roles, texts and tool calls."""
    settings = {
        "token_id_capture": {"enabled": True, "dir": str(tmp_path / "tokens")},
        "observability_enabled": True,
        "model_call_capture_dir": str(tmp_path / "calls"),
    }
    with ExitStack() as up:

        def run(
            rollout_id: str, *, is_canonical: bool = True, questions: tuple[str, ...] = ("What is there?",)
        ) -> None:
            folder = tokenizer_folder(tmp_path / rollout_id)
            say = tool_user("look", "{}", rounds=2, thinks=False)
            engine = StandInEngine(ChatTokenizer(folder), say, is_canonical=is_canonical)
            config = TokenModelConfig(
                name="policy",
                host="127.0.0.1",
                port=1,
                entrypoint="app.py",
                base_url=[f"{up.enter_context(serving(engine.app()))}/v1"],
                api_key="key",
                model="m",
                tokenizer=str(folder),
            )
            client = MagicMock(spec=ServerClient, global_config_dict=settings)
            model = TokenModel(config=config, server_client=client)
            root = up.enter_context(serving(model.complete_app()))
            url = f"{root}{rollout_path_prefix(rollout_id, token_capture=True)}/v1/chat/completions"
            with httpx.Client(timeout=60) as caller:
                for question in questions:
                    _talk(caller, url, question)

        yield run


def _talk(client: httpx.Client, url: str, question: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(3):
        answer = client.post(url, json={"messages": messages, "tools": TOOLS})
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["message"]
        messages.append({key: said[key] for key in ("role", "content", "tool_calls") if said.get(key) is not None})
        for call in said.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a room"})


def result_of(rollout_id: str) -> dict[str, Any]:
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
    return {"_ng_rollout_id": rollout_id, "reward": 1.0, "response": {"output": [text]}}


def test_one_conversation_gets_its_tokens_back_and_is_retired(harness: Harness, tmp_path: Path) -> None:
    harness("7-0")
    store, result = TokenCaptureStore(tmp_path / "tokens"), result_of("7-0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = asyncio.run(finalize_rollout_token_capture(result, store))

    items = result["response"]["output"]
    assert [item["type"] for item in items] == ["function_call", "function_call", "message"]
    assert all(item["generation_token_ids"] for item in items)
    assert "mask_sample" not in result
    assert result["_ng_token_capture"]["n_calls"] == 3
    captured = CaptureStore(tmp_path / "calls").read("7-0")
    kept = asyncio.run(store.freeze("7-0")).entries
    assert [call["model_call_id"] for call in captured] == [entry.model_call_id for entry in kept]
    assert asyncio.run(retire_rollout_token_capture("7-0", store, built))


def test_rewritten_and_several_conversations_are_masked_in_the_record_and_samples_for_a_trainer(
    harness: Harness, tmp_path: Path
) -> None:
    harness("7-1", is_canonical=False)
    harness("7-2", questions=("What is there?", "And what does a sub-agent see?"))
    store = TokenCaptureStore(tmp_path / "tokens")
    for rollout_id, samples in (("7-1", 3), ("7-2", 2)):
        result = result_of(rollout_id)
        with pytest.warns(UserWarning, match="marked for masking"):
            asyncio.run(finalize_rollout_token_capture(result, store))
        assert result["mask_sample"] is True
        completion = completion_of_capture(store.freeze_now(rollout_id), reward=result["reward"])
        assert len(completion.samples) == samples
        assert completion.mask_reason is None
        turns = [message for log in completion.samples for message in log if message["role"] == "assistant"]
        assert len(turns) == (3 if rollout_id == "7-1" else 6)
