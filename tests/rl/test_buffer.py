"""Groups on their way to a trainer: room, age, order, and a file that a killed trainer finds again."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from nemo_gym.rl.buffer import BufferedGroup, BufferFileError, BufferFullError, RolloutBuffer
from nemo_gym.rl.failures import (
    RolloutDataFailure,
    RolloutInfraFailure,
    RolloutOutcome,
    RolloutRedispatchExhausted,
    RolloutRetryPolicy,
)
from nemo_gym.rl.interfaces import Completion, PromptGroupRecord, as_list
from nemo_gym.rl.rollout_manager import RolloutManager

T = TypeVar("T")


def run(main: Awaitable[T]) -> T:
    async def body() -> T:
        return await main

    return asyncio.run(body())


def group_of(prompt: int, reward: float = 1.0, tokens: int = 3, **extras: Any) -> PromptGroupRecord:
    log = [
        {"role": "user", "content": "", "token_ids": [1, 2]},
        {"role": "assistant", "content": "", "token_ids": [7] * tokens, "generation_logprobs": [-0.5] * tokens},
    ]
    completions = [Completion(log, {"reward": reward, **extras}, False, reward)]
    return PromptGroupRecord(
        prompt, log[:1], {"id": prompt}, {"task_name": "t"}, completions, {"total_reward/mean": reward}
    )


async def fill(buffer: RolloutBuffer, *prompts: int, **options: Any) -> None:
    for prompt in prompts:
        await buffer.commit(buffer.reserve(), group_of(prompt, **options))


def prompts_in(groups: list[BufferedGroup]) -> list[int]:
    return [group.record.prompt_idx for group in groups]


def test_groups_are_taken_in_the_order_of_their_places() -> None:
    buffer = RolloutBuffer()

    async def main() -> list[BufferedGroup]:
        first, second = buffer.reserve(), buffer.reserve()
        await buffer.commit(second, group_of(2))
        await buffer.commit(first, group_of(1))
        await fill(buffer, 3)
        return await buffer.take(3)

    assert prompts_in(run(main())) == [2, 1, 3]
    assert (len(buffer), buffer.reserved) == (0, 0)


def test_a_full_buffer_has_no_room_until_a_trainer_is_done() -> None:
    buffer = RolloutBuffer(capacity=2)

    async def main() -> None:
        await fill(buffer, 1)
        buffer.reserve()
        with pytest.raises(BufferFullError, match=r"all 2 places are taken: 1 groups are being made, 1 are ready"):
            buffer.reserve()
        waiting = asyncio.create_task(buffer.wait_for_room())
        taken = buffer.take_ready()
        await asyncio.sleep(0)
        assert not waiting.done()
        buffer.done(taken)
        await asyncio.wait_for(waiting, 30)

    run(main())
    assert buffer.has_room


def test_a_place_that_is_given_back_is_free_again() -> None:
    buffer = RolloutBuffer(capacity=1)

    run(buffer.remove_group(buffer.reserve()))

    assert buffer.has_room
    assert buffer.stats.abandoned == 1


def test_groups_that_are_too_old_are_left_out_and_counted() -> None:
    buffer = RolloutBuffer(max_age=1)

    async def main() -> list[BufferedGroup]:
        await fill(buffer, 1)
        buffer.set_weight_version(1)
        await fill(buffer, 2)
        buffer.set_weight_version(2)
        late = buffer.reserve(weight_version=0)
        await buffer.commit(late, group_of(3))
        return buffer.take_ready()

    groups = run(main())

    assert [(group.record.prompt_idx, group.age(2)) for group in groups] == [(2, 1)]
    assert buffer.stats.too_old == 2


def test_a_trainer_may_say_what_it_wants_first() -> None:
    buffer = RolloutBuffer(priority=lambda group: -group.record.completions[0].reward)

    async def main() -> tuple[list[BufferedGroup], list[BufferedGroup]]:
        await buffer.commit(buffer.reserve(), group_of(1, reward=0.2))
        await buffer.commit(buffer.reserve(), group_of(2, reward=0.9))
        await buffer.commit(buffer.reserve(), group_of(3, reward=0.5))
        return await buffer.take(1), await buffer.take(1, priority=lambda group: group.record.completions[0].reward)

    best, worst = run(main())

    assert (prompts_in(best), prompts_in(worst)) == ([2], [1])


def test_taking_waits_for_what_is_still_made() -> None:
    buffer = RolloutBuffer()

    async def main() -> list[BufferedGroup]:
        taking = asyncio.create_task(buffer.take(2))
        for prompt in (1, 2):
            await asyncio.sleep(0)
            assert not taking.done()
            await fill(buffer, prompt)
        return await asyncio.wait_for(taking, 30)

    assert prompts_in(run(main())) == [1, 2]


def test_a_file_gives_back_every_group_that_is_not_done(tmp_path: Path) -> None:
    path = tmp_path / "buffer.ngb"
    before = RolloutBuffer(path=path)

    async def main() -> None:
        before.set_weight_version(4)
        await fill(before, 1, 2, 3, 4, note="é")
        before.done(before.take_ready(1))
        before.take_ready(1)

    run(main())
    after = RolloutBuffer(path=path)

    groups = after.take_ready()
    assert prompts_in(groups) == [2, 3, 4]
    record = groups[0].record
    assert as_list(record.completions[0].message_log[1]["token_ids"]) == [7, 7, 7]
    assert as_list(record.completions[0].message_log[1]["generation_logprobs"]) == [-0.5] * 3
    assert record.completions[0].env_extras == {"reward": 1.0, "note": "é"}
    assert (record.prompt_idx, record.metadata) == (2, {"task_name": "t"})
    assert record.rollout_metrics == {"total_reward/mean": 1.0}
    assert after.weight_version == 4
    assert after.reserve() == 5


def test_what_was_put_back_is_taken_again_in_its_old_order() -> None:
    buffer = RolloutBuffer()

    async def main() -> list[BufferedGroup]:
        await fill(buffer, 1, 2, 3)
        buffer.put_back(buffer.take_ready(2))
        return buffer.take_ready()

    assert prompts_in(run(main())) == [1, 2, 3]


def test_a_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "buffer.ngb"
    buffer = RolloutBuffer(path=path, capacity=10)

    async def main() -> int:
        largest = 0
        for prompt in range(40):
            await fill(buffer, prompt, tokens=10_000)
            largest = max(largest, path.stat().st_size)
            if prompt % 2:
                buffer.done(buffer.take_ready(2))
        return largest

    largest = run(main())
    assert path.stat().st_size <= largest < 2_500_000  # forty groups of 210 kB each came by
    assert len(RolloutBuffer(path=path)) == 0


def test_a_group_that_was_cut_short_is_left_out_and_damage_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "buffer.ngb"
    run(fill(RolloutBuffer(path=path), 1, 2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])

    buffer = RolloutBuffer(path=path)
    assert len(buffer) == 1
    assert "not committed" in caplog.text
    run(fill(buffer, 3))
    assert prompts_in(RolloutBuffer(path=path).take_ready()) == [1, 3]

    path.write_bytes(whole.replace(b'"id":1', b'"id":9'))
    with pytest.raises(BufferFileError, match="damaged at byte 0"):
        RolloutBuffer(path=path)


def test_a_group_that_is_no_json_is_refused_with_its_prompt(tmp_path: Path) -> None:
    buffer = RolloutBuffer(path=tmp_path / "buffer.ngb")
    with pytest.raises(BufferFileError, match="the group of prompt 5 cannot be kept in a file"):
        run(buffer.commit(buffer.reserve(), group_of(5, state=object())))
    assert buffer.reserved == 1


TRAINER = """
import asyncio, sys
from tests.rl.test_buffer import fill
from nemo_gym.rl import RolloutBuffer

