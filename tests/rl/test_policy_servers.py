"""Tokens and log-probs of a real policy by the servers' path: agent, model server, endpoint and back, exactly."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import yaml
from fastapi import Body, FastAPI, Response

from nemo_gym.paths import PARENT_DIR
from nemo_gym.rl.environment import NemoGym
from nemo_gym.rl.failures import RolloutDataFailure
from nemo_gym.rl.interfaces import Completion
from nemo_gym.rl.rollout_manager import RolloutManager
from tests.rl.calculator import CALCULATOR, TOOL

torch = pytest.importorskip("torch", reason="the policy is a torch module: install the extra `rl` (make test-rl)")

EXAMPLES = PARENT_DIR / "docs" / "examples"
GROUP_SIZE = 6
NAN_RUNS = 3


class Endpoint:
    """The example's Chat Completions endpoint, which can also use tools, and lose a log-prob."""

    def __init__(self, example: Any) -> None:
        self.policy = example.policy.NumberLinePolicy()
        digits, end = slice(example.policy.NUM_DIGITS), example.policy.END
        with torch.no_grad():  # uneven, and often more than one digit before it ends, or is ended by the cap
            self.policy.worth.copy_(torch.linspace(0.3, 8.8, 10))
            self.policy.log_width.fill_(3.0)
            noise = torch.randn(len(example.policy.TOKENS), 10, generator=torch.Generator().manual_seed(3))
            self.policy.follows[:, digits] += noise
            self.policy.follows[digits, digits] += 6.0
            self.policy.follows[digits, end] = 6.0
        self.tokenizer = example.policy.ToyTokenizer()
        self.lost_log_prob: Any = 0.0
        """What stands in place of the first log-prob, when it is not 0."""
        self.answers = 0
        self._sampler = example.policy.Sampler(self.policy)
        self._server = example.server

    def app(self) -> FastAPI:
        app = self._server.chat_app(self._sampler, self.tokenizer)
        complete = next(route.endpoint for route in app.routes if route.path == "/v1/chat/completions")
        outer = FastAPI()

        @outer.post("/v1/chat/completions")
        async def answer(body: dict[str, Any] = Body()) -> Any:
            said = await complete(body)
            if isinstance(said, Response):
                return said
            self.answers += 1
            if body.get("tools") and sum(message["role"] == "tool" for message in body["messages"]) < 2:
                _call_tool(said["choices"][0])
            if self.lost_log_prob != 0.0:
                said["choices"][0]["logprobs"]["content"][0]["logprob"] = self.lost_log_prob
            return Response(json.dumps(said), media_type="application/json")

        return outer


def _call_tool(choice: dict[str, Any]) -> None:
    """Read what the policy said as the argument of a tool call."""
    message = choice["message"]
    function = {"name": "calculate", "arguments": json.dumps({"expression": message["content"]})}
    message |= {"content": None, "tool_calls": [{"id": uuid4().hex, "type": "function", "function": function}]}
    choice["finish_reason"] = "tool_calls"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The modules of the example."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import tiny_grpo  # type: ignore[import-not-found]
        import tiny_policy  # type: ignore[import-not-found]
        import tiny_policy_server  # type: ignore[import-not-found]

        yield SimpleNamespace(grpo=tiny_grpo, policy=tiny_policy, server=tiny_policy_server)
    for name in set(sys.modules) - before:
        if name.startswith(("tiny_", "resources_servers.tiny_")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def endpoint(example: Any) -> Endpoint:
    return Endpoint(example)


def _server_config(folder: Path) -> dict[str, Any]:
    """The example's servers, and a second agent, whose environment has a tool."""
    server = folder / "resources_servers" / "calculator"
    server.mkdir(parents=True)
    (server / "app.py").write_text(CALCULATOR)
    (server / "requirements.txt").write_text("")
    config: Any = yaml.safe_load(
        (EXAMPLES / "resources_servers/tiny_arithmetic/configs/tiny_arithmetic.yaml").read_text()
    )
    block = {"entrypoint": "app.py", "domain": "math", "isolation": "hosted"}
    config["calculator"] = {"resources_servers": {"calculator": block}}
    agent = config["tiny_arithmetic_agent"]["responses_api_agents"]["simple_agent"]
    with_tool = {**agent, "resources_server": {**agent["resources_server"], "name": "calculator"}}
    config["calculator_agent"] = {"responses_api_agents": {"simple_agent": with_tool}}
    return config  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def manager(example: Any, endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutManager]:
    folder = tmp_path_factory.mktemp("roots")
    config: Any = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 4}
    config |= {"stop_strings": None, "stop_token_ids": None}
    with pytest.MonkeyPatch.context() as patch, example.server.serving(endpoint.app()) as base_url:
        patch.setenv("NEMO_GYM_EXTRA_ROOTS", os.pathsep.join([str(folder), str(EXAMPLES)]))
        settings: Any = {
            "model_name": "tiny",
            "base_urls": [base_url],
            "initial_global_config_dict": _server_config(folder),
            "rollout_max_attempts_to_avoid_lp_nan": NAN_RUNS,
        }
        with NemoGym(settings) as gym:
            yield RolloutManager(
                endpoint.tokenizer,
                {"nemo_gym": gym},
                GROUP_SIZE,
                example.server.MAX_MODEL_LEN,
                generation_config=config,
                use_nemo_gym=True,
            )


