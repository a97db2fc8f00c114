"""Expansion, resume and merge: CPU against one orjson pass over the same bytes, and how it grows with size."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson

from nemo_gym.combine.merge import settle_duplicates, write_merged
from nemo_gym.runs.index import RecordIndex
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.run import check_input, open_run
from tests.perf.side_by_side.estimates import Estimate, exponent

ROUNDS = 3
TEXT = "The quick brown fox jumps over the lazy dog and thinks about it. " * 26
_RECORDS = (12_800, 25_600, 51_200, 102_400)
AGENT = {"type": "responses_api_agents", "name": "agent"}


@dataclass
class Cost:
    """What a step costs at several sizes."""

    name: str
    sizes: tuple[int, ...]
    cpu_s: tuple[float, ...]
    pass_s: float
    """One orjson pass over the bytes of the largest size."""
    ratios: tuple[float, ...] = ()
    """CPU of the largest size over one pass, round by round."""

    @property
    def ratio(self) -> Estimate:
        """CPU of the largest size over one pass."""
        return Estimate.of(self.ratios or (self.cpu_s[-1] / self.pass_s,))

    @property
    def exponent(self) -> Estimate:
        """1 when it grows as its input does."""
        return exponent(self.sizes, self.cpu_s)


def measure_all(folder: Path) -> list[Cost]:
    """Expansion of 10,000 rows x 16, resume over 100,000 finished rollouts, merge of 100,000 records."""
    return [
        _cost("expand rows x 16", (1_250, 2_500, 5_000, 10_000), folder / "expand", _prepare_rows, _expand),
        _cost("resume over finished rollouts", _RECORDS, folder / "resume", _prepare_finished, _resume),
        _cost("merge records", _RECORDS, folder / "merge", _prepare_shards, _merge),
    ]


Prepare = Callable[[Path, int], list[Path]]


def _cost(name: str, sizes: tuple[int, ...], folder: Path, prepare: Prepare, step: Callable[[Path], None]) -> Cost:
    """The best of some rounds, in which the sizes take turns: a slow moment of the machine is no growth."""
    places = [folder / str(size) for size in sizes]
    read: list[Path] = []
    for place, size in zip(places, sizes, strict=True):
        place.mkdir(parents=True)
        read = prepare(place, size)
    rounds, passes = [], []
    for _ in range(ROUNDS):
        rounds.append([_cpu_s(partial(step, place)) for place in places])
        # What is read may be made by the step itself (materialized rows), so the pass comes last.
        passes.append(_cpu_s(partial(_one_pass, read)))
    best = tuple(min(times) for times in zip(*rounds, strict=True))
    ratios = tuple(times[-1] / pass_s for times, pass_s in zip(rounds, passes, strict=True))
    return Cost(name, sizes, best, min(passes), ratios)


def _cpu_s(step: Callable[[], None]) -> float:
    before = time.process_time()
    step()
    return time.process_time() - before


def _one_pass(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                orjson.loads(line)


def _row(task: int) -> dict[str, object]:
    return {"responses_create_params": {"input": [{"role": "user", "content": TEXT[:500]}]}, "id": f"task-{task}"}


def _record(task: int, rollout: int) -> dict[str, object]:
    return {
        **_row(task),
        "response": {"id": "resp", "output": [{"type": "message", "content": TEXT}], "usage": {"total_tokens": 100}},
        "reward": float((task + rollout) % 2),
        "agent_ref": AGENT,
        "_ng_task_index": task,
        "_ng_rollout_index": rollout,
    }


def _write(path: Path, values: "list[dict[str, object]]") -> Path:
    path.write_bytes(b"".join(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE) for value in values))
    return path


def _config(folder: Path, **options: object) -> RolloutCollectionConfig:
    return RolloutCollectionConfig.model_validate(
        {
            "agent_name": "agent",
            "input_jsonl_fpath": str(folder / "in.jsonl"),
            "output_jsonl_fpath": str(folder / "out.jsonl"),
            **options,
        }
    )


def _prepare_rows(folder: Path, size: int) -> list[Path]:
    _write(folder / "in.jsonl", [_row(task) for task in range(size)])
    return [folder / "out_materialized_inputs.jsonl"]


def _expand(folder: Path) -> None:
    config = _config(folder, num_repeats=16)
    with open_run(config, None, check_input(config)) as run:
        run.plan()


def _prepare_finished(folder: Path, size: int) -> list[Path]:
    tasks = size // 16
    _write(folder / "in.jsonl", [_row(task) for task in range(tasks)])
    config = _config(folder, num_repeats=16)
    with open_run(config, None, check_input(config)):
        pass
    records = [_record(task, rollout) for task in range(tasks) for rollout in range(16)]
    return [_write(folder / "out.jsonl", records[:-10]), folder / "out_materialized_inputs.jsonl"]


def _resume(folder: Path) -> None:
    config = _config(folder, num_repeats=16, resume_from_cache=True)
    with open_run(config, None, check_input(config)) as run:
        assert run.plan().owed == 10


def _prepare_shards(folder: Path, size: int) -> list[Path]:
    tasks = size // 16
    paths = []
    for shard in range(4):
        mine = range(shard, tasks, 4)
        records = [_record(task, rollout) for task in mine for rollout in range(16)]
        paths.append(_write(folder / f"shard-{shard}.jsonl", records))
    return paths


def _merge(folder: Path) -> None:
    index = RecordIndex(sorted(folder.glob("shard-*.jsonl")))
    index.read()
    write_merged(index, settle_duplicates(index, "error").order, folder / "merged.jsonl")
