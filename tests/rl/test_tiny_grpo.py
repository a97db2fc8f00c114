"""The example of docs/training.md: it learns, by both paths, and its tokens and log-probs are exact."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import yaml
from fastapi import Body, FastAPI

from nemo_gym.paths import PARENT_DIR
from nemo_gym.rl.environment import NemoGym
from nemo_gym.rl.failures import RolloutDataFailure, RolloutFailure
from nemo_gym.rl.interfaces import Completion
from nemo_gym.rl.rollout_manager import RolloutManager

torch = pytest.importorskip("torch", reason="the policy is a torch module: install the extra `rl` (make test-rl)")

EXAMPLES = PARENT_DIR / "docs" / "examples"
CLEARLY_ABOVE_CHANCE = 0.6
"""One answer in ten is right by chance. With twelve other seeds the accuracy after training was between 0.79 and 1."""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(EXAMPLES))
    before = set(sys.modules)
    import tiny_grpo  # type: ignore[import-not-found]
    import tiny_policy  # type: ignore[import-not-found]
    import tiny_policy_server  # type: ignore[import-not-found]

    yield SimpleNamespace(grpo=tiny_grpo, policy=tiny_policy, server=tiny_policy_server)
    for name in set(sys.modules) - before:
        if name.startswith(("tiny_", "resources_servers.tiny_")):
            del sys.modules[name]


@pytest.mark.parametrize("path", ["native", "servers"])
def test_the_policy_learns_sums_it_has_never_seen(path: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "tiny_grpo.py", path],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    accuracy = json.loads(done.stdout.splitlines()[-1])
    assert accuracy["before"] < 0.3
    assert accuracy["after"] > CLEARLY_ABOVE_CHANCE


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


def test_log_probs_of_the_servers_path_are_those_of_the_policy(example: Any) -> None:
    policy, tokenizer = example.policy.NumberLinePolicy(), example.policy.ToyTokenizer()
    with torch.no_grad():
        policy.worth.copy_(torch.linspace(0.3, 8.8, 10))
        policy.follows.add_(torch.randn(policy.follows.shape, generator=torch.Generator().manual_seed(3)))

    with example.grpo.servers_manager(example.policy.Sampler(policy), tokenizer) as manager:
        records = asyncio.run(example.grpo.run(manager, [(3, 4), (0, 9), (5, 1)], tokenizer))

    for record in records:
        assert len(record.completions) == example.grpo.GROUP_SIZE
        for completion in record.completions:
            assert completion.message_log[0]["token_ids"].tolist() == record.prompt[0]["token_ids"].tolist()
            check_log_probs(completion, policy)


TOOL_APP = """
from fastapi import FastAPI
from pydantic import BaseModel
from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer

class Expression(BaseModel):
    expression: str

class Calculator(SimpleResourcesServer):
    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/calculate")(self.calculate)
        return app

    async def calculate(self, body: Expression) -> str:
        return f"= {len(body.expression)}."

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**dict(body), reward=1.0)
"""
TOOL = {
    "type": "function",
    "name": "calculate",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    "strict": False,
}


def tool_user(example: Any, sampler: Any, tokenizer: Any) -> FastAPI:
    """A Chat Completions endpoint that reads the policy's first two turns as tool calls, the third as its answer."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(body: dict[str, Any] = Body()) -> Any:
        prompt = tokenizer.apply_chat_template(body["messages"])
        answer = example.server.completion(body, prompt, sampler.sample(prompt, 4), tokenizer)
        if sum(message["role"] == "tool" for message in body["messages"]) < 2:
            message = answer["choices"][0]["message"]
            arguments = json.dumps({"expression": message["content"]})
            function = {"name": "calculate", "arguments": arguments}
            message |= {"content": None, "tool_calls": [{"id": uuid4().hex, "type": "function", "function": function}]}
            answer["choices"][0]["finish_reason"] = "tool_calls"
        return answer

    return app


@contextmanager
def tool_using_gym(folder: Path, base_url: str) -> Iterator[NemoGym]:
    server = folder / "resources_servers" / "calculator"
    server.mkdir(parents=True)
    (server / "app.py").write_text(TOOL_APP)
    (server / "requirements.txt").write_text("")
    config = yaml.safe_load((EXAMPLES / "resources_servers/tiny_arithmetic/configs/tiny_arithmetic.yaml").read_text())
    del config["tiny_arithmetic"]
    block = {"entrypoint": "app.py", "domain": "math", "isolation": "hosted"}
    config["calculator"] = {"resources_servers": {"calculator": block}}
    config["tiny_arithmetic_agent"]["responses_api_agents"]["simple_agent"]["resources_server"]["name"] = "calculator"
    with NemoGym({"model_name": "tiny", "base_urls": [base_url], "initial_global_config_dict": config}) as gym:
        yield gym