def check_log_probs(completion: Completion, policy: Any) -> None:
    """Every log-prob of the completion is the policy's own for that token, given all tokens before it."""
    log = completion.message_log
    with torch.no_grad():
        recomputed = policy.log_probs(torch.cat([message["token_ids"] for message in log]))
    start = 0
    for message in log:
        end = start + len(message["token_ids"])
        if message["role"] == "assistant":
            assert len(message["token_ids"]) > 0
            torch.testing.assert_close(
                message["generation_logprobs"], recomputed[start - 1 : end - 1], atol=1e-5, rtol=0
            )
        start = end


def test_log_probs_are_those_the_policy_computes_itself(
    example: Any, endpoint: Endpoint, manager: RolloutManager
) -> None:
    records = asyncio.run(example.grpo.run(manager, [(3, 4), (0, 9), (5, 1)], endpoint.tokenizer))

    for record in records:
        assert len(record.completions) == GROUP_SIZE
        for completion in record.completions:
            assert completion.message_log[0]["token_ids"].tolist() == record.prompt[0]["token_ids"].tolist()
            check_log_probs(completion, endpoint.policy)


def test_message_logs_are_token_exact_over_multi_turn_tool_use(
    example: Any, endpoint: Endpoint, manager: RolloutManager
) -> None:
    given = example.grpo.sample_of((3, 4), endpoint.tokenizer)
    given["extra_env_info"]["responses_create_params"]["tools"] = [TOOL]
    given["extra_env_info"]["agent_ref"]["name"] = "calculator_agent"

    record = asyncio.run(manager.run_rollout(given))

    assert len(record.completions) == GROUP_SIZE
    decode, lengths = endpoint.tokenizer.decode, set[int]()
    for completion in record.completions:
        log = completion.message_log
        assert [message["role"] for message in log] == ["user", "assistant"] * 3
        said = [decode(message["token_ids"]) for message in log[1::2]]
        between = [
            f"{'' if text.endswith('<end>') else '<end>'}<tool>= {len(text.removesuffix('<end>'))}.<end><assistant>"
            for text in said
        ]
        whole = decode(torch.cat([message["token_ids"] for message in log]))
        assert whole == f"<user>3+4=<end><assistant>{said[0]}{between[0]}{said[1]}{between[1]}{said[2]}"
        lengths |= {len(message["token_ids"]) for message in log[1::2]}
        check_log_probs(completion, endpoint.policy)
    assert len(lengths) > 1


@pytest.mark.parametrize("lost", [None, float("nan")])
def test_log_probs_that_are_no_numbers_are_tried_again_and_then_a_data_failure(
    example: Any, endpoint: Endpoint, manager: RolloutManager, monkeypatch: pytest.MonkeyPatch, lost: Any
) -> None:
    monkeypatch.setattr(endpoint, "lost_log_prob", lost)
    before = endpoint.answers

    with pytest.raises(RolloutDataFailure, match=f"came back with NaN log-probs {NAN_RUNS} times"):
        asyncio.run(manager.run_rollout(example.grpo.sample_of((3, 4), endpoint.tokenizer)))
    assert endpoint.answers - before >= NAN_RUNS, "each time it was asked for anew"


def test_an_over_long_prompt_is_a_data_failure(example: Any, endpoint: Endpoint, manager: RolloutManager) -> None:
    given = example.grpo.sample_of((3, 4), endpoint.tokenizer)
    given["extra_env_info"]["responses_create_params"]["input"][0]["content"] = "1" * 80

    with pytest.raises(RolloutDataFailure, match=r"no generation data.*82 tokens"):
        asyncio.run(manager.run_rollout(given))


def test_sampling_does_not_depend_on_the_order_of_prompts(example: Any) -> None:
    policy, prompts = example.policy.NumberLinePolicy(), [[11, 3], [12, 4], [11, 3], [11, 3]]

    def said(order: list[int]) -> list[Any]:
        sampler = example.policy.Sampler(policy)
        return sorted((prompts[place], sampler.sample(prompts[place], 4)) for place in order)

    assert said([0, 1, 2, 3]) == said([3, 2, 1, 0])
