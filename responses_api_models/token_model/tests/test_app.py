"""The whole server: requests in, ids to the engine, answers with the engine's own ids out."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nemo_gym.openai_utils import NeMoGymResponse
from responses_api_models.token_model.tests.conftest import Model, Serve
from responses_api_models.token_model.tests.stand_in import DROPPING, END, LLAMA, OPENING, log_prob, tool_user

QUESTION = {"role": "user", "content": "What is the weather in Oslo?"}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
BODY: dict[str, Any] = {"input": [QUESTION], "tools": [TOOL]}
THINKER = tool_user("get_weather", '{"city" :   "Oslo"}', rounds=2, thinks=True)


def conversation(model: Model, change: Any = lambda items: items, turns: int = 3) -> list[dict[str, Any]]:
    """Let the model call its tool until it answers; the items with tokens, in order."""
    items: list[Any] = [QUESTION]
    with_tokens = []
    for _ in range(turns):
        output = model.respond({**BODY, "input": items})["output"]
        with_tokens += [dict(item) for item in output if item.get("generation_token_ids")]
        items = [*items, *change(output)]
        for item in output:
            if item["type"] == "function_call":
                items.append({"type": "function_call_output", "call_id": item["call_id"], "output": "cold"})
    return with_tokens


def assert_contiguous(items: list[dict[str, Any]]) -> None:
    seen: list[int] = []
    for item in items:
        assert item["prompt_token_ids"][: len(seen)] == seen
        seen = item["prompt_token_ids"] + item["generation_token_ids"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("template", ["keeping", "dropping"])
def test_tokens_fit_together_over_turns_with_thoughts_and_tools(serve: Serve, engine: str, template: str) -> None:
    model = serve(THINKER, *([DROPPING] if template == "dropping" else []), engine=engine)
    items = conversation(model)

    assert [item["type"] for item in items] == ["function_call", "function_call", "message"]
    assert_contiguous(items)
    for item, request in zip(items, model.engine.requests, strict=True):
        sent = request["prompt"] if engine == "vllm" else request["input_ids"]
        assert sent == item["prompt_token_ids"]
        assert item["generation_log_probs"] == [log_prob(token) for token in item["generation_token_ids"]]
    whole = model.engine.tokenizer.decode(items[-1]["prompt_token_ids"])
    assert whole.count("<think>\nround") == 2, "the model sees its thoughts, whatever the template would do"
    assert whole.count('{"city" :   "Oslo"}') == 2, "and its arguments as it spelled them"


def _stripped(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in output if item["type"] != "reasoning"]


def _respaced(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "arguments": '{"city":"Oslo"}'} if "arguments" in item else item for item in output]


@pytest.mark.parametrize("change", [_stripped, _respaced])
def test_what_an_agent_makes_of_an_answer_does_not_matter(serve: Serve, change: Any) -> None:
    assert_contiguous(conversation(serve(THINKER), change))


def test_an_answer_is_read_and_keeps_its_ids(serve: Serve) -> None:
    model = serve(THINKER)
    answer = model.respond(BODY)

    NeMoGymResponse.model_validate(answer)
    reasoning, call = answer["output"]
    assert reasoning["summary"][0]["text"] == "round 0, let me see"
    assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Oslo"}')
    decode = model.engine.tokenizer.decode
    assert decode(call["generation_token_ids"]) == THINKER("") + END
    assert decode(call["prompt_token_ids"]).endswith(f"{QUESTION['content']}{END}\n<|im_start|>assistant\n")
    usage = answer["usage"]
    assert usage["input_tokens"] == len(call["prompt_token_ids"])
    assert usage["output_tokens"] == len(call["generation_token_ids"])
    assert answer["status"] == "completed"


def test_a_rewritten_history_is_written_anew_and_answered(serve: Serve) -> None:
    model = serve(THINKER)
    first = model.respond(BODY)["output"]
    result = {"type": "function_call_output", "call_id": first[-1]["call_id"], "output": "cold"}
    compacted = {"role": "user", "content": "Summary: it was asked for the weather."}
    answer = model.respond({**BODY, "input": [compacted, *first, result]})

    prompt = model.engine.tokenizer.decode(answer["output"][-1]["prompt_token_ids"])
    assert "Summary" in prompt
    assert QUESTION["content"] not in prompt


def test_chats_work_the_same_way(serve: Serve) -> None:
    model = serve(THINKER)
    tools = [{"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters")}}]
    first = model.chat({"messages": [QUESTION], "tools": tools})
    message = first["choices"][0]["message"]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "cold"}
    second = model.chat({"messages": [QUESTION, message, result], "tools": tools})["choices"][0]["message"]
    assert_contiguous([message, second])


def test_a_template_that_opens_a_thought_and_one_that_hides_text_of_calls(serve: Serve) -> None:
    opening = serve(lambda prompt: "hm\n</think>\n\nCold.", OPENING)
    reasoning, message = opening.respond({"input": [QUESTION]})["output"]
    assert (reasoning["summary"][0]["text"], message["content"][0]["text"]) == ("hm", "Cold.")

    def say(prompt: str) -> str:
        return "Cold." if "<|im_start|>tool" in prompt else '{"name": "get_weather", "parameters": {"city":"Oslo"}}'

    llama = serve(say, LLAMA, tool_parser="llama3_json")
    assert_contiguous(conversation(llama, turns=2))


@pytest.mark.parametrize(
    ("engine", "told", "kept"),
    [
        ("vllm", 7, {"weight_versions": [7, 7]}),
        ("sglang", "12", {"weight_versions": [12, 12]}),
        ("sglang", "default", {"weight_version": "default"}),
        ("sglang", None, {}),
    ],
)
def test_the_version_of_the_weights_stays_on_the_item(serve: Serve, engine: str, told: Any, kept: Any) -> None:
    model = serve(THINKER, engine=engine)
    model.engine.weight_version = told
    item = model.respond(BODY)["output"][-1]
    assert {key: item[key] for key in ("weight_versions", "weight_version") if key in item} == kept


def test_settings_reach_the_engine_by_its_own_names(serve: Serve) -> None:
    asked = {
        "input": [QUESTION],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 400,
        "metadata": {"extra_body": '{"top_k": 5, "seed": 3}'},
    }
    vllm = serve(THINKER, extra_body={"top_k": 9, "min_p": 0.1}, sampling_overrides={"temperature": 0.7})
    vllm.respond(asked)
    sent = vllm.engine.requests[0]
    assert {key: sent[key] for key in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "model")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "max_tokens": 400,
        "model": "m",
    }
    sglang = serve(THINKER, engine="sglang")
    sglang.respond(asked)
    params = sglang.engine.requests[0]["sampling_params"]
    assert (params["max_new_tokens"], params["sampling_seed"], params["top_k"]) == (400, 3, 5)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_does_not_fit_is_an_incomplete_answer(serve: Serve, engine: str) -> None:
    model = serve(THINKER, engine=engine)
    cut = model.respond({**BODY, "max_output_tokens": 9})
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert len(cut["output"][-1]["generation_token_ids"]) == 9

    model.engine.max_model_len = 8
    assert model.respond(BODY)["incomplete_details"] == {"reason": "max_output_tokens"}
    before = len(model.engine.requests)
    bounded = serve(THINKER, engine=engine, max_model_len=8)
    assert bounded.respond(BODY)["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (bounded.engine.requests, len(model.engine.requests)) == ([], before)
    roomy = serve(THINKER, max_model_len=300)
    roomy.respond({**BODY, "max_output_tokens": 4000})
    sent = roomy.engine.requests[0]
    assert sent["max_tokens"] == 300 - len(sent["prompt"])


@pytest.mark.parametrize(
    ("engine", "changes", "words"),
    [
        ("vllm", {"logprobs": None}, "sent no log-probs"),
        ("vllm", {"token_ids": [1, 2]}, "are not the 2 ids"),
        ("vllm", {"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}, "token_ids": None}, "tokens as text"),
        ("vllm", {"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}, "token ids but 1 log-probs"),
        ("vllm", {"prompt_token_ids": [1]}, "prompt had 1 tokens that are not"),
        ("sglang", {"output_token_logprobs": None}, "sent no log-probs"),
        ("sglang", {"output_token_logprobs": [[-1.0, 5, None]]}, "are not the ids the engine sent"),
        ("sglang", {"prompt_tokens": 1}, "has read a prompt of 1 tokens"),
    ],
)
def test_an_engine_that_contradicts_itself_is_an_error(serve: Serve, engine: str, changes: Any, words: str) -> None:
    model = serve(THINKER, engine=engine)
    model.engine.changes = changes
    assert words in str(model.respond(BODY, status=500))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice is 'required'"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "auto"}]}
                ]
            },
            "more than text",
        ),
    ],
)
def test_what_token_ids_cannot_say_is_refused(serve: Serve, change: Any, words: str) -> None:
    assert words in str(serve(THINKER).respond({**BODY, **change}, status=400))


def test_tools_that_are_not_to_be_used_are_not_offered(serve: Serve) -> None:
    model = serve(THINKER)
    answer = model.respond({**BODY, "tool_choice": "none"})
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert "get_weather" not in model.engine.tokenizer.decode(model.engine.requests[0]["prompt"])


def test_an_answer_ends_where_it_was_to_stop_and_its_ids_do_not(serve: Serve) -> None:
    model = serve(lambda prompt: "one STOP")
    message = model.chat({"messages": [QUESTION], "stop": ["STOP"]})["choices"][0]["message"]
    assert message["content"] == "one "
    assert model.engine.tokenizer.decode(message["generation_token_ids"]) == f"one STOP{END}"
    assert model.engine.requests[0]["stop"] == ["STOP"]


def test_a_broken_tool_call_stays_text(serve: Serve) -> None:
    answer = serve(lambda prompt: "<tool_call>{broken</tool_call>").respond(BODY)
    assert answer["output"][-1]["content"][0]["text"] == "<tool_call>{broken</tool_call>"


@pytest.mark.parametrize("limit", [1, None])
def test_the_engine_is_asked_no_more_at_once_than_allowed(serve: Serve, limit: int | None) -> None:
    model = serve(THINKER, max_concurrent_requests=limit)
    model.engine.delay_s = 0.2
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(model.respond, [BODY] * 8))
    assert [answer["status"] for answer in answers] == ["completed"] * 8
    assert (model.engine.most_under_way == 1) == (limit == 1)


ARGUMENTS = {
    "open brackets": "[" * 50_000,
    "many levels": '{"city": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "half of a surrogate pair": '{"city": "\\ud800"}',
    "digits": '{"city": ' + "9" * 5_000 + "}",
    "no number": '{"city": NaN}',
    "a list": "[1]",
    "nothing": "",
    **{f"{depth} levels": '{"city": ' + "[" * depth + "]" * depth + "}" for depth in range(900, 1000, 3)},
}


@pytest.mark.parametrize("template", [DROPPING, LLAMA, OPENING])
def test_whatever_stands_in_an_earlier_call_is_answered_or_refused(serve: Serve, template: str) -> None:
    model = serve(lambda prompt: "Done.", template)
    statuses = {}
    for name, arguments in ARGUMENTS.items():
        call = {"type": "function_call", "id": "f", "call_id": "c", "name": "get_weather", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": "c", "output": "cold"}
        answer = model.client.post(f"{model.url}/v1/responses", json={**BODY, "input": [QUESTION, call, output]})
        statuses[name] = answer.status_code

    assert {name: status for name, status in statuses.items() if status not in (200, 400)} == {}
