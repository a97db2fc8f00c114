"""`NemoGym` as a Ray actor: the same class, the same calls."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_gym.rl.environment import NemoGym
from nemo_gym.rl.failures import FailureClass, GymTransportError, classify_rollout_failure
from nemo_gym.rl.rollout_manager import RolloutManager

ray: Any = pytest.importorskip("ray", reason="actors need Ray: install the extra `ray`")


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


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
    here = attached(lambda row: result_of(row))
    actor = NemoGym.as_actor(here.cfg)
    ray.get(actor.start.remote())
    given: Any = {"idx": 0, "message_log": [], "extra_env_info": rows(1)[0]}

    record = asyncio.run(manager(actor, tokenizer).run_rollout(given))

    assert [completion.reward for completion in record.completions] == [1.0, 1.0]
    assert ray.get(actor.metrics.remote())["rollout/gym_row_redispatch_total"] == 0.0
    ray.get(actor.shutdown.remote())


def test_a_failure_in_an_actor_keeps_its_class(
    attached: Callable[..., NemoGym], rows: Callable[[int], list[dict[str, Any]]], tokenizer: Any
) -> None:
    here = attached(lambda row: {**row, "_ng_no_persist": True})
    actor = NemoGym.as_actor(here.cfg, max_restarts=0)
    ray.get(actor.start.remote())
    given: Any = {"idx": 0, "message_log": [], "extra_env_info": rows(1)[0]}

    with pytest.raises(GymTransportError, match="never came back") as caught:
        asyncio.run(manager(actor, tokenizer).run_rollout(given))
    assert classify_rollout_failure(caught.value) is FailureClass.INFRA
