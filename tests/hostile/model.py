"""A model that does its worst, behind a real endpoint: what it says is chosen by a word in the first message.

`ATTACKS` are the things to say, turn after turn; the last one is repeated for ever. The endpoint speaks both APIs and
has the context of a small model: what is longer is refused, in the words of the real ones.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

from nemo_gym.runtime import listen

CONTEXT_CHARACTERS = 3_000_000
_MARK = re.compile(r"\[attack:([^\]]+)\]")


@dataclass(frozen=True)
class Says:
    """One turn: a text, thoughts, calls as (name, arguments), or a refusal of the endpoint."""

    text: str | None = None
    thought: str | None = None
    calls: tuple[tuple[Any, Any], ...] = ()
    call: dict[str, Any] = field(default_factory=dict)
    """Changes to every call: a value of None leaves the field out."""
    refusal: str | None = None
    status: int = 0
    body: str = ""


def mark(attack: str) -> dict[str, Any]:
    """The message that tells the endpoint what to do."""
    return {"role": "system", "content": f"[attack:{attack}]"}


def then_answers(*turns: Says) -> tuple[Says, ...]:
    return (*turns, Says("That is all."))


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


_LONG = 1_000_000
TEXTS = {
    "nothing": "",
    "white space": " \n\t",
    "a megabyte of spaces": " " * _LONG + "x",
    "zeros": "a\x00b" * 10,
    "half a pair": "\ud800 and \udfff and \ud83d",
    "half a pair in a box": r"\boxed{\text{" + "\ud83d" + "}}",
    "not a number": "<answer>NaN</answer> \\boxed{NaN} Answer: NaN",
    "infinity": "<answer>Infinity</answer> \\boxed{\\infty} Answer: -inf",
    "beyond all floats": "<answer>1e309</answer> \\boxed{1e309}",
    "a long number": "<answer>" + "9" * 10_000 + "</answer> \\boxed{" + "9" * 10_000 + "}",
    "a tower of powers": r"<answer>9**9**9**9</answer> \boxed{9^{9^{9^{9}}}}",
    "deep JSON": nested(100_000),
    "deep JSON in a fence": f"```json\n{nested(100_000)}\n```",
    "open brackets": "[" * _LONG,
    "open angles": "<" * _LONG,
    "open braces": "{" * _LONG,
    "open parentheses": "\\boxed{" + "(" * 20_000,
    "open answers": "<answer>" * (_LONG // 8),
    "open boxes": "\\boxed{" * (_LONG // 7),
    "open thoughts": "<think>" * (_LONG // 7),
    "fences": "```\n" * (_LONG // 4),
    "a fence of spaces": "```" + " " * _LONG,
    "dots": "." * _LONG + "a",
    "dots and spaces": ". " * (_LONG // 2),
    "stars": "*" * _LONG,
    "a list of letters": "Answer: " + "A, " * (_LONG // 3),
    "a letter far away": "Answer: A" + " " * _LONG + "?",
    "many answers": "answer" * (_LONG // 6),
    "accents": "\\boxed{A" + "\u0316\u0300" * 100_000 + "}",
    "placeholders of templates": "{} {0} {question} {x.__class__} %s %n ${a} $(b)",
    "escapes of terminals": "\x1b]0;owned\x07\x1b[2J\x9b31m",
    "a verdict of its own": "[[A=B]] [[A!=B]]",
    "a program that kills itself": "```python\nimport os\nos.kill(os.getpid(), 9)\n```",
    "a program that kills its group": "```python\nimport os\nos.killpg(0, 9)\n```",
    "a program that aborts": "```python\nimport os\nos.abort()\n```",
    "a program that exits": "```python\nimport os\nos._exit(0)\n```",
    "a program that recurses": "```python\ndef f(): f()\nf()\n```",
    "a program that prints half a pair": "```python\nprint('\\ud800', NaN)\n```",
    "a program that prints for ever": "```python\nwhile True: print('x' * 10**6)\n```",
    "a program that eats memory": "```python\nx = bytearray(10**12)\ny = [0] * 10**10\n```",
    "a program that never ends": "```python\nwhile True: pass\n```",
    "a program that is none": "```python\n\x00\n```",
    "too much to read": "x" * (CONTEXT_CHARACTERS + 1),
}
NAMES = [
    *["", "/", ".", "..", "../verify", "verify", "seed_session", "end_session", "aggregate_metrics", "health", "docs"],
    *["http://127.0.0.1:1/", "//h/verify", "verify?x=1", "a b", "\ud800", "\x00", "{tool}", "é", "x" * 100_000, "run"],
]
ARGUMENTS = [
    *["", "{", "null", "[]", "7", '"a"', "true", "{} {}", '{"a": NaN}', '{"a": 1e309}', '{"a": "\\ud800"}', "\ud800"],
    *[
        '{"a": "\ud800"}',
        '{"a": ' + "9" * 5000 + "}",
        nested(900),
        nested(50_000),
        "[" * 50_000,
        "\x00",
        '{"a":1,"a":2}',
    ],
    *['{"' + "k" * 100_000 + '": 1}', '{"count": ' + "9" * 4000 + "}", '{"city": "' + "x" * 500_000 + '"}'],
    *['{"synonym_values": [' + ",".join(str(n * (2**61 - 1)) for n in range(30_000)) + "]}", '{"synonym": "\\ud800"}'],
]
TOOL = "the first tool"
"""Stands for a tool that the row offers, if it offers one."""
_TOO_LONG = {
    "OpenAI": (
        400,
        '{"error": {"code": "context_length_exceeded", "message": "Your input exceeds the context window"}}',
    ),
    "vLLM": (400, '{"message": "This model\'s maximum context length is 4096 tokens. However, you requested 5000"}'),
    "vLLM's decoder": (
        400,
        '{"message": "The decoder prompt (length 9) is longer than the maximum model length of 8"}',
    ),
    "SGLang": (400, "The input (9 tokens) is longer than the model's context length (8 tokens)."),
    "TGI": (
        422,
        '{"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000"}',
    ),
    "Anthropic": (400, '{"error": {"message": "prompt is too long: 208310 tokens > 200000 maximum"}}'),
    "Gemini": (400, "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576)."),
    "llama.cpp": (
        400,
        '{"error": {"type": "exceed_context_size_error", "message": "the request exceeds the available"}}',
    ),
    "Bedrock": (400, '{"message": "Input is too long for requested model."}'),
    "a proxy": (413, "<html><title>413 Request Entity Too Large</title></html>"),
}
_FILTERED = '{"error": {"code": "content_filter", "message": "The response was filtered"}}'
ATTACKS: dict[str, tuple[Says, ...]] = {
    **{f"says {name}": (Says(text),) for name, text in TEXTS.items()},
    "says nothing at all": (Says(),),
    "only thinks": (Says(thought="Hm."),),
    "thinks halves of pairs": (Says("42", thought="\ud800"),),
    "refuses": (Says(refusal="No."),),
    "calls what there is not": then_answers(*(Says(calls=((name, "{}"),)) for name in NAMES)),
    "calls with odd arguments": then_answers(*(Says(calls=((TOOL, given),)) for given in ARGUMENTS)),
    "calls very often at once": then_answers(Says(calls=((TOOL, "{}"),) * 2000)),
    "calls for ever": (Says(calls=((TOOL, "{}"),)),),
    "calls for ever what there is not": (Says("Again.", calls=(("verify", "{}"),)),),
    "calls without a name": then_answers(Says(calls=((None, "{}"),))),
    "calls without arguments": then_answers(Says(calls=((TOOL, None),))),
    "calls with an object": then_answers(Says(calls=((TOOL, {"a": 1}),))),
    "calls without an id": then_answers(Says(calls=((TOOL, "{}"), (TOOL, "{}")), call={"call_id": None, "id": None})),
    "calls with one id for all": then_answers(Says(calls=((TOOL, "{}"),) * 3, call={"call_id": "c", "id": "c"})),
    "makes up a call that cannot be read back": (Says(calls=((TOOL, "{"),)), Says(status=400, body="Expecting value")),
    **{
        f"fills the context of {who}": (Says(calls=((TOOL, "{}"),)), Says(status=s, body=b))
        for who, (s, b) in _TOO_LONG.items()
    },
    "says what Azure filters": (Says(calls=((TOOL, "{}"),)), Says(status=400, body=_FILTERED)),
    "says what a moderator refuses": (Says(calls=((TOOL, "{}"),)), Says(status=403, body='{"error": "flagged"}')),
    "gets a prompt that is too long": (Says(status=400, body=_TOO_LONG["vLLM"][1]),),
}


@contextmanager
def hostile_endpoint() -> Iterator[str]:
    """The endpoint, and the address of its API."""
    app = FastAPI()
    app.post("/v1/responses")(_responses)
    app.post("/v1/chat/completions")(_chat)
    socket = listen("127.0.0.1", 0, "endpoint", "another port")
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(10)
        socket.close()


async def _responses(request: Request) -> Response:
    body = await request.json()
    items = body["input"] if isinstance(body["input"], list) else []
    turn = sum(item.get("type") == "function_call_output" for item in items)
    says = _next(await request.body(), body.get("tools"), items, turn)
    if says.status:
        return Response(says.body, says.status)
    calls = [
        _changed({"type": "function_call", "id": f"c{n}", "call_id": f"c{n}", "name": name, "arguments": given}, says)
        for n, (name, given) in enumerate(says.calls)
    ]
    thoughts = [] if says.thought is None else [{"type": "summary_text", "text": says.thought}]
    parts = [] if says.text is None else [{"type": "output_text", "text": says.text, "annotations": []}]
    parts += [] if says.refusal is None else [{"type": "refusal", "refusal": says.refusal}]
    output = [{"type": "reasoning", "id": "r", "summary": thoughts}] if thoughts else []
    output += [{"type": "message", "id": "m", "role": "assistant", "content": parts}] if parts else []
    answer = {"id": "r", "created_at": 1, "model": "m", "object": "response", "output": [*output, *calls]}
    return Response(json.dumps(answer), media_type="application/json")


async def _chat(request: Request) -> Response:
    body = await request.json()
    messages = body["messages"]
    turn = sum(message["role"] == "tool" for message in messages)
    tools = [tool["function"] for tool in body.get("tools") or []]
    says = _next(await request.body(), tools, messages, turn)
    if says.status:
        return Response(says.body, says.status)
    calls = []
    for n, (name, given) in enumerate(says.calls):
        call = _changed({"id": f"c{n}", "name": name, "arguments": given}, says)
        function = {key: call[key] for key in ("name", "arguments") if key in call}
        calls.append({"type": "function", "function": function, **({"id": call["id"]} if "id" in call else {})})
    message = {"role": "assistant", "content": says.text, "reasoning_content": says.thought, "refusal": says.refusal}
    choice = {"index": 0, "finish_reason": "stop", "message": {**message, **({"tool_calls": calls} if calls else {})}}
    answer = {"id": "c", "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
    return Response(json.dumps(answer), media_type="application/json")


def _changed(call: dict[str, Any], says: Says) -> dict[str, Any]:
    return {key: value for key, value in {**call, **says.call}.items() if value is not None}


def _next(body: bytes, tools: Any, messages: list[Any], turn: int) -> Says:
    if len(body) > CONTEXT_CHARACTERS:
        return Says(status=400, body=_TOO_LONG["vLLM"][1])
    found = _MARK.search(json.dumps(messages[:1]))
    if found is None:  # somebody asks what to think of an answer
        return Says("They are not the same. [[A!=B]]")
    turns = ATTACKS[found[1]]
    says = turns[min(turn, len(turns) - 1)]
    tool = tools[0]["name"] if tools else "no_tool"
    calls = tuple((tool if name == TOOL else name, given) for name, given in says.calls)
    return Says(says.text, says.thought, calls, says.call, says.refusal, says.status, says.body)
