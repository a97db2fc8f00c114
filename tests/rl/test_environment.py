"""`NemoGym` over real HTTP: an agent that answers as the test says, behind a head server."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Response

from nemo_gym.errors import ConfigError
from nemo_gym.http.errors import HeadServerError
from nemo_gym.rl.environment import NemoGym, setup_nemo_gym_config
from nemo_gym.rl.failures import (
    GymTransportError,
    NonContiguousTokensError,
    RolloutDataFailure,
    RolloutRetryPolicy,
    RolloutTimeouts,
)
from nemo_gym.rl.groups import group_advantages
from nemo_gym.rl.interfaces import as_list
from nemo_gym.rl.rollout_manager import RolloutManager
from nemo_gym.token_id_capture.records import TokenEntry
from nemo_gym.token_id_capture.store import TokenCaptureStore

Attach = Callable[..., NemoGym]
Rows = Callable[[int], list[dict[str, Any]]]
ResultOf = Callable[..., dict[str, Any]]

TWICE = RolloutRetryPolicy.single_attempt(max_gym_row_attempts=2, backoff_base_s=0.001)


def run(gym: NemoGym, rows: list[dict[str, Any]], tokenizer: Any, **options: Any) -> Any:
    return asyncio.run(gym.run_rollouts(rows, tokenizer, "timing/rollout", **options))


def test_results_come_in_row_order_with_message_logs_and_timings(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    async def answer(row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.05 if row["_rowidx"] == 0 else 0)
        return result_of(row, reward=float(row["_rowidx"]))

    results, timing = run(attached(answer), rows(3), tokenizer)

    assert [result["full_result"]["reward"] for result in results] == [0.0, 1.0, 2.0]
    assert [as_list(message["token_ids"]) for message in results[0]["message_log"]] == [[104, 105], [121, 101, 115]]
    item = results[0]["full_result"]["response"]["output"][0]
    assert (item["prompt_str"], item["generation_str"]) == ("hi", "yes")
    assert timing.keys() == {
        "timing/rollout/await_results",
        "timing/rollout/postprocess_results",
        "timing/rollout/postprocess_results_pct",
        "gym_row_redispatches",
        "lp_nan_retries",
    }


def test_only_rows_that_were_lost_are_sent_again(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    sent: Counter[int] = Counter()

    def answer(row: dict[str, Any]) -> Any:
        sent[row["_rowidx"]] += 1
        if row["_rowidx"] == 1 and sent[1] == 1:
            return Response("overloaded", status_code=503)
        return result_of(row)

    gym = attached(answer)
    results, timing = run(gym, rows(3), tokenizer, retry_policy=TWICE)

    assert len(results) == 3
    assert sent == {0: 1, 1: 2, 2: 1}
    assert timing["gym_row_redispatches"] == 1.0
    assert gym.metrics()["rollout/gym_row_redispatch_total"] == 1.0


def test_a_row_that_is_lost_every_time_fails_the_group(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    def answer(row: dict[str, Any]) -> Any:
        return Response("overloaded", status_code=503) if row["_rowidx"] == 1 else result_of(row)

    with pytest.raises(GymTransportError, match=r"rows \[.*1.*\] of 3 never came back after 2 dispatches.*503"):
        run(attached(answer), rows(3), tokenizer, retry_policy=TWICE)


def test_a_row_that_never_returns_is_named_when_time_is_up(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    async def answer(row: dict[str, Any]) -> Any:
        if row["_rowidx"] == 2:
            await asyncio.sleep(3600)
        return result_of(row)

    with pytest.raises(GymTransportError, match=r"rows \[2\] of 3 never came back within rollout_s=1 s"):
        run(attached(answer), rows(3), tokenizer, timeouts=RolloutTimeouts(rollout_s=1))


def test_a_refused_row_fails_the_group_at_once_and_its_siblings_are_cancelled(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    async def answer(row: dict[str, Any]) -> Any:
        if row["_rowidx"] == 1:
            return Response("no such task", status_code=422)
        await asyncio.sleep(3600)
        return None

    async def main() -> None:
        with pytest.raises(RolloutDataFailure, match=r"row 1 failed: 422.*no such task"):
            await gym.run_rollouts(rows(3), tokenizer, "timing/rollout", retry_policy=TWICE)
        await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    gym = attached(answer)
    asyncio.run(main())


def test_a_failure_that_an_agent_reports_is_no_result(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    def answering(**failure: Any) -> NemoGym:
        return attached(lambda row: result_of(row, reward=0.0, **failure))

    with pytest.raises(RolloutDataFailure, match="row 0 failed: the agent reported 'judge_failed': it is asleep"):
        run(answering(_ng_failure_class="judge_failed", _ng_failure_message="it is asleep"), rows(1), tokenizer)
    with pytest.raises(GymTransportError, match="the agent reported 'timeout'"):
        run(answering(_ng_failure_class="timeout"), rows(1), tokenizer)
    with pytest.raises(GymTransportError, match="cut short from outside"):
        run(answering(_ng_no_persist=True), rows(1), tokenizer)
    with pytest.raises(RolloutDataFailure, match="answered with list"):
        run(attached(lambda row: []), rows(1), tokenizer)


def nan_for_a_while(result_of: ResultOf, times: int, sent: Counter[int]) -> Callable[[dict[str, Any]], Any]:
    def answer(row: dict[str, Any]) -> Any:
        sent[row["_rowidx"]] += 1
        if row["_rowidx"] == 0 and sent[0] <= times:
            return result_of(row, [math.nan, 0.0, 0.0])
        return result_of(row)

    return answer


def test_rows_with_nan_log_probs_are_run_again(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    sent: Counter[int] = Counter()
    settings = {"initial_global_config_dict": {"rollout_max_attempts_to_avoid_lp_nan": 3}}
    gym = attached(nan_for_a_while(result_of, 2, sent), **settings)

    results, timing = run(gym, rows(2), tokenizer)

    assert sent == {0: 3, 1: 1}
    assert as_list(results[0]["message_log"][1]["generation_logprobs"]) == pytest.approx([-0.1, -0.2, -0.3])
    assert timing["lp_nan_retries"] == 2.0
    assert gym.metrics()["rollout/lp_nan_retry_total"] == 2.0


@pytest.mark.parametrize("attempts", [1, 2])
def test_nan_log_probs_that_stay_are_a_data_failure(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any, attempts: int
) -> None:
    sent: Counter[int] = Counter()
    gym = attached(nan_for_a_while(result_of, 9, sent), rollout_max_attempts_to_avoid_lp_nan=attempts)
    with pytest.raises(RolloutDataFailure, match=f"row 0 came back with NaN log-probs {attempts} times"):
        run(gym, rows(2), tokenizer)
    assert sent[0] == attempts


def drifting(row: dict[str, Any], result_of: ResultOf) -> dict[str, Any]:
    """Two turns, the second of which remembers the first otherwise."""
    result = result_of(row)
    again = result_of(row)["response"]["output"][0]
    again["prompt_token_ids"] = [104, 105, 121, 69, 115, 33]
    result["response"]["output"].append(again)
    return result


def test_drifted_tokens_fail_the_group_and_name_the_row_where_that_is_asked_for(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    gym = attached(lambda row: drifting(row, result_of), branches=False)
    with pytest.raises(NonContiguousTokensError, match="row 0: Non-contiguous messages found") as caught:
        run(gym, rows(1), tokenizer)
    assert ">>> 101:'e' 115:'s'" in str(caught.value)
    assert ">>> 69:'E' 115:'s'" in str(caught.value)


def test_drifted_tokens_make_two_samples_of_a_rollout_and_the_first_time_it_is_said_why(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gym = attached(lambda row: drifting(row, result_of))
    with caplog.at_level("WARNING"):
        results, _ = run(gym, rows(3), tokenizer)

    for result in results:
        logs = [result["message_log"], *result["branches"]]
        assert [[as_list(message["token_ids"]) for message in log] for log in logs] == [
            [[104, 105], [121, 101, 115]],
            [[104, 105, 121, 69, 115, 33], [121, 101, 115]],
        ]
    assert gym.metrics()["rollout/branched_total"] == 3
    assert caplog.text.count("a rollout became 2 samples") == 1
    assert ">>> 69:'E' 115:'s'" in caplog.text


def manager_of(gym: Any, tokenizer: Any, size: int, **options: Any) -> RolloutManager:
    config: Any = dict.fromkeys(("top_k", "stop_strings", "stop_token_ids")) | {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 4,
    }
    return RolloutManager(
        tokenizer, {"nemo_gym": gym}, size, 64, generation_config=config, use_nemo_gym=True, **options
    )


def group_of(manager: RolloutManager, rows: Rows) -> Any:
    given: Any = {"idx": 7, "message_log": [], "extra_env_info": rows(1)[0]}
    return asyncio.run(manager.run_rollout(given))


@pytest.mark.parametrize("broken", ["drift", "no tokens", "a failure", "status 422", "nan", "reward"])
def test_one_bad_rollout_does_not_discard_its_group_where_groups_may_be_partial(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any, broken: str
) -> None:
    def answer(row: dict[str, Any]) -> Any:
        result = result_of(row)
        result["reward"] = float(row["_rowidx"])
        if row["_rowidx"] != 1:
            return result
        if broken == "status 422":
            return Response("no such task", status_code=422)
        bad = {
            "drift": lambda: drifting(row, result_of),
            "no tokens": lambda: {**result, "response": {"output": []}},
            "a failure": lambda: {**row, "_ng_failure_class": "agent_error", "reward": 0.0},
            "nan": lambda: result_of(row, [None, -0.2, -0.3]),
            "reward": lambda: {**result, "reward": "high"},
        }
        return bad[broken]()

    gym = attached(answer, branches=False)
    with pytest.raises(RolloutDataFailure):
        group_of(manager_of(gym, tokenizer, 4), rows)
    with pytest.raises(RolloutDataFailure):
        group_of(manager_of(gym, tokenizer, 4, min_group_size=4), rows)
    group = group_of(manager_of(gym, tokenizer, 4, min_group_size=3), rows)

    assert [completion.mask_reason is None for completion in group.completions] == [True, False, True, True]
    masked = group.completions[1]
    assert masked.mask_reason
    assert math.isnan(masked.reward)
    assert [as_list(message["token_ids"]) for message in masked.message_log] == [[104, 105]]
    assert group.rollout_metrics["masked_completions"] == 1
    assert group.rollout_metrics["total_reward/mean"] == pytest.approx(5 / 3)
    assert group_advantages(group)[1] == 0.0
    assert group_advantages(group)[0] == pytest.approx(group_advantages([0.0, 2.0, 3.0])[0])


def test_rows_that_are_lost_for_good_are_masked_too(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    def answer(row: dict[str, Any]) -> Any:
        return Response("busy", status_code=503) if row["_rowidx"] == 0 else result_of(row)

    manager = manager_of(attached(answer), tokenizer, 3, min_group_size=2, retry_policy=TWICE)
    group = group_of(manager, rows)
    assert [completion.mask_reason is None for completion in group.completions] == [False, True, True]
    assert group.completions[0].mask_reason.startswith("rows [0] of 3 never came back after 2 dispatches")


def test_one_hung_rollout_is_masked_and_its_siblings_are_not_made_again(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    sent: Counter[int] = Counter()

    async def answer(row: dict[str, Any]) -> Any:
        sent[row["_rowidx"]] += 1
        if row["_rowidx"] == 3:
            await asyncio.sleep(3600)
        return result_of(row)

    limits = {"timeouts": RolloutTimeouts(rollout_s=1), "retry_policy": RolloutRetryPolicy(3, 3, 3)}
    manager = manager_of(attached(answer), tokenizer, 8, min_group_size=6, **limits)
    group = group_of(manager, rows)

    reasons = [completion.mask_reason for completion in group.completions]
    assert reasons == [None] * 3 + ["rows [3] of 8 never came back within rollout_s=1 s"] + [None] * 4
    assert sent == dict.fromkeys(range(8), 1)
    assert group.rollout_metrics["masked_completions"] == 1
    assert group.rollout_metrics["timing/rollout/run_rollouts"] < 20, "the group ends with its limit"


def test_a_lost_row_is_sent_again_while_a_sibling_hangs(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    sent: Counter[int] = Counter()

    async def answer(row: dict[str, Any]) -> Any:
        sent[row["_rowidx"]] += 1
        if row["_rowidx"] == 0 and sent[0] == 1:
            return Response("busy", status_code=503)
        if row["_rowidx"] == 2:
            await asyncio.sleep(3600)
        return result_of(row)

    limits: Any = {"timeouts": RolloutTimeouts(rollout_s=2), "retry_policy": TWICE}
    group = group_of(manager_of(attached(answer), tokenizer, 3, min_group_size=2, **limits), rows)

    assert [completion.mask_reason is None for completion in group.completions] == [True, True, False]
    assert sent == {0: 2, 1: 1, 2: 1}


def test_too_many_hung_rollouts_fail_their_group_and_each_is_named(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    async def answer(row: dict[str, Any]) -> Any:
        if row["_rowidx"] in (0, 2, 3):
            await asyncio.sleep(3600)
        return result_of(row)

    limits: Any = {"timeouts": RolloutTimeouts(rollout_s=1)}
    manager = manager_of(attached(answer), tokenizer, 8, min_group_size=6, **limits)
    with pytest.raises(GymTransportError, match=r"rows \[0, 2, 3\] of 8 never came back within rollout_s=1 s"):
        group_of(manager, rows)


def test_a_result_that_says_so_is_masked_and_keeps_its_reward(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    def answer(row: dict[str, Any]) -> Any:
        told = [{}, {"mask_sample": True}, {"instance_config": {"mask_sample": True}}][row["_rowidx"]]
        return result_of(row, **told)

    group = group_of(manager_of(attached(answer), tokenizer, 3), rows)
    assert [completion.mask_reason for completion in group.completions] == [
        None,
        "mask_sample",
        "instance_config.mask_sample",
    ]
    assert [completion.reward for completion in group.completions] == [1.0] * 3


def test_an_over_long_prompt_is_a_data_failure_for_the_manager_too(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    def answer(row: dict[str, Any]) -> Any:
        message = {"type": "message", "role": "assistant", "content": []}
        return {**row, "response": {"output": [message]}, "reward": 0.0}

    config: Any = dict.fromkeys(("top_k", "stop_strings", "stop_token_ids")) | {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 4,
    }
    manager = RolloutManager(
        tokenizer, {"nemo_gym": attached(answer)}, 2, 8, generation_config=config, use_nemo_gym=True
    )
    given: Any = {"idx": 0, "message_log": [], "extra_env_info": rows(1)[0]}
    with pytest.raises(RolloutDataFailure, match=r"row .: the result has no generation data.*prompt is 2 tokens"):
        asyncio.run(manager.run_rollout(given))
    assert manager.stats.as_metrics()["rollout/data_failures_total"] == 1.0


def test_rows_must_be_there_and_know_their_place(attached: Attach, rows: Rows, tokenizer: Any) -> None:
    gym = attached(lambda row: row)
    with pytest.raises(ValueError, match="there are no rows"):
        run(gym, [], tokenizer)
    with pytest.raises(ValueError, match=r"_rowidx \[1, 0\]"):
        run(gym, list(reversed(rows(2))), tokenizer)


def test_an_environment_must_be_started(rows: Rows, tokenizer: Any) -> None:
    gym = NemoGym({})
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        run(gym, rows(1), tokenizer)
    assert not gym.health_check()
    gym.shutdown()


def test_it_runs_whole_rollouts_only() -> None:
    with pytest.raises(NotImplementedError, match="run_rollouts"):
        NemoGym({}).step([], [])
    with pytest.raises(NotImplementedError, match="run_rollouts"):
        NemoGym({}).global_post_process_and_metrics({})


@pytest.mark.parametrize("attempts", [0, "many"])
def test_the_number_of_runs_against_nan_must_be_sound(attempts: Any) -> None:
    with pytest.raises(AssertionError, match="rollout_max_attempts_to_avoid_lp_nan"):
        NemoGym({"rollout_max_attempts_to_avoid_lp_nan": attempts}).start()


def test_attaching_to_nothing_is_an_error_that_names_the_address() -> None:
    with pytest.raises(HeadServerError, match=r"127\.0\.0\.1:1"):
        NemoGym({"head_server": {"host": "127.0.0.1", "port": 1}}).start()


def test_starting_servers_needs_a_policy() -> None:
    with pytest.raises(ConfigError, match="'model_name'"):
        NemoGym({"initial_global_config_dict": {}}).start()


def test_rollouts_slower_than_the_rhythm_in_which_servers_are_looked_after_arrive_all_the_same(
    attached: Attach, rows: Rows, result_of: ResultOf, tokenizer: Any
) -> None:
    async def answer(row: dict[str, Any]) -> Any:
        await asyncio.sleep(1.2)
        return result_of(row)

    assert len(run(attached(answer), rows(2), tokenizer)[0]) == 2


@pytest.mark.parametrize("shape", [dict, SimpleNamespace])
def test_a_trainers_configuration_is_made_fit_for_the_servers(shape: Any) -> None:
    vllm = {"async_engine": False, "other": 1}
    generation = {"vllm_cfg": vllm, "stop_strings": ["x"], "stop_token_ids": [1], "top_k": 5}
    setup_nemo_gym_config(shape(policy={"generation": generation}))

    assert vllm == {"async_engine": True, "expose_http_server": True, "other": 1}
    assert (generation["stop_strings"], generation["stop_token_ids"], generation["top_k"]) == (None, None, 5)
    with pytest.raises(ConfigError, match="has no 'policy'"):
        setup_nemo_gym_config({})


class BlackBox:
    """An agent that knows no tokens: what a model server would capture of its calls is put where it belongs."""

    def __init__(self, folder: Path, calls: list[tuple[list[int], list[int]]]) -> None:
        self.store = TokenCaptureStore(folder)
        self.calls = calls
        self.ids: list[str] = []

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        rollout_id = row["_ng_rollout_id"]
        self.ids.append(rollout_id)
        for number, (prompt, generation) in enumerate(self.calls):
            self.store.append(
                TokenEntry(
                    rollout_id=rollout_id,
                    model_call_id=f"call{number}",
                    prompt_token_ids=prompt,
                    generation_token_ids=generation,
                    generation_log_probs=[-0.5] * len(generation),
                    created_at=float(number),
                )
            )
        text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
        return {**row, "response": {"output": [text]}, "reward": 1.0}


def capture_config(folder: Path) -> dict[str, Any]:
    return {"token_id_capture": {"enabled": True, "all_agents": True, "dir": str(folder)}}


def test_what_was_captured_of_a_black_box_is_trained_on_a_sub_agent_as_a_sample_of_its_own(
    attached: Attach, rows: Rows, tokenizer: Any, tmp_path: Path
) -> None:
    agent = BlackBox(tmp_path, [([104, 105], [121]), ([50, 51], [52]), ([104, 105, 121, 63], [122])])
    gym = attached(agent, run_config=capture_config(tmp_path))
    group = group_of(manager_of(gym, tokenizer, 3), rows)

    assert len(set(agent.ids)) == 3
    for completion in group.completions:
        assert [[as_list(message["token_ids"]) for message in log] for log in completion.samples] == [
            [[104, 105], [121], [63], [122]],
            [[50, 51], [52]],
        ]
        assert completion.mask_reason is None
        assert completion.reward == 1.0
    assert not list(tmp_path.glob("*.jsonl")), "what was delivered is not kept twice"


def test_doubt_about_captured_calls_masks_the_completion_and_no_calls_are_a_data_failure(
    attached: Attach, rows: Rows, tokenizer: Any, tmp_path: Path
) -> None:
    unresolved = BlackBox(tmp_path, [([104, 105], [121]), ([104, 105], [122])])
    gym = attached(unresolved, run_config=capture_config(tmp_path))
    group = group_of(manager_of(gym, tokenizer, 2), rows)
    assert {completion.mask_reason for completion in group.completions} == {
        "calls were tried again, and it is not known which answer counted"
    }
    assert len(list(tmp_path.glob("*.jsonl"))) == 2, "evidence is kept"

    silent = attached(BlackBox(tmp_path, []), run_config=capture_config(tmp_path))
    with pytest.raises(RolloutDataFailure, match="no generation data"):
        group_of(manager_of(silent, tokenizer, 2), rows)
