"""The servers' path on real servers: an agent, an environment with a tool, and a model that needs no weights."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from nemo_gym import global_config
from nemo_gym.paths import PARENT_DIR
from nemo_gym.rl.environment import NemoGym
from nemo_gym.rl.failures import GymTransportError
from nemo_gym.rl.interfaces import GenerationConfig, as_list
from nemo_gym.rl.message_log import build_message_log
from nemo_gym.rl.rollout_manager import RolloutManager
from nemo_gym.rollout_collection import RolloutCollectionHelper

ENVIRONMENT = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
DATA = PARENT_DIR / "resources_servers/example_single_tool_call/data/example.jsonl"
AGENT = "example_single_tool_call_simple_agent"
TOKEN = "some-token"
CONFIG: GenerationConfig = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "max_new_tokens": 256,
    "stop_strings": None,
    "stop_token_ids": None,
}


class NumberTokenizer:
    """The scripted model numbers its tokens; what they say is of no interest here."""

    def batch_decode(self, sequences: list[list[int]], **_: Any) -> list[str]:
        return [" ".join(map(str, sequence)) for sequence in sequences]

    decode = __call__ = apply_chat_template = batch_decode


def gym_with_script(script: str) -> NemoGym:
    model = {"entrypoint": "app.py", "script": script, "return_token_id_information": True}
    config = {
        "config_paths": [ENVIRONMENT],
        "policy_model": {"responses_api_models": {"scripted_model": model}},
        "server_start_timeout_s": 90,
        "auth_token": TOKEN,
    }
    return NemoGym(
        {"model_name": "scripted", "base_urls": ["http://127.0.0.1:1/v1"], "initial_global_config_dict": config}
    )


@pytest.fixture(scope="module")
def gym() -> Iterator[NemoGym]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)  # or tests elsewhere would have the token
        with gym_with_script("responses_api_models/scripted_model/scripts/weather.yaml") as started:
            yield started


def row(number: int = 0) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(DATA.read_text().splitlines()[number])
    return {**given, "agent_ref": {"name": AGENT}}


def sample() -> Any:
    return {"idx": 0, "message_log": [], "extra_env_info": row()}


def manager(environment: NemoGym) -> RolloutManager:
    tokenizer: Any = NumberTokenizer()
    return RolloutManager(tokenizer, {"nemo_gym": environment}, 4, 4096, generation_config=CONFIG, use_nemo_gym=True)


def test_a_group_comes_from_an_agent_that_uses_a_tool(gym: NemoGym) -> None:
    record = asyncio.run(manager(gym).run_rollout(sample()))

    assert len(record.completions) == 4
    for completion in record.completions:
        assert [message["role"] for message in completion.message_log] == ["user", "assistant", "user", "assistant"]
        assert completion.reward == 1.0
        for message in completion.message_log[1::2]:
            assert len(message["token_ids"]) == len(message["generation_logprobs"]) > 0
    assert record.rollout_metrics["turns_per_sample/mean"] == 2.0
    assert record.rollout_metrics[f"{AGENT}/reward/mean"] == 1.0
    assert gym.health_check()


def test_message_logs_are_token_exact_over_several_turns(gym: NemoGym) -> None:
    """What the model server said about the last turn is, token for token, what the log adds up to."""

    async def answers() -> list[dict[str, Any]]:
        assert gym._run_helper is not None
        head = gym._run_helper._server_client.head_server_config
        return [
            (await rollout)[1]
            for rollout in RolloutCollectionHelper().run_examples([row(0), row(1), row(2)], head_server_config=head)
        ]

    for answer in asyncio.run(answers()):
        items = [item for item in answer["response"]["output"] if "generation_token_ids" in item]
        log = build_message_log(deepcopy(answer), NumberTokenizer())["message_log"]

        assert len(items) == 2
        whole = [token for message in log for token in as_list(message["token_ids"])]
        assert whole == items[-1]["prompt_token_ids"] + items[-1]["generation_token_ids"]
        for message, item in zip(log[1::2], items, strict=True):
            assert as_list(message["token_ids"]) == item["generation_token_ids"]
            assert as_list(message["generation_logprobs"]) == pytest.approx(item["generation_log_probs"])


def test_a_second_environment_attaches_to_the_run_and_leaves_it_running(gym: NemoGym) -> None:
    assert gym._run_helper is not None
    head = gym._run_helper._server_client.head_server_config
    with NemoGym({"head_server": {"host": head.host, "port": head.port}}) as attached:
        assert len(asyncio.run(manager(attached).run_rollout(sample())).completions) == 4
    assert len(asyncio.run(manager(gym).run_rollout(sample())).completions) == 4


def attach_elsewhere(environment: NemoGym, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Attach in a process that has no config of its own, as a trainer or an actor has none."""
    assert environment._run_helper is not None
    head = environment._run_helper._server_client.head_server_config
    cfg = {"head_server": {"host": head.host, "port": head.port}, "initial_global_config_dict": settings}
    program = f"from nemo_gym.rl import NemoGym\nwith NemoGym({cfg!r}) as gym: print(gym.health_check())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_a_run_with_a_token_lets_in_whoever_has_it(gym: NemoGym) -> None:
    assert attach_elsewhere(gym, auth_token=TOKEN).stdout == "True\n"
    assert "answers only to callers with the token of its run" in attach_elsewhere(gym).stderr


async def server_pids(environment: NemoGym) -> set[int]:
    assert environment._run_helper is not None
    head = environment._run_helper._server_client.head_server_config
    url = f"http://{head.host}:{head.port}/server_instances"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return {instance["pid"] for instance in await answer.json()}


def test_rows_do_not_wait_for_servers_that_have_died(tmp_path: Path) -> None:
    script = tmp_path / "slow.yaml"
    script.write_text(yaml.safe_dump({"latency_s": 300}))

    async def main(environment: NemoGym) -> None:
        group = asyncio.create_task(manager(environment).run_rollout(sample()))
        await asyncio.sleep(0.5)
        for pid in await server_pids(environment):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(GymTransportError):
            async with asyncio.timeout(60):
                await group

    with gym_with_script(str(script)) as environment:
        asyncio.run(main(environment))
