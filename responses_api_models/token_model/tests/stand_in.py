# ruff: noqa: E501
"""An engine that takes token ids, on a real port, and a tokenizer made for it: byte-level BPE with a chat template.

It speaks vLLM's `/v1/completions` and SGLang's `/generate`, and for comparison vLLM's `/v1/chat/completions`, where it
writes the conversation itself. What it says is decided by a function of the prompt's text.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.token_model.parsers import hermes, read_reasoning

START, END, OTHER_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
Say = Callable[[str], str]
"""What is said after a prompt's text."""

_HEAD = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
"""
_KEEP_THOUGHTS = """\
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
"""
_DROP_THOUGHTS = """\
{%- if loop.last and message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
"""
_TAIL = """\
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
KEEPING = _HEAD + _KEEP_THOUGHTS + _TAIL
"""Writes everything that was said."""
DROPPING = _HEAD + _DROP_THOUGHTS + _TAIL
"""Writes the thoughts of no turn but the last, as templates of reasoning models do."""
OPENING = KEEPING.replace(
    "{{ '<|im_start|>assistant\\n' }}{% endif %}\n", "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}\n"
)
"""Begins every answer with a thought."""
LLAMA = """\
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|im_start|>assistant\\n\\n' + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|im_end|>' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n\\n' + (message.content | trim) + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}
"""
"""Shows tool calls in place of the text of their message, and refuses several of them."""
_CORPUS = [
    "the weather in the city is cold and the answer is one short sentence about the weather",
    '{"name": "get_weather", "arguments": {"city": "Reykjavik"}} {"name": "calculate", "arguments": {"expression": "1+1"}}',
    "user assistant system tool response thinking think tool_call question and answer, look it up before you answer",
]


def tokenizer_folder(folder: Path, template: str = KEEPING) -> Path:
    """Write the files of a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in (START, END, OTHER_END)],
    )
    tokenizer.train_from_iterator(_CORPUS * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": {"content": END}, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [tokenizer.token_to_id(END), tokenizer.token_to_id(OTHER_END)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@dataclass
class StandInEngine:
    """Says what `say` makes of the prompt's text, each token with a log-prob that depends on its id alone."""

    tokenizer: ChatTokenizer
    say: Say
    is_canonical: bool = True
    """Whether its tokens are those that the tokenizer would make of its text."""
    max_model_len: int = 4096
    weight_version: Any = None
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to its answers: what a broken or different engine would send."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    delay_s: float = 0.0
    under_way: int = 0
    most_under_way: int = 0
    says_before_abort: int = 4
    """Tokens of an answer that is aborted."""
    _aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.post("/v1/completions", response_model=None)(self.complete)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/generate", response_model=None)(self.generate)
        app.post("/abort")(self.abort)
        return app

    async def abort(self) -> dict[str, Any]:
        """End what is being generated, and take the time for no answer from now on."""
        self.delay_s = 0.0
        self._aborted.set()
        return {}

    async def complete(self, request: Request) -> JSONResponse:
        body = await self._noted(request)
        prompt, limit = body["prompt"], body.get("max_tokens")
        if len(prompt) + (limit or 1) > self.max_model_len:
            return _refusal(f"This model's maximum context length is {self.max_model_len} tokens.")
        ids, finish = self._said(prompt, limit, is_cut=body["is_cut"])
        choice = {
            "index": 0,
            "text": self.tokenizer.decode(ids),
            "token_ids": ids,
            "prompt_token_ids": prompt,
            "finish_reason": finish,
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in ids],
                "token_logprobs": [log_prob(token) for token in ids],
            },
            **({} if self.weight_version is None else {"weight_version": self.weight_version}),
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return JSONResponse({"id": "cmpl", "choices": [{**choice, **self.changes}], "usage": usage, "model": "m"})

    async def generate(self, request: Request) -> JSONResponse:
        body = await self._noted(request)
        prompt, limit = body["input_ids"], body["sampling_params"].get("max_new_tokens")
        if len(prompt) + (limit or 1) > self.max_model_len:
            return _refusal(f"The input ({len(prompt)} tokens) is longer than the model's context length")
        ids, finish = self._said(prompt, limit, is_cut=body["is_cut"])
        meta = {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(prompt),
            "cached_tokens": 3,
            "output_token_logprobs": [[log_prob(token), token, None] for token in ids],
            **({} if self.weight_version is None else {"weight_version": self.weight_version}),
            **self.changes,
        }
        return JSONResponse({"text": "", "output_ids": ids, "meta_info": meta})

    async def chat(self, request: Request) -> JSONResponse:
        """As vLLM answers chats: the conversation is written and tokenized anew each time."""
        body = await self._noted(request)
        messages = [_with_objects(message) for message in body["messages"]]
        prompt = self.tokenizer.apply_chat_template(
            messages, tools=body.get("tools"), tokenize=True, add_generation_prompt=True
        )
        ids, finish = self._said(prompt, body.get("max_tokens"))
        thought = read_reasoning(self.tokenizer.decode(ids).removesuffix(END), is_open=False)
        found = hermes(thought.rest, {})
        message: dict[str, Any] = {"role": "assistant", "content": thought.rest if found is None else found.text}
        if thought.reasoning:
            message["reasoning_content"] = thought.reasoning[0]
        if found is not None:
            functions = [{"name": name, "arguments": arguments} for name, arguments in found.calls]
            message["tool_calls"] = [{"id": f"c{len(prompt)}", "type": "function", "function": it} for it in functions]
        log_probs = [{"token": f"token_id:{token}", "logprob": log_prob(token)} for token in ids]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": finish,
            "token_ids": ids,
            "logprobs": {"content": log_probs},
        }
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return JSONResponse({**answer, "prompt_token_ids": prompt})

    def _said(self, prompt: list[int], limit: int | None, *, is_cut: bool = False) -> tuple[list[int], str]:
        text = self.say(self.tokenizer.decode(prompt))
        ids = self.tokenizer.encode(text) if self.is_canonical else one_by_one(text, self.tokenizer)
        ids.append(self.tokenizer.ends[END])
        if is_cut:
            return ids[: self.says_before_abort], "abort"
        return (ids[:limit], "length") if limit is not None and len(ids) > limit else (ids, "stop")

    async def _noted(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.requests.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        is_cut = False
        if self.delay_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._aborted.wait(), self.delay_s)
                is_cut = True
        self.under_way -= 1
        return {**body, "is_cut": is_cut}


def one_by_one(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """Ids of the same text that the tokenizer itself would not choose: one character after the other."""
    return [token for character in text for token in tokenizer.encode(character)]


def log_prob(token: int) -> float:
    return -0.25 - token % 7


def tool_user(tool: str, arguments: str, *, rounds: int, thinks: bool) -> Say:
    """Calls a tool so many times, with these arguments as they are spelled, and answers then."""

    def say(prompt: str) -> str:
        done = prompt.count("<tool_response>")
        thought = f"<think>\nround {done}, let me see\n</think>\n\n" if thinks else ""
        if done < rounds:
            return f'{thought}<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'
        return f"{thought}It is done after {done} rounds."

    return say


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address under which `app` answers while the block lasts."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline_s, "the engine did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(30)


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read arguments as objects; vLLM sees to that."""
    message = {**message, "content": message.get("content") or ""}
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _refusal(words: str) -> JSONResponse:
    return JSONResponse({"error": {"message": words, "code": 400}}, status_code=400)