def servers_manager(gym: NemoGym, tokenizer: Any, **options: Any) -> RolloutManager:
    config: Any = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 4}
    config |= {"stop_strings": None, "stop_token_ids": None}
    return RolloutManager(tokenizer, {"nemo_gym": gym}, 6, 64, generation_config=config, use_nemo_gym=True, **options)


def test_message_logs_are_token_exact_over_multi_turn_tool_use(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", os.pathsep.join([str(tmp_path), str(EXAMPLES)]))
    policy, tokenizer = example.policy.NumberLinePolicy(), example.policy.ToyTokenizer()
    sampler = example.policy.Sampler(policy)
    given = example.grpo.sample_of((3, 4), tokenizer)
    given["extra_env_info"]["responses_create_params"]["tools"] = [TOOL]

    with (
        example.server.serving(tool_user(example, sampler, tokenizer)) as base_url,
        tool_using_gym(tmp_path, base_url) as gym,
    ):
        record = asyncio.run(servers_manager(gym, tokenizer).run_rollout(given))

    assert len(record.completions) == 6
    for completion in record.completions:
        log = completion.message_log
        assert [message["role"] for message in log] == ["user", "assistant"] * 3
        whole = tokenizer.decode(torch.cat([message["token_ids"] for message in log]))
        said = [tokenizer.decode(message["token_ids"]) for message in log[1::2]]
        after_tool = "<tool>= 1.<end><assistant>"
        assert whole == f"<user>3+4=<end><assistant>{said[0]}{after_tool}{said[1]}{after_tool}{said[2]}"
        check_log_probs(completion, policy)


def without_numbers(example: Any, sampler: Any, tokenizer: Any) -> FastAPI:
    """A Chat Completions endpoint whose first log-prob is always NaN, which JSON writes as null."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(body: dict[str, Any] = Body()) -> Any:
        prompt = tokenizer.apply_chat_template(body["messages"])
        answer = example.server.completion(body, prompt, sampler.sample(prompt, 4), tokenizer)
        answer["choices"][0]["logprobs"]["content"][0]["logprob"] = None
        return answer

    return app


def test_log_probs_that_are_no_numbers_never_reach_the_trainer(example: Any) -> None:
    tokenizer = example.policy.ToyTokenizer()
    app = without_numbers(example, example.policy.Sampler(example.policy.NumberLinePolicy()), tokenizer)
    paths = ["resources_servers/tiny_arithmetic/configs/tiny_arithmetic.yaml"]
    config = {"config_paths": paths, "model_retry_max_tries": 1}
    given = example.grpo.sample_of((3, 4), tokenizer)

    with (
        example.server.serving(app) as base_url,
        NemoGym({"model_name": "tiny", "base_urls": [base_url], "initial_global_config_dict": config}) as gym,
        pytest.raises(RolloutFailure),
    ):
        asyncio.run(servers_manager(gym, tokenizer).run_rollout(given))


def test_an_over_long_prompt_is_a_data_failure(example: Any) -> None:
    tokenizer = example.policy.ToyTokenizer()
    given = example.grpo.sample_of((3, 4), tokenizer)
    given["extra_env_info"]["responses_create_params"]["input"][0]["content"] = "1" * 80
    sampler = example.policy.Sampler(example.policy.NumberLinePolicy())

    with (
        example.grpo.servers_manager(sampler, tokenizer) as manager,
        pytest.raises(RolloutDataFailure, match=r"no generation data.*83 tokens"),
    ):
        asyncio.run(manager.run_rollout(given))


def test_sampling_does_not_depend_on_the_order_of_prompts(example: Any) -> None:
    policy, prompts = example.policy.NumberLinePolicy(), [[11, 3], [12, 4], [11, 3], [11, 3]]

    def said(order: list[int]) -> list[Any]:
        sampler = example.policy.Sampler(policy)
        return sorted((prompts[place], sampler.sample(prompts[place], 4)) for place in order)

    assert said([0, 1, 2, 3]) == said([3, 2, 1, 0])
