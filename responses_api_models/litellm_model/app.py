"""`litellm_model`: a model behind a LiteLLM proxy.

As `openai_model`, and the proxy is asked for its version first: two versions of LiteLLM were published by somebody who
collected keys, and a proxy that may be one of them is not told any prompt. The package itself is not needed here.
"""

import json
import re
import time
from functools import cached_property
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from fastapi import FastAPI

from nemo_gym.base_responses_api_model import validated_answer
from nemo_gym.config_types import ConfigError
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.responses_converter import ResponsesConverter, too_long_response, with_reasoning_in_text
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from responses_api_models.openai_model.app import OpenAIModel, OpenAIModelConfig

OLDEST_VERSION = (1, 83, 0)
COMPROMISED_VERSIONS = {(1, 82, 7), (1, 82, 8)}
VERSION_PATH = "/health/readiness/details"
WITHIN_S = 5.0
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:-stable(?:\.patch\.\d+)?|\.post\d+)?")
_MOST_BYTES = 1_000_000


class LiteLLMModelConfig(OpenAIModelConfig):
    """Which proxy, which of its models: the keys of `openai_model`."""


class _StaysHere(HTTPRedirectHandler):
    """The key is for the proxy alone, wherever it points."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


class LiteLLMModel(OpenAIModel):
    """Passes requests on to a proxy that says it is safe, and makes responses of what it answers."""

    config: LiteLLMModelConfig

    def complete_app(self) -> FastAPI:
        """The app, once the proxy's version is known to be all right; one that only replays asks no proxy."""
        if self.config.recording.mode != "replay" and not self._run_config().get("dry_run"):
            require_safe_proxy(self.config.openai_base_url, self.config.openai_api_key)
        return super().complete_app()

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:  # type: ignore[override]
        """Answer through the proxy's `/responses`, also where it answers with a chat completion."""
        answer = await self._ask(self._client.create_response(**self._outgoing(body)))
        if answer is None:
            return too_long_response(body, self.config.openai_model)
        if answer.get("object") == "chat.completion":
            plain = with_reasoning_in_text(answer, self._settings, splits_reasoning=True)
            completion = validated_answer(NeMoGymChatCompletion, plain, self._settings)
            return self._converter.chat_completion_to_response(body, completion, model=self.config.openai_model)
        return validated_answer(NeMoGymResponse, _without_effort_none(answer), self._settings)

    @cached_property
    def _converter(self) -> ResponsesConverter:
        return ResponsesConverter(uses_reasoning_parser=True)


def _without_effort_none(answer: dict[str, Any]) -> dict[str, Any]:
    """LiteLLM repeats an effort of "none", for which the Responses API has no word but null."""
    reasoning = answer.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") == "none":
        return {**answer, "reasoning": {**reasoning, "effort": None}}
    return answer


def require_safe_proxy(base_url: str, key: str) -> None:
    """Ask the proxy for its version.

    Raises:
        ConfigError: it does not tell, or it is older than 1.83.0; the key is not in the message.
    """
    address = base_url.rstrip("/").removesuffix("/v1") + VERSION_PATH
    try:
        told = json.loads(_fetch(address, key))
        version = told.get("litellm_version") if isinstance(told, dict) else None
    except HTTPError as error:
        error.close()
        raise ConfigError(_refusal(address, f"does not tell its version (status {error.code})", key)) from None
    except (OSError, ValueError, HTTPException) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(_refusal(address, f"does not tell its version ({why})", key)) from None
    found = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if found is None:
        raise ConfigError(_refusal(address, f"says litellm_version {version!r}, which is no released version", key))
    numbers = tuple(int(number) for number in found.groups())
    if numbers in COMPROMISED_VERSIONS:
        raise ConfigError(_refusal(address, f"is LiteLLM {version}, a version that was published to steal keys", key))
    if numbers < OLDEST_VERSION:
        raise ConfigError(_refusal(address, f"is LiteLLM {version}", key))


def _refusal(address: str, what: str, key: str) -> str:
    oldest = ".".join(map(str, OLDEST_VERSION))
    remedy = f"litellm_model needs a proxy of version {oldest} or newer at policy_base_url"
    said = f"{address} {what}; {remedy}, and openai_model asks any endpoint without looking"
    return said.replace(key, "****") if key else said


def _fetch(address: str, key: str) -> bytes:
    headers = {"Authorization": f"Bearer {key}", "x-litellm-key": key, "Accept": "application/json"}
    opener: OpenerDirector = build_opener(_StaysHere, ProxyHandler({}))
    until = time.monotonic() + WITHIN_S
    body = b""
    with opener.open(Request(address, headers=headers), timeout=WITHIN_S) as answer:
        while part := answer.read1(65_536):
            body += part
            if time.monotonic() > until or len(body) > _MOST_BYTES:
                raise TimeoutError("the answer does not end")
    return body


if __name__ == "__main__":
    LiteLLMModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = LiteLLMModel.run_webserver()
