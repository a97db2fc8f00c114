"""Token ids must be good enough to train on: complete, stable, contiguous from turn to turn."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from responses_api_models.scripted_model.conversation import Called, Said, Thought
from responses_api_models.scripted_model.draws import Draws
from responses_api_models.scripted_model.tokens import cut_to, generated_tokens, pieces

MakeClient = Callable[..., TestClient]


@pytest.mark.parametrize(
    "text", ["", "a", "  two  words\n", "naïve café, 12.5 %!", "\U0001f600\u4e16\u754c  ", "a_b-c" * 9]
)
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text


def test_every_turn_begins_with_the_tokens_of_the_turn_before(client: MakeClient) -> None:
    script = {
        "rules": [
            {
                "match": {"turn": 1},
                "reply": {"reasoning": "Let me see.", "tool_call": {"name": "look", "arguments": {}}},
            },
            {"match": {"turn": 2}, "reply": {"reasoning": "Hm."}},
            {"match": {"turn": 3}, "reply": {"text": "  Two   spaces. "}},
            {"reply": {"text": "Done."}},
        ]
    }
    http = client(script, return_token_id_information=True)
    items: list[Any] = [{"role": "user", "content": "What is there?"}]
    seen: list[int] = []
    for follow_up in (
        lambda last: [{"type": "function_call_output", "call_id": last["call_id"], "output": "[1, 2]"}],
        lambda last: [],
        lambda last: [{"role": "user", "content": "And now?"}],
        lambda last: [],
    ):
        output = http.post("/v1/responses", json={"instructions": "Look first.", "input": items}).json()["output"]
        bundle = output[-1]
        assert bundle["prompt_token_ids"][: len(seen)] == seen
        assert len(bundle["generation_token_ids"]) == len(bundle["generation_log_probs"]) > 0
        assert all("prompt_token_ids" not in item for item in output[:-1])
        seen = bundle["prompt_token_ids"] + bundle["generation_token_ids"]
        items += output + follow_up(bundle)
    assert json.dumps(items).count("prompt_token_ids") == 4


def test_a_chat_has_the_same_tokens_as_a_response(client: MakeClient) -> None:
    http = client(return_token_id_information=True)
    response = http.post("/v1/responses", json={"input": "Hello there"}).json()
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello there"}]}).json()

    for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        assert chat["choices"][0]["message"][field] == response["output"][-1][field]


def test_cutting_keeps_whole_tokens_and_says_so() -> None:
    entries = (Thought("first second"), Said("assistant", "third fourth"), Called("c", "f", "{}"))
    whole = generated_tokens(entries, is_cut=False, draws=Draws(0, b""))

    for limit in range(1, len(whole)):
        kept, is_cut = cut_to(entries, limit)
        tokens = generated_tokens(kept, is_cut=is_cut, draws=Draws(0, b""))
        assert is_cut
        assert 0 < len(tokens) <= limit
        assert [token.id for token in tokens[1:-1]] == [token.id for token in whole[1 : len(tokens) - 1]]
    assert cut_to(entries, len(whole)) == (entries, False)
