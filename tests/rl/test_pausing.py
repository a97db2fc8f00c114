"""Pauses on the native path: generations stop, keep their tokens, and go on with the next weights."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.http.generation_gate import GenerationGate, GenerationInterrupted
from nemo_gym.rl.batches import collate, collate_packed
from nemo_gym.rl.buffer import RolloutBuffer
from nemo_gym.rl.calls import deadline
from nemo_gym.rl.failures import GenerationUnavailable, RolloutTimeouts
from nemo_gym.rl.interfaces import DatumSpec, EnvironmentReturn, GenerationConfig, PromptGroupRecord
from nemo_gym.rl.rollout_manager import RolloutManager

torch = pytest.importorskip("torch", reason="the native path works on tensors: install the extra `rl` (make test-rl)")

ENDS_AFTER = 6
OLD, NEW = "a", "b"


class Writer:
    """A policy that writes one letter at a time, of the weights it has, `ENDS_AFTER` letters in all."""

    def __init__(self, stops_after: int | None = 2, *, streams: bool = True) -> None:
        self.letter = OLD
        self.stops_after = stops_after
        """Letters after which it waits, once for every row, until `go` is set."""
        self.go = asyncio.Event()
        self.streams = streams
        self.asked: list[dict[str, Any]] = []
        self.waiting = 0
        self.under_way = 0

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        prompt = data["input_ids"][0].tolist()
        self.asked.append({name: value for name, value in data.items() if name not in ("input_ids", "input_lengths")})
        said: list[int] = []
        self.under_way += 1
        try:
            for _ in range(min(ENDS_AFTER - data.get("generated_so_far", 0), data.get("max_new_tokens", 99))):
                if len(said) == self.stops_after and not self.go.is_set():
                    self.waiting += 1
                    await self.go.wait()
                said.append(ord(self.letter))
                if self.streams:
                    yield 0, self.output(prompt, said)
                await asyncio.sleep(0)
            yield 0, self.output(prompt, said)
        finally:
            self.under_way -= 1

    def output(self, prompt: list[int], said: list[int], **more: Any) -> dict[str, Any]:
        return {
            "output_ids": torch.tensor([prompt + said]),
            "logprobs": torch.tensor([[0.0] * len(prompt) + [-0.5] * len(said)]),
            "unpadded_sequence_lengths": torch.tensor([len(prompt) + len(said)]),
            **more,
        }


class AbortableWriter(Writer):
    """One that tells nothing until it ends, but can be told to end."""

    def __init__(self) -> None:
        super().__init__(streams=False)
        self.aborts = 0

    def abort(self) -> None:
        """Called from a thread, as a plain method is."""
        self.aborts += 1
        self.loop.call_soon_threadsafe(self.stop.set)

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        prompt = data["input_ids"][0].tolist()
        so_far = data.get("generated_so_far", 0)
        self.asked.append({"generated_so_far": so_far})
        if so_far == 0:
            self.waiting += 1
            await self.stop.wait()
            yield 0, self.output(prompt, [ord(self.letter)] * 2, aborted=torch.tensor([True]))
            return
        yield 0, self.output(prompt, [ord(self.letter)] * (ENDS_AFTER - so_far), aborted=torch.tensor([False]))


class Environment:
    """Two turns, each worth a half."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        turn = metadata[0]["turn"] + 1
        return EnvironmentReturn(
            [{"role": "environment", "content": "?"}], [{"turn": turn}], None, torch.tensor([0.5]), [turn == 2]
        )


def sample(index: int = 0) -> DatumSpec:
    log = [{"role": "user", "content": "x", "token_ids": torch.tensor([ord("x")])}]
    return {"idx": index, "message_log": log, "extra_env_info": {"turn": 0}, "task_name": "write"}


def manager_of(tokenizer: Any, writer: Any, **options: Any) -> RolloutManager:
    settings: dict[str, Any] = {"num_generations_per_prompt": 2, "max_seq_len": 100, **options}
    return RolloutManager(tokenizer, {"write": Environment()}, policy_generation=writer, **settings)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for is the state of others
            await asyncio.sleep(0.001)


async def interrupted(manager: RolloutManager, writer: Writer) -> PromptGroupRecord:
    """A group whose first turns are interrupted, and go on with other weights."""
    making = asyncio.ensure_future(manager.run_rollout(sample()))
    await until(lambda: writer.waiting == 2)
    await manager.pause()
    assert (manager.gate.in_flight, writer.under_way, making.done()) == (0, 0, False)
    writer.letter = NEW
    writer.go.set()
    manager.set_weight_version(7)
    await asyncio.sleep(0.01)
    assert (writer.under_way, making.done()) == (0, False), "nothing goes on before resume"
    await manager.resume()
    return await asyncio.wait_for(making, 30)


