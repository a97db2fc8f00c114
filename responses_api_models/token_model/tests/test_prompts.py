"""Prompts of token ids: kept as they were, gone on from, and written anew where the conversation was rewritten."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.config_types import ConfigError
from nemo_gym.responses_converter import PROMPT_DIGEST, UnusableRequestError
from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.token_model.prompts import Prompt, PromptBuilder
from responses_api_models.token_model.tests.stand_in import (
    DROPPING,
    END,
    KEEPING,
    LLAMA,
    OPENING,
    OTHER_END,
    one_by_one,
    tokenizer_folder,
)

USER = {"role": "user", "content": "What is the weather?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "cold"}


@pytest.fixture(params=["keeping", "dropping", "llama", "opening"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> ChatTokenizer:
    templates = {"keeping": KEEPING, "dropping": DROPPING, "llama": LLAMA, "opening": OPENING}
    return ChatTokenizer(tokenizer_folder(tmp_path, templates[request.param]))


@pytest.fixture
def keeping(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_folder(tmp_path, KEEPING))


def answered(prompt: Prompt, ids: list[int], **message: Any) -> dict[str, Any]:
    """An answer to a prompt, as it comes back in the next request."""
    return {
        "role": "assistant",
        "content": "",
        **message,
        "prompt_token_ids": prompt.ids,
        "generation_token_ids": ids,
        "generation_log_probs": [-1.0] * len(ids),
        PROMPT_DIGEST: prompt.digest,
    }


def test_a_first_prompt_is_what_the_template_writes(tokenizer: ChatTokenizer) -> None:
    prompt = PromptBuilder(tokenizer).prompt({"messages": [USER]})
    text = tokenizer.apply_chat_template([USER], add_generation_prompt=True)
    assert tokenizer.decode(prompt.ids) == text
    assert prompt.kept == 0


@pytest.mark.parametrize("ending", [END, OTHER_END, ""])
def test_later_prompts_begin_with_everything_sampled_whatever_became_of_its_text(
    tokenizer: ChatTokenizer, ending: str
) -> None:
    builder = PromptBuilder(tokenizer)
    first = builder.prompt({"messages": [USER]})
    said = one_by_one("<think>\nhm\n</think>\n\n{ odd   spacing }", tokenizer)
    said += [tokenizer.ends[ending]] if ending else []
    answer = answered(first, said, tool_calls=[CALL])

    second = builder.prompt({"messages": [USER, answer, TOOL]})

    assert second.ids[: second.kept] == first.ids + said
    new = tokenizer.decode(second.ids[second.kept :])
    assert "cold" in new
    assert USER["content"] not in new
    assert new.startswith(END) == (not ending), "the end of a turn is there once, whoever wrote it"
    assert tokenizer.decode(second.ids).count(END) + (ending == OTHER_END) == 3
    third = builder.prompt({"messages": [USER, answer, TOOL, answered(second, said), USER]})
    assert third.ids[: len(second.ids)] == second.ids
    assert third.kept == len(second.ids) + len(said)


def test_with_canonical_tokens_it_is_exactly_what_a_template_that_keeps_everything_writes(
    keeping: ChatTokenizer,
) -> None:
    builder = PromptBuilder(keeping)
    first = builder.prompt({"messages": [USER]})
    answer = answered(first, [*keeping.encode("I say"), keeping.ends[END]], content="I say")
    messages = [USER, {"role": "assistant", "content": "I say"}, USER]
    assert builder.prompt({"messages": [USER, answer, USER]}).ids == keeping.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda messages: [{**USER, "content": "Another question"}, *messages[1:]],
        lambda messages: messages[1:],
        lambda messages: [{"role": "system", "content": "Be brief."}, *messages],
        lambda messages: [messages[0], USER, *messages[1:]],
    ],
)
def test_a_rewritten_conversation_is_written_anew(keeping: ChatTokenizer, rewrite: Any) -> None:
    builder = PromptBuilder(keeping)
    first = builder.prompt({"messages": [USER]})
    answer = answered(first, one_by_one("old tokens", keeping), content="I said")
    messages = rewrite([USER, answer, USER])

    prompt = builder.prompt({"messages": messages})

    assert prompt.kept == 0
    assert "I said" in keeping.decode(prompt.ids)
    assert "old tokens" not in keeping.decode(prompt.ids)


def test_what_was_kept_before_the_rewriting_stays(keeping: ChatTokenizer) -> None:
    builder = PromptBuilder(keeping)
    first = builder.prompt({"messages": [USER]})
    one = answered(first, [*one_by_one("one", keeping), keeping.ends[END]], content="one")
    second = builder.prompt({"messages": [USER, one, USER]})
    two = answered(second, one_by_one("two", keeping), content="two as text")

    prompt = builder.prompt({"messages": [USER, one, {**USER, "content": "changed"}, two, USER]})

    assert prompt.ids[: prompt.kept] == first.ids + one["generation_token_ids"]
    assert "changed" in keeping.decode(prompt.ids)
    assert "two as text" in keeping.decode(prompt.ids)


def test_other_tools_or_template_arguments_are_another_conversation(keeping: ChatTokenizer) -> None:
    builder = PromptBuilder(keeping)
    first = builder.prompt({"messages": [USER]})
    messages = [USER, answered(first, one_by_one("x", keeping)), USER]
    assert builder.prompt({"messages": messages}).kept > 0
    assert builder.prompt({"messages": messages, "tools": [{"type": "function"}]}).kept == 0
    assert builder.prompt({"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}).kept == 0


def test_the_same_text_in_parts_is_the_same_conversation(keeping: ChatTokenizer) -> None:
    builder = PromptBuilder(keeping)
    first = builder.prompt({"messages": [USER]})
    in_parts = {**USER, "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "the weather?"}]}
    answer = answered(first, one_by_one("x", keeping))
    assert builder.prompt({"messages": [in_parts, answer, USER]}).kept > 0


def test_an_answer_without_a_digest_is_text(keeping: ChatTokenizer) -> None:
    builder = PromptBuilder(keeping)
    first = builder.prompt({"messages": [USER]})
    answer = answered(first, one_by_one("x", keeping), content="as text")
    del answer[PROMPT_DIGEST]
    assert builder.prompt({"messages": [USER, answer, USER]}).kept == 0


def test_a_template_that_begins_with_a_thought_is_noticed(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(tokenizer_folder(tmp_path, OPENING))
    builder = PromptBuilder(tokenizer)
    first = builder.prompt({"messages": [USER]})
    assert first.opens_reasoning
    assert builder.prompt({"messages": [USER, answered(first, tokenizer.encode("x")), USER]}).opens_reasoning


def test_what_a_template_refuses_is_the_callers_mistake(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(tokenizer_folder(tmp_path, LLAMA))
    message = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    with pytest.raises(UnusableRequestError, match="cannot write this conversation: one tool call at a time"):
        PromptBuilder(tokenizer).prompt({"messages": [USER, message]})


def test_files_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is no folder; download"):
        ChatTokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: No such file"):
        ChatTokenizer(tmp_path / "empty")
    folder = tokenizer_folder(tmp_path / "whole")
    with pytest.raises(ConfigError, match="'<nothing>' is no token of the tokenizer"):
        ChatTokenizer(folder, end_of_turn="<nothing>")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": END, "chat_template": "{% if %}"}))
    with pytest.raises(ConfigError, match=r"the chat template in .* cannot be read"):
        ChatTokenizer(folder)
    settings.write_text(json.dumps({"eos_token": END}))
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert ChatTokenizer(folder).apply_chat_template([USER]) == USER["content"]
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    settings.write_text(json.dumps({"eos_token": END, "chat_template": named}))
    assert ChatTokenizer(folder).apply_chat_template([USER]) == "b"