async def main():
    buffer = RolloutBuffer(path=sys.argv[1], capacity=10**6)
    for prompt in range(10**6):
        await fill(buffer, prompt, tokens=2_000)
        print(prompt, flush=True)

asyncio.run(main())
"""


def test_a_trainer_that_is_killed_loses_no_committed_group(tmp_path: Path) -> None:
    path = tmp_path / "buffer.ngb"
    program = [sys.executable, "-c", TRAINER, str(path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        told = [int(trainer.stdout.readline()) for _ in range(20)]
        os.kill(trainer.pid, signal.SIGKILL)
        told += [int(line) for line in trainer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]

    found = prompts_in(RolloutBuffer(path=path, capacity=10**6).take_ready())

    assert found[: len(told)] == told
    assert len(found) - len(told) in (0, 1)


class Impl:
    """Stands behind a manager and does what a test says."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)

    async def run_rollout(self, sample: Any) -> PromptGroupRecord:
        result = self.results.pop(0)
        if isinstance(result, BaseException):
            raise result
        if callable(result):
            await result()
        return group_of(sample["idx"])


def manager_of(buffer: Any, *results: Any, **policy: Any) -> RolloutManager:
    config: Any = {"stop_strings": None, "stop_token_ids": None, "top_k": None}
    config |= {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 1}
    manager = RolloutManager(
        object(),  # type: ignore[arg-type]
        {},
        num_generations_per_prompt=1,
        max_seq_len=10,
        generation_config=config,
        use_nemo_gym=True,
        tq_buffer=buffer,
        retry_policy=RolloutRetryPolicy.single_attempt(backoff_base_s=0.001, **policy),
    )
    manager._impl = Impl(*results)  # type: ignore[assignment]
    return manager


SAMPLE: Any = {"idx": 1}