def test_an_interrupted_turn_keeps_its_tokens_and_goes_on_with_the_new_weights(tokenizer: Any) -> None:
    async def scenario() -> PromptGroupRecord:
        writer = Writer()
        manager = manager_of(tokenizer, writer)
        record = await interrupted(manager, writer)
        assert writer.asked[2]["generated_so_far"] == 2
        assert (manager.gate.pauses, manager.gate.interrupted, manager.weight_version) == (1, 2, 7)
        return record

    record = asyncio.run(scenario())

    for completion in record.completions:
        first, second = completion.message_log[1], completion.message_log[3]
        assert (first["content"], second["content"]) == ("aabbbb", "bbbbbb")
        assert first["token_ids"].tolist() == [ord(letter) for letter in "aabbbb"]
        assert first["token_ids"].dtype == torch.int64
        assert first["generation_logprobs"].tolist() == [-0.5] * 6
        assert (first["weight_versions"], first["weight_segments"]) == ([0, 7], [[0, 2], [7, 4]])
        assert second["weight_versions"] == [7, 7]
        assert "weight_segments" not in second
        assert "token_loss_mask" not in first
        assert completion.weight_versions == (0, 7)
        assert (completion.reward, completion.truncated) == (1.0, False)


def test_what_was_said_before_the_pause_may_be_left_out_of_the_loss(tokenizer: Any, tmp_path: Path) -> None:
    async def scenario() -> tuple[PromptGroupRecord, PromptGroupRecord]:
        writer = Writer()
        record = await interrupted(manager_of(tokenizer, writer, mask_interrupted=True), writer)
        buffer = RolloutBuffer(path=tmp_path / "groups")
        await buffer.commit(buffer.reserve(), record)
        return record, RolloutBuffer(path=tmp_path / "groups").take_ready()[0].record

    for record in asyncio.run(scenario()):
        batch, packed = collate([record]), collate_packed([record])
        assert batch["loss_mask"][0].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]
        assert batch["logprobs"][0].tolist() == [0, *[-0.5] * 6, 0, *[-0.5] * 6, 0]
        assert batch["token_versions"][0].tolist() == [-1, 0, 0, 7, 7, 7, 7, -1, 7, 7, 7, 7, 7, 7, -1]
        assert batch["weight_versions"].tolist() == [[0, 7], [0, 7]]
        assert packed["token_versions"].tolist() == batch["token_versions"][0].tolist() * 2
        assert packed["loss_mask"].tolist() == batch["loss_mask"][0].tolist() * 2


def test_a_generator_that_tells_nothing_before_its_end_begins_again(tokenizer: Any) -> None:
    async def scenario() -> PromptGroupRecord:
        writer = Writer(streams=False)
        return await interrupted(manager_of(tokenizer, writer), writer)

    first = asyncio.run(scenario()).completions[0].message_log[1]

    assert (first["content"], first["weight_versions"]) == ("bbbbbb", [7, 7])


def test_a_generator_with_abort_is_told_and_not_cancelled(tokenizer: Any) -> None:
    async def scenario() -> tuple[PromptGroupRecord, AbortableWriter, RolloutManager]:
        writer = AbortableWriter()
        manager = manager_of(tokenizer, writer, num_generations_per_prompt=1, max_rollout_turns=1)
        making = asyncio.ensure_future(manager.run_rollout(sample()))
        await until(lambda: writer.waiting == 1)
        async with manager.paused():
            writer.letter = NEW
            manager.set_weight_version(1)
        return await asyncio.wait_for(making, 30), writer, manager

    record, writer, manager = asyncio.run(scenario())

    message = record.completions[0].message_log[1]
    assert (message["content"], message["weight_segments"]) == ("aabbbb", [[0, 2], [1, 4]])
    assert (writer.aborts, manager.gate.interrupted) == (1, 0)


def test_the_cap_on_tokens_counts_what_was_said_before(tokenizer: Any) -> None:
    config: GenerationConfig = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 3}  # type: ignore[typeddict-item]

    async def scenario() -> list[Any]:
        writer = Writer()
        record = await interrupted(manager_of(tokenizer, writer, generation_config=config), writer)
        return [record.completions[0].message_log[1]["content"], writer.asked[2]["max_new_tokens"]]

    assert asyncio.run(scenario()) == ["aab", 1]


