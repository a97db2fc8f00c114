"""`NemoGym` as a Ray actor: the same class, the same calls."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_gym.rl.environment import NemoGym
from nemo_gym.rl.failures import FailureClass, GymTransportError, NonContiguousTokensError, classify_rollout_failure
from nemo_gym.rl.rollout_manager import RolloutManager

ray: Any = pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` runs these tests")


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def started(here: NemoGym, **options: Any) -> Any:
    """An actor attached to the same servers."""
    actor = NemoGym.as_actor(here.cfg, **options)
    ray.get(actor.start.remote(), timeout=60)
    return actor


def manager(gym: Any, tokenizer: Any) -> RolloutManager:
    config: Any = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8}
    config |= dict.fromkeys(("top_k", "stop_strings", "stop_token_ids"))
    return RolloutManager(tokenizer, {"nemo_gym": gym}, 2, 64, generation_config=config, use_nemo_gym=True)


def test_a_group_comes_through_an_actor(
    attached: Callable[..., NemoGym],
    rows: Callable[[int], list[dict[str, Any]]],
    result_of: Callable[..., dict[str, Any]],
    tokenizer: Any,
) -> None:
    actor = started(attached(lambda row: result_of(row)))
    given: Any = {"idx": 0, "message_log": [], "extra_env_info": rows(1)[0]}

    record = asyncio.run(manager(actor, tokenizer).run_rollout(given))

    assert [completion.reward for completion in record.completions] == [1.0, 1.0]
    assert ray.get(actor.metrics.remote())["rollout/gym_row_redispatch_total"] == 0.0
    ray.get(actor.shutdown.remote())


def test_a_failure_in_an_actor_keeps_its_class(
    attached: Callable[..., NemoGym], rows: Callable[[int], list[dict[str, Any]]], tokenizer: Any
) -> None:
    actor = started(attached(lambda row: {**row, "_ng_no_persist": True}), max_restarts=0)
    given: Any = {"idx": 0, "message_log": [], "extra_env_info": rows(1)[0]}

    with pytest.raises(GymTransportError, match="never came back") as caught:
        asyncio.run(manager(actor, tokenizer).run_rollout(given))
    assert classify_rollout_failure(caught.value) is FailureClass.INFRA


def test_tokens_that_drift_in_an_actor_are_told_with_the_difference(
    attached: Callable[..., NemoGym],
    rows: Callable[[int], list[dict[str, Any]]],
    result_of: Callable[..., dict[str, Any]],
    tokenizer: Any,
) -> None:
    def drifting(row: dict[str, Any]) -> dict[str, Any]:
        result = result_of(row)
        result["response"]["output"] *= 2
        return result

    actor = started(attached(drifting, branches=False))
    given: Any = {"idx": 0, "message_log": [], "extra_env_info": rows(1)[0]}

    with pytest.raises(NonContiguousTokensError, match="The prompt ends too early"):
        asyncio.run(manager(actor, tokenizer).run_rollout(given))


def test_an_actor_stops_working_on_what_nobody_waits_for(
    attached: Callable[..., NemoGym], rows: Callable[[int], list[dict[str, Any]]], tokenizer: Any
) -> None:
    begun, given_up = threading.Event(), threading.Event()

    async def slow(row: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        try:
            await asyncio.sleep(300)
        except asyncio.CancelledError:
            given_up.set()
            raise
        return row

    actor = started(attached(slow))
    given: Any = {"idx": 0, "message_log": [], "extra_env_info": rows(1)[0]}

    async def leave() -> None:
        group = asyncio.create_task(manager(actor, tokenizer).run_rollout(given))
        assert await asyncio.to_thread(begun.wait, 60)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    asyncio.run(leave())
    assert given_up.wait(60)


def test_an_actor_starts_servers_and_stops_them_again() -> None:
    config = {
        "config_paths": ["resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"],
        "policy_model": {"responses_api_models": {"scripted_model": {"entrypoint": "app.py"}}},
        "server_start_timeout_s": 90,
    }
    actor = NemoGym.as_actor(
        {"model_name": "scripted", "base_urls": ["http://127.0.0.1:1/v1"], "initial_global_config_dict": config}
    )
    ray.get(actor.start.remote(), timeout=120)
    assert ray.get(actor.health_check.remote(), timeout=60)
    ray.get(actor.shutdown.remote(), timeout=60)
    assert not ray.get(actor.health_check.remote(), timeout=60)
