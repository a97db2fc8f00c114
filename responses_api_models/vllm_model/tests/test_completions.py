"""Over `/completions` the prompt is plain text: the messages themselves, or what a chat template makes of them."""

import asyncio
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_gym.config_types import ConfigError
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.responses_converter import UnusableRequestError
from responses_api_models.vllm_model.app import VLLMModel
from responses_api_models.vllm_model.completions import (
    PlainCompletions,
    joined_messages,
    plain_completions,
    template_renderer,
)

SETTINGS = {"use_completions_api": True, "uses_reasoning_parser": False}


def ask(model: VLLMModel, **params: Any) -> NeMoGymResponse:
    request: Any = SimpleNamespace(session={"session_id": "s"}, headers={})
    return asyncio.run(model.responses(request, NeMoGymResponseCreateParamsNonStreaming(**params)))


def test_system_and_user_message_are_joined_by_a_blank_line(
    start_vllm: Callable[..., Any], make_model: Callable[..., VLLMModel]
) -> None:
    vllm = start_vllm(replies=[{"text": " a time"}])

    got = ask(
        make_model(vllm.url, **SETTINGS),
        instructions="Tell a story.",
        input="Once upon",
        max_output_tokens=4,
        top_p=0.5,
    )

    assert vllm.requests == [
        {"model": "configured-model", "prompt": "Tell a story.\n\nOnce upon", "max_tokens": 4, "top_p": 0.5}
    ]
    assert got.output_text == " a time"


def test_token_ids_come_with_plain_completions_too(
    start_vllm: Callable[..., Any], make_model: Callable[..., VLLMModel]
) -> None:
    vllm = start_vllm(replies=[{"text": " a time"}])

    item: Any = ask(make_model(vllm.url, return_token_id_information=True, **SETTINGS), input="Once upon").output[-1]

    assert bytes(item.prompt_token_ids) == b"Once upon"
    assert bytes(item.generation_token_ids) == b" a time"
    assert vllm.tokenized == [{"model": "configured-model", "prompt": "Once upon"}]
    assert vllm.requests[0]["logprobs"] == 0


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "user, assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "audio_url"}]}]}, "text only"),
    ],
)
def test_what_plain_text_cannot_express_is_refused(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        joined_messages(request_)


class Template:
    """A tokenizer of the Hugging Face kind."""

    def apply_chat_template(self, messages: Any, *, tools: Any, tokenize: bool, **options: Any) -> str:
        assert not tokenize
        return f"<s>{messages}|{tools}|{options}"


def test_a_chat_template_gets_messages_tools_and_arguments() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    half = {"id": "d", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call, half]}]
    completions = PlainCompletions(template_renderer(Template()), adds_special_tokens=False)

    request = completions.request(
        {"messages": messages, "tools": ["t"], "chat_template_kwargs": {"style": "x"}, "max_completion_tokens": 3}
    )

    assert request["prompt"].startswith("<s>[{'role': 'user', 'content': 'Hi'}")
    assert "{'name': 'f', 'arguments': {'a': 1}}" in request["prompt"]
    assert """'arguments': '{"a": '""" in request["prompt"]
    assert request["prompt"].endswith("|['t']|{'add_generation_prompt': True, 'style': 'x'}")
    assert (request["add_special_tokens"], request["max_tokens"]) == (False, 3)


class Strict(Template):
    """Refuses arguments that are no object, as some templates do."""

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        for message in messages:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"].items()
        return super().apply_chat_template(messages, **options)


@pytest.mark.parametrize("arguments", ["[" * 50_000, '{"a": "\\ud800"}', '{"a": ' + "[" * 300 + "]" * 300 + "}", "{"])
def test_arguments_that_a_template_cannot_write_stay_text_or_are_refused(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    request = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}

    assert repr(arguments) in template_renderer(Template())(request)
    with pytest.raises(UnusableRequestError, match="the chat template cannot write this conversation: 'str' object"):
        template_renderer(Strict())(request)


def test_a_template_needs_the_library_that_renders_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigError, match="transformers"):
        plain_completions("some/tokenizer")


def test_the_tokenizer_is_loaded_by_its_name(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., VLLMModel]
) -> None:
    loaded: list[str] = []

    def load(name: str) -> Template:
        loaded.append(name)
        return Template()

    library: Any = ModuleType("transformers")
    library.AutoTokenizer = SimpleNamespace(from_pretrained=load)
    monkeypatch.setitem(sys.modules, "transformers", library)

    make_model("http://x/v1", render_chat_template=True, **SETTINGS)
    make_model("http://x/v1", render_chat_template=True, tokenizer="other", **SETTINGS)

    assert loaded == ["configured-model", "other"]


def test_a_template_without_the_completions_api_is_refused(make_model: Callable[..., VLLMModel]) -> None:
    with pytest.raises(ValueError, match="use_completions_api"):
        make_model("http://x/v1", render_chat_template=True)