def test_a_group_that_is_pushed_has_the_versions_it_was_made_with() -> None:
    buffer = RolloutBuffer()
    registry: dict[Any, Any] = {}

    async def new_weights() -> None:
        assert registry == {1: (asyncio.current_task(), 3)}
        manager.set_weight_version(4)

    manager = manager_of(buffer, new_weights)
    manager.set_weight_version(3)

    outcome = run(manager.generate_and_push(SAMPLE, target_step=9, inflight_registry=registry))

    (group,) = buffer.take_ready()
    assert outcome is RolloutOutcome.COMMITTED
    assert (group.start_weight_version, group.end_weight_version, group.target_step) == (3, 4, 9)
    assert registry == {}
    assert manager.stats.as_metrics()["rollout/committed_total"] == 1.0


def test_failures_are_tried_again_and_then_skipped_as_the_policy_allows() -> None:
    buffer = RolloutBuffer()
    bad = RolloutDataFailure("bad prompt")
    manager = manager_of(buffer, bad, bad, bad, bad, max_data_attempts=2, max_skipped_prompts=1)

    assert run(manager.generate_and_push(SAMPLE)) is RolloutOutcome.SKIPPED
    with pytest.raises(RolloutDataFailure, match="more than max_skipped_prompts=1 prompts failed") as caught:
        run(manager.generate_and_push(SAMPLE))

    assert caught.value.__cause__ is bad
    assert buffer.reserved == 0
    metrics = manager.stats.as_metrics()
    assert (metrics["rollout/skipped_total"], metrics["rollout/data_retry_total"]) == (1.0, 2.0)
    assert metrics["rollout/data_failures_total/RolloutDataFailure"] == 2.0


def test_without_an_allowance_the_failure_itself_is_raised() -> None:
    bad = RolloutDataFailure("bad prompt")
    with pytest.raises(RolloutDataFailure, match=r"^bad prompt$"):
        run(manager_of(RolloutBuffer(), bad).generate_and_push(SAMPLE))


def test_prompts_dropped_in_a_row_end_it_and_a_commit_begins_anew() -> None:
    gone = RolloutInfraFailure("no server")
    manager = manager_of(RolloutBuffer(), gone, None, gone, gone, max_consecutive_dropped_prompts=1)

    outcomes = [run(manager.generate_and_push(SAMPLE)) for _ in range(3)]
    with pytest.raises(RolloutRedispatchExhausted, match="2 prompts in a row") as caught:
        run(manager.generate_and_push(SAMPLE))

    assert [outcome.value for outcome in outcomes] == ["skipped", "committed", "skipped"]
    assert caught.value.__cause__ is gone
    metrics = manager.stats.as_metrics()
    assert metrics["rollout/infra_drops_total/RolloutInfraFailure"] == 3.0
    assert metrics["rollout/max_consecutive_infra_drops"] == 2.0


def test_cancelling_gives_the_place_back_and_is_no_failure() -> None:
    buffer = RolloutBuffer(capacity=1)
    registry: dict[Any, Any] = {}

    async def main() -> None:
        began = asyncio.Event()

        async def for_ever() -> None:
            began.set()
            await asyncio.Event().wait()

        manager = manager_of(buffer, for_ever)
        pushing = asyncio.create_task(manager.generate_and_push(SAMPLE, inflight_registry=registry))
        await began.wait()
        (task, _) = registry[1]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing

    run(main())
    assert (buffer.has_room, registry) == (True, {})


def test_a_buffer_that_cannot_clean_up_does_not_hide_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(RolloutBuffer):
        async def remove_group(self, group_id: int) -> None:
            raise OSError("no")

    with pytest.raises(RolloutDataFailure, match="bad prompt"):
        run(manager_of(Stubborn(), RolloutDataFailure("bad prompt")).generate_and_push(SAMPLE))
    assert "could not be given back" in caplog.text


def test_a_manager_without_a_buffer_says_so() -> None:
    with pytest.raises(AssertionError, match="tq_buffer is required"):
        run(manager_of(None).generate_and_push(SAMPLE))


@pytest.mark.parametrize("options", [{"capacity": 0}, {"max_age": -1}])
def test_impossible_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"capacity is 0|max_age is -1"):
        RolloutBuffer(**options)  # type: ignore[arg-type]


def test_branches_and_masks_are_found_again_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "buffer.ngb"
    record = group_of(1)
    branch = [{"role": "user", "content": "", "token_ids": [1, 9]}, dict(record.completions[0].message_log[1])]
    record.completions[0].branches.append(branch)
    record.completions.append(Completion(record.prompt, None, False, math.nan, mask_reason="lost"))

    async def main() -> None:
        buffer = RolloutBuffer(path=path)
        await buffer.commit(buffer.reserve(), record)

    run(main())
    first, lost = RolloutBuffer(path=path).take_ready()[0].record.completions
    assert [[as_list(message["token_ids"]) for message in log] for log in first.samples] == [
        [[1, 2], [7, 7, 7]],
        [[1, 9], [7, 7, 7]],
    ]
    assert lost.mask_reason == "lost"
    assert math.isnan(lost.reward)
