"""A model server in a process of its own, written by an author who knows one API, or both: `speaking_server.py <kind>`.

It prints its port, and serves until its standard input ends.
"""

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from fastapi import HTTPException, Request
from omegaconf import OmegaConf

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import ServerClient

USAGE = {"input_tokens": 11, "output_tokens": 7, "total_tokens": 18}


def said(body: NeMoGymResponseCreateParamsNonStreaming) -> list[dict[str, Any]]:
    """A thought, then a call of the first tool; or, after a tool or without one, the text of the last item."""
    items = body.input if isinstance(body.input, list) else []
    last: Any = items[-1].model_dump() if items else {"content": body.input}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Let me see."}]}
    if last.get("content") == "fail":
        raise HTTPException(429, "slow down")
    if body.tools and last.get("type") != "function_call_output":
        call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": body.tools[0]["name"]}
        odd = {"babble": "not JSON", "count": f'{{"n": {2**70}}}', "count on": f'{{"n": {"7" * 5000}}}'}
        odd |= {f"nest {levels}": f'{{"n": {"[" * levels}{2**70}{"]" * levels}}}' for levels in (300, 960, 1000, 9000)}
        arguments = odd.get(last.get("content"), '{"city": "Oslo"}')
        return [thought, {**call, "arguments": arguments, "status": "completed"}]
    text = last.get("output", last.get("content"))
    parts = [{"type": "output_text", "text": f"You said: {text}", "annotations": []}]
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": parts}
    return [thought, message]


class OnlyResponses(SimpleResponsesAPIModel):
    config: BaseResponsesAPIModelConfig

    async def responses(  # type: ignore[override]
        self, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        is_cut = body.max_output_tokens == 1
        if body.user == "break":
            failed = {"id": "resp_1", "created_at": 1, "model": "any", "output": [], "status": "failed"}
            error = {"code": "server_error", "message": "out of memory"}
            return NeMoGymResponse.model_validate({**failed, "error": error})
        return NeMoGymResponse.model_validate(
            {
                "id": "resp_1",
                "created_at": 1,
                "model": body.model or "any",
                "object": "response",
                "output": said(body),
                "status": "incomplete" if is_cut else "completed",
                "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
                "instructions": body.instructions,
                "metadata": body.metadata,
                "usage": USAGE,
            }
        )


class OnlyChat(SimpleResponsesAPIModel):
    config: BaseResponsesAPIModelConfig

    async def chat_completions(  # type: ignore[override]
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        last: Any = body.messages[-1]
        last = last if isinstance(last, dict) else last.model_dump()
        if isinstance(last["content"], list):
            last = {**last, "content": "".join(part["text"] for part in last["content"])}
        message: dict[str, Any] = {"role": "assistant", "content": f"You said: {last['content']}"}
        if last["content"] == "fail":
            raise HTTPException(429, "slow down")
        if body.tools and last["role"] != "tool":
            tool: Any = body.tools[0]
            tool = tool if isinstance(tool, dict) else tool.model_dump()
            function = {"name": tool["function"]["name"], "arguments": '{"city": "Oslo"}'}
            message |= {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
        message["reasoning_content"] = "Let me see."
        reason = "length" if 1 in (body.max_tokens, body.max_completion_tokens) else "stop"
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        choice = {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else reason, "message": message}
        fields = {"id": "c", "object": "chat.completion", "created": 1, "model": body.model or "any"}
        return NeMoGymChatCompletion.model_validate({**fields, "choices": [choice], "usage": usage})


class Both(OnlyResponses):
    def chat_completions(  # type: ignore[override]
        self, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> Any:
        """Not even a coroutine."""
        assert request.url.path == "/v1/chat/completions"
        return asyncio.run(OnlyChat.chat_completions(self, body))  # type: ignore[arg-type]


KINDS: dict[str, type[SimpleResponsesAPIModel]] = {"responses": OnlyResponses, "chat": OnlyChat, "both": Both}


def main(kind: str, *options: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = BaseResponsesAPIModelConfig(host="127.0.0.1", port=port, entrypoint="app.py", name="policy")
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.from_dotlist(list(options)),
    )
    app = KINDS[kind](config=config, server_client=client).complete_app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))

    async def serve() -> None:
        serving = asyncio.create_task(server.serve([listener]))
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving

    asyncio.run(serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