def test_an_interrupted_turn_that_fills_the_sequence_is_truncated(tokenizer: Any) -> None:
    async def scenario() -> PromptGroupRecord:
        writer = Writer()
        manager = manager_of(tokenizer, writer, max_seq_len=3)
        making = asyncio.ensure_future(manager.run_rollout(sample()))
        await until(lambda: writer.waiting == 2)
        await manager.pause()
        return await asyncio.wait_for(making, 30)

    completion = asyncio.run(scenario()).completions[0]

    assert (completion.message_log[1]["content"], completion.truncation_reason) == ("aa", "max_seq_len")


def test_waiting_for_resume_does_not_count_as_generating(tokenizer: Any) -> None:
    async def scenario() -> PromptGroupRecord:
        manager = manager_of(tokenizer, Writer(None), timeouts=RolloutTimeouts(generation_s=5.0))
        await manager.pause()
        making = asyncio.ensure_future(manager.run_rollout(sample()))
        await asyncio.sleep(0.05)
        assert not making.done()
        await manager.resume()
        return await asyncio.wait_for(making, 30)

    assert asyncio.run(scenario()).completions[0].reward == 1.0


def test_a_group_that_is_cancelled_while_paused_ends(tokenizer: Any) -> None:
    async def scenario() -> None:
        writer = Writer()
        manager = manager_of(tokenizer, writer)
        making = asyncio.ensure_future(manager.run_rollout(sample()))
        await until(lambda: writer.waiting == 2)
        await manager.pause()
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(making, 30)
        await manager.resume()
        assert manager.gate.in_flight == 0

    asyncio.run(scenario())


def test_an_engine_that_aborts_without_a_pause_for_ever_is_unavailable(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Writer):
        async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
            yield 0, self.output(data["input_ids"][0].tolist(), [], aborted=torch.tensor([True]))

    monkeypatch.setattr("nemo_gym.rl.native._MOST_EMPTY_HANDED", 2)
    with pytest.raises(GenerationUnavailable, match=r"ended 3 generations in a row as aborted.*pause\(\) the manager"):
        asyncio.run(manager_of(tokenizer, Broken()).run_rollout(sample()))


def test_what_a_generator_tells_about_its_weights_counts(tokenizer: Any) -> None:
    class Telling(Writer):
        def output(self, prompt: list[int], said: list[int], **more: Any) -> dict[str, Any]:
            return super().output(prompt, said, weight_versions=torch.tensor([[3, 4]]))

    record = asyncio.run(manager_of(tokenizer, Telling(None)).run_rollout(sample()))

    assert record.completions[0].message_log[1]["weight_versions"] == [3, 4]
    assert record.completions[0].weight_versions == (3, 4)


def test_the_gate_stops_the_clock_of_a_deadline() -> None:
    async def scenario() -> None:
        gate = GenerationGate()
        async with deadline(0.2, lambda: AssertionError("expired"), gate):
            await gate.pause()
            await asyncio.sleep(0.4)
            gate.resume()
        async with deadline(0.05, lambda: LookupError("expired"), gate):
            await gate.pause()
            gate.resume()
            await asyncio.sleep(30)

    with pytest.raises(LookupError, match="expired"):
        asyncio.run(scenario())


def test_the_gate_tells_its_own_interruption_from_a_cancellation() -> None:
    async def scenario() -> None:
        gate = GenerationGate(3)

        async def generation() -> str:
            with pytest.raises(GenerationInterrupted):
                await gate.run(asyncio.Event().wait)
            return await gate.run(lambda: asyncio.sleep(0, "went on"))

        task = asyncio.ensure_future(generation())
        await until(lambda: gate.in_flight == 1)
        await gate.pause()
        gate.resume(4)
        assert await asyncio.wait_for(task, 30) == "went on"
        assert (task.cancelling(), gate.version) == (0, 4)
        other = asyncio.ensure_future(gate.run(asyncio.Event().wait))
        await until(lambda: gate.in_flight == 1)
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other

    asyncio.run(scenario())


def test_a_generation_that_cannot_be_stopped_is_told_and_the_gate_stays_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.http.generation_gate._STOPS_WITHIN_S", 0.05)

    async def stubborn(ends: asyncio.Event) -> None:
        while not ends.is_set():
            try:
                await ends.wait()
            except asyncio.CancelledError:
                continue

    async def scenario() -> None:
        gate, ends = GenerationGate(), asyncio.Event()
        task = asyncio.ensure_future(gate.run(lambda: stubborn(ends)))
        await until(lambda: gate.in_flight == 1)
        with pytest.raises(TimeoutError, match="1 generations were told to end"):
            await gate.pause()
        assert gate.is_shut
        ends.set()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 30)

    asyncio.run(scenario())
