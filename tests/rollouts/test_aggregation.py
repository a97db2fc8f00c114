import asyncio
import json
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.collect.metrics import AgentMetrics, AggregationError, write_metrics
from nemo_gym.combine.aggregation import AggregationSummary, RolloutAggregationHelper
from nemo_gym.combine.shard_metrics import Hooks, RecordTexts, as_sent, request_of
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ConfigError
from nemo_gym.http.client import ServerClient
from nemo_gym.metrics.aggregate import compute_aggregate_metrics
from nemo_gym.metrics.hooks import Metrics
from nemo_gym.runs.lock import OutputInUseError, RunLock
from nemo_gym.runs.manifest import Expected, RunManifest, write_manifest
from nemo_gym.runs.options import RolloutAggregationConfig
from nemo_gym.runs.record import Result
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics

GOLDEN = Path(__file__).parent.parent / "metrics" / "golden" / "two_agents_aggregate_metrics.json"
RESULTS = [
    b'{"_ng_task_index":0,"_ng_rollout_index":0,"agent_ref":{"name":"alpha"},"reward":1.0,"label":"x","responses_create'
    b'_params":{"input":"hello"},"response":{"id":"r1","output":[],"usage":{"total_tokens":9}}}\n',
    b'{"_ng_task_index":0,"_ng_rollout_index":1,"agent_ref":{"name":"alpha"},"reward":0.0,"label":"y","responses_create'
    b'_params":{"input":"hello"},"response":{"id":"r2","output":[],"usage":{}}}\n',
    b'{"_ng_task_index":1,"_ng_rollout_index":0,"agent_ref":{"name":"beta"},"reward":0.5,"responses_create_params":'
    b'{"input":"bye"}}\n',
]


class Source:
    """Computes metrics in this process, from records or from numbers alone."""

    def __init__(self, *, needs_records: bool) -> None:
        self.asked: dict[str, list[Result]] = {}
        self._needs_records = needs_records

    def hooks_of(self, agent: str) -> Hooks | None:
        return None if self._needs_records else Hooks()

    async def ask(self, agent: str, records: Collection[Result]) -> object:
        self.asked[agent] = list(records)
        return compute_aggregate_metrics(list(records)).model_dump()


def aggregate(
    input_glob: str = "shard-*.jsonl",
    output: str = "new/merged.jsonl",
    source: Source | None = None,
    **options: Any,
) -> AggregationSummary:
    config = RolloutAggregationConfig(input_glob=input_glob, output_jsonl_fpath=output, **{"offline": True, **options})
    chosen = source or Source(needs_records=True)
    return asyncio.run(RolloutAggregationHelper(loader=lambda: chosen).aggregate(config))


def result(task: int, rollout: int, agent: str = "alpha", **fields: Any) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, "agent_ref": {"name": agent}, **fields}


def write(path: str, *records: dict[str, Any]) -> Path:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return Path(path)


def write_golden_shards() -> None:
    Path("shard-1.jsonl").write_bytes(RESULTS[2] + RESULTS[0] + b"\n")
    Path("shard-0.jsonl").write_bytes(RESULTS[1] + b"\n")


def metrics_without_additions(path: Path | None) -> bytes:
    assert path is not None
    entries = orjson.loads(path.read_bytes())
    for entry in entries:
        del entry["coverage"]
        entry.pop("percentiles", None)  # of rollouts that say what they took
    return orjson.dumps(entries, option=orjson.OPT_INDENT_2)


@pytest.mark.parametrize("needs_records", [True, False])
def test_the_merged_file_and_the_metrics_match_the_golden_data_byte_for_byte(needs_records: bool) -> None:
    write_golden_shards()
    folder = Path.cwd()
    source = Source(needs_records=needs_records)

    summary = aggregate(f"{folder}/shard-*.jsonl , {folder}/shard-0.jsonl", source=source)

    assert [path.name for path in summary.files.shards] == ["shard-0.jsonl", "shard-1.jsonl"]
    assert Path("new/merged.jsonl").read_bytes() == b"".join(RESULTS)
    assert summary.metrics_path == Path("new/merged_aggregate_metrics.json")
    assert metrics_without_additions(summary.metrics_path) == GOLDEN.read_bytes().rstrip()
    assert sorted(path.name for path in Path("new").iterdir()) == ["merged.jsonl", "merged_aggregate_metrics.json"]


def test_agents_are_sent_what_the_golden_data_says() -> None:
    write_golden_shards()
    source = Source(needs_records=True)

    aggregate(source=source)

    assert source.asked == json.loads((GOLDEN.parent / "two_agents.json").read_text())


def test_without_merging_only_the_metrics_are_written() -> None:
    write_golden_shards()

    path = asyncio.run(
        RolloutAggregationHelper(loader=lambda: Source(needs_records=False)).run_from_config(
            RolloutAggregationConfig(
                input_glob="shard-*.jsonl", output_jsonl_fpath="new/merged.jsonl", merge_shards=False, offline=True
            )
        )
    )

    assert path == Path("new/merged_aggregate_metrics.json")
    assert [path.name for path in Path("new").iterdir()] == ["merged_aggregate_metrics.json"]


def test_empty_shards_give_an_empty_file_and_no_metrics() -> None:
    write("shard-0.jsonl")

    summary = aggregate()

    assert summary.metrics_path is None
    assert [path.name for path in Path("new").iterdir()] == ["merged.jsonl"]
    assert Path("new/merged.jsonl").read_bytes() == b""


def test_no_match_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="No shards matched"):
        aggregate("nothing-*.jsonl")


def test_aggregating_twice_gives_the_same_bytes_even_when_the_glob_matches_the_output() -> None:
    write_golden_shards()
    aggregate("*.jsonl", "shard-all.jsonl")
    before = {path.name: path.read_bytes() for path in Path().iterdir()}

    summary = aggregate("*.jsonl", "shard-all.jsonl")

    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before
    assert (summary.records, summary.identical_duplicates) == (3, 0)


def test_a_run_can_be_aggregated_in_place() -> None:
    Path("run.jsonl").write_bytes(RESULTS[1] + RESULTS[2] + RESULTS[0])

    aggregate("run.jsonl", "run.jsonl")

    assert Path("run.jsonl").read_bytes() == b"".join(RESULTS)
    assert metrics_without_additions(Path("run_aggregate_metrics.json")) == GOLDEN.read_bytes().rstrip()


def test_the_rollouts_of_another_run_are_not_overwritten() -> None:
    write_golden_shards()
    write("run.jsonl", result(7, 0))
    write_manifest(RunManifest(), Path("run_manifest.json"))

    with pytest.raises(ConfigError, match="holds the rollouts of a run"):
        aggregate("shard-*.jsonl", "run.jsonl")
    aggregate("shard-*.jsonl", "run.jsonl", merge_shards=False)
    aggregate("shard-*.jsonl,run.jsonl", "run.jsonl")
    assert len(Path("run.jsonl").read_bytes().splitlines()) == 4


def test_an_output_that_somebody_writes_to_is_left_alone() -> None:
    write_golden_shards()
    Path("new").mkdir()

    with RunLock(Path("new/merged.lock")), pytest.raises(OutputInUseError):
        aggregate()
    assert not Path("new/merged.jsonl").exists()


def test_numbers_alone_give_the_same_file_as_records_whatever_is_wrong_with_them() -> None:
    write(
        "shard-0.jsonl",
        result(3, 1, reward=None),
        result(0, 0, reward="high", count=2**60),
        {"agent_ref": {"name": "alpha"}, "reward": 1.0},
        result(2, 0, reward=1, extra=0.5),
    )
    write(
        "shard-1.jsonl",
        result(1, 0, reward=True, response="none"),
        result(0, 0, reward="high", count=2**60),
        result(2, 1, reward=0.25, response={"usage": {"tokens": 3}}),
        result("text", 0, reward=0.5),  # type: ignore[arg-type]
        result(5, 0, "beta", reward=1.0),
        {"reward": 1.0},
    )

    files = []
    for needs_records in (True, False):
        summary = aggregate(source=Source(needs_records=needs_records))
        assert summary.metrics_path is not None
        files.append(summary.metrics_path.read_bytes())

    assert files[0] == files[1]
    assert orjson.loads(files[0])[0]["agent_metrics"]["bad_records"] == 4
    assert (summary.identical_duplicates, summary.without_agent, summary.without_key) == (1, 1, 2)


def test_a_half_character_reaches_the_agent_as_a_question_mark() -> None:
    Path("shard-0.jsonl").write_bytes(
        b'{"_ng_task_index":0,"_ng_rollout_index":0,"agent_ref":{"name":"a"},"t":"\\ud83d"}'
    )

    records: list[Result] = [json.loads(line) for line in Path("shard-0.jsonl").read_text().splitlines()]

    assert b'"t": "?"' in request_of(records)["data"]
    assert as_sent(records[0])["t"] == "?"


def test_a_failure_in_a_rollouts_file_is_not_scored() -> None:
    write("shard-0.jsonl", result(0, 0, reward=1.0), result(1, 0, reward=0.0, _ng_failure_class="timeout"))

    entry = aggregate().metrics[0]

    assert entry.metrics.agent_metrics["mean/reward"] == 1.0
    assert entry.coverage is not None
    assert entry.coverage["failed"]["rollouts"] == 1


def test_coverage_tells_what_was_expected_scored_failed_and_missing() -> None:
    write("shard-0.jsonl", result(0, 0, reward=1.0), result(1, 0, reward=0.0))
    write("shard-0_materialized_inputs.jsonl", *[result(task, 0) for task in range(5)], result(9, 0, "beta"))
    write("shard-0_failures.jsonl", result(2, 0, _ng_failure_class="x"), result(9, 0, "beta", _ng_failure_class="x"))
    with Path("shard-0_failures.jsonl").open("a") as file:
        file.write('{"_ng_task')

    summary = aggregate()

    [alpha] = summary.metrics  # nothing of the other is finished
    assert alpha.coverage is not None
    counts = {name: alpha.coverage[name]["rollouts"] for name in ("expected", "scored", "failed", "missing")}
    assert counts == {"expected": 5, "scored": 2, "failed": 1, "missing": 2}
    assert alpha.coverage["mean_excluding_failures"] == 0.5
    assert alpha.coverage["mean_failures_as_zero"] == pytest.approx(1 / 3)
    assert summary.missing == 4
    assert (
        "4 of the rollouts that were asked for have no result (task, rollout): (2, 0), (3, 0)" in summary.remarks()[-1]
    )


def test_shards_of_different_settings_are_refused_unless_allowed() -> None:
    for number, model in enumerate(["m-1", "m-2"]):
        write(f"shard-{number}.jsonl", result(number, 0, reward=1.0))
        manifest = RunManifest(agents={"alpha": Expected(tasks=1, rollouts=1)}, models=[model], ended_at="2026")
        write_manifest(manifest, Path(f"shard-{number}_manifest.json"))

    with pytest.raises(ConfigError, match=r"models: \['m-1'\] in shard-0\.jsonl, \['m-2'\] in shard-1\.jsonl"):
        aggregate()
    summary = aggregate(allow_changed_config=True)
    assert (summary.records, len(summary.differences)) == (2, 1)


def test_a_run_that_has_not_ended_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    write("shard-0.jsonl", result(0, 0, reward=1.0))
    write_manifest(RunManifest(agents={"alpha": Expected(tasks=1, rollouts=1)}), Path("shard-0_manifest.json"))

    aggregate()

    assert "shard-0.jsonl: its run is still going on, or was killed" in caplog.text


def test_every_oddity_is_told_to_people_and_to_programs() -> None:
    write("shard-0.jsonl", result(0, 0, reward=1.0), result(0, 0, reward=1.0), result(0, 1, reward=0.0), {"reward": 1})
    write("shard-1.jsonl", result(0, 1, reward=1.0))
    with Path("shard-1.jsonl").open("a") as file:
        file.write('{"torn')
    write("shard-2_materialized_inputs.jsonl", result(4, 0))

    summary = aggregate(on_duplicate="first")

    told = summary.as_json()
    assert told["remarks"] == summary.remarks()
    assert [remark.split(";")[0] for remark in told["remarks"]] == [
        "shard-1.jsonl ends in the middle of line 2",
        "shard-2_materialized_inputs.jsonl is there, but shard-2.jsonl is not: no rollout was collected",
        "1 records are there more than once and count once",
        "1 records gave way to another one of the same rollout",
        "1 records name no agent (agent_ref.name) and are part of no metrics",
        "1 records do not say which rollout they are (_ng_task_index)",
        "1 of the rollouts that were asked for have no result (task, rollout): (4, 0)",
    ]
    assert (told["records"], told["missing"], told["offline"]) == (3, None, True)
    assert told["key_metrics"]["alpha"] == {"mean/reward": 0.5}
    json.dumps(told)


def test_records_of_the_last_shard_count_when_asked_for() -> None:
    for number in range(3):
        write(f"shard-{number}.jsonl", result(0, 0, reward=float(number)))

    summary = aggregate(on_duplicate="last", source=Source(needs_records=False))

    assert summary.metrics[0].metrics.key_metrics == {"mean/reward": 2.0}


def test_no_servers_and_no_loader_is_an_error_that_says_what_to_do() -> None:
    write_golden_shards()
    config = RolloutAggregationConfig(input_glob="shard-*.jsonl", output_jsonl_fpath="m.jsonl", offline=True)

    with pytest.raises(ConfigError, match=r"need a loader.*ng_run"):
        asyncio.run(RolloutAggregationHelper().run_from_config(config))


class Unreachable(RolloutAggregationHelper):
    def setup_server_client(self) -> ServerClient:
        return ServerClient.load_from_global_config(_address_nobody_listens_on())


def _address_nobody_listens_on() -> BaseServerConfig:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return BaseServerConfig(host="127.0.0.1", port=probe.getsockname()[1])


def test_the_loader_is_used_when_no_head_server_answers(caplog: pytest.LogCaptureFixture) -> None:
    write_golden_shards()
    config = RolloutAggregationConfig(input_glob="shard-*.jsonl", output_jsonl_fpath="m.jsonl")

    summary = asyncio.run(Unreachable(loader=lambda: Source(needs_records=False)).aggregate(config))

    assert summary.is_offline
    assert "computed here, because there are no servers to ask" in caplog.text
    with pytest.raises(ConfigError, match="Could not connect to the head server"):
        asyncio.run(Unreachable().aggregate(config))


def test_records_of_no_agent_are_merged_but_have_no_metrics() -> None:
    write("shard-0.jsonl", {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0})

    summary = aggregate()

    assert (summary.records, summary.metrics_path, summary.without_agent) == (1, None, 1)


def test_an_output_folder_that_cannot_be_made_is_the_users_to_fix() -> None:
    write_golden_shards()
    Path("file").touch()

    with pytest.raises(ConfigError, match=r"cannot write to file, the folder of \+output_jsonl_fpath"):
        aggregate(output="file/merged.jsonl")


class Failing(Source):
    async def ask(self, agent: str, records: Collection[Result]) -> object:
        raise OSError(f"{agent} is down")


def test_agents_that_fail_are_all_named_and_the_merged_file_is_there() -> None:
    write_golden_shards()

    with pytest.raises(AggregationError, match=r"alpha is down.*beta is down"):
        aggregate(source=Failing(needs_records=True))
    assert Path("new/merged.jsonl").read_bytes() == b"".join(RESULTS)


class WithHooks(Source):
    def __init__(self, *hooks: Any) -> None:
        super().__init__(needs_records=False)
        self._hooks = Hooks(*hooks)

    def hooks_of(self, agent: str) -> Hooks | None:
        return self._hooks


def failing(given: Any) -> Metrics:
    raise KeyError("pass@1")


def test_a_hook_that_fails_is_named_unless_the_records_are_bad(caplog: pytest.LogCaptureFixture) -> None:
    write("shard-0.jsonl", result(0, 0, reward=1.0))
    for hooks in (None, failing), (failing, None):
        with pytest.raises(AggregationError, match=r"agent 'alpha': its class failed .*KeyError\('pass@1'\)"):
            aggregate(source=WithHooks(*hooks))

    write("shard-1.jsonl", result(1, 0, reward="none"))
    summary = aggregate(source=WithHooks(None, failing))

    assert summary.metrics[0].metrics.key_metrics == {"mean/reward": 1.0}
    assert "reporting the means" in caplog.text


def test_hooks_see_tasks_in_key_order_and_what_they_return_becomes_plain_data() -> None:
    write("shard-0.jsonl", result(1, 1, n="d"), result(0, 1, n="b"), {"agent_ref": {"name": "alpha"}})
    write("shard-1.jsonl", result(1, 0, n="c"), result(0, 0, n="a"))
    seen: list[list[str]] = []

    def compute(tasks: list[list[Result]]) -> Metrics:
        seen.extend([record.pop("n") for record in task] for task in tasks)
        return {"pair": (1, 2), "nan": float("nan"), "per_task_metrics": [{"_ng_task_index": 0, "set": (3,)}]}

    summary = aggregate(source=WithHooks(compute, lambda metrics: {"pair": metrics["pair"]}))

    assert seen == [["a", "b"], ["c", "d"]]
    assert summary.metrics[0].metrics.key_metrics == {"pair": [1, 2]}
    assert summary.metrics[0].metrics.agent_metrics["nan"] is None
    assert summary.metrics_path is not None
    assert orjson.loads(summary.metrics_path.read_bytes())[0]["group_level_metrics"][0]["set"] == [3]


@pytest.mark.parametrize(
    "groups", [[], [{"a": 1, "nested": {"b": [1, {"c": "line\nbreak"}], "d": []}}, {}, {"z": None}]]
)
def test_the_file_is_the_same_whether_its_tasks_are_at_hand_or_read_one_by_one(
    tmp_path: Path, groups: list[dict[str, Any]]
) -> None:
    entries: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"mean/reward": 0.5, "per": {"x": [1.0]}}, {"k": 1}),
        ({}, {}),
    ]
    for coverage in ({"expected": {"rollouts": None}, "ci95": [0.0, 1.0]}, None):
        whole, streamed = [], []
        for n, (agent, key) in enumerate(entries):
            numbers = AggregateMetrics(agent_metrics=agent, key_metrics=key)
            streamed.append(AgentMetrics(f"agent-{n}", numbers, coverage, iter(groups)))
            with_groups = numbers.model_copy(update={"group_level_metrics": groups})
            whole.append(AgentMetrics(f"agent-{n}", with_groups, coverage))

        write_metrics(whole, tmp_path / "whole.json")
        write_metrics(streamed, tmp_path / "streamed.json")

        written = (tmp_path / "whole.json").read_bytes()
        assert written == orjson.dumps([each.as_entry() for each in whole], option=orjson.OPT_INDENT_2)
        assert (tmp_path / "streamed.json").read_bytes() == written


@pytest.mark.parametrize("count", [0, 1, 256, 600])
def test_records_that_are_kept_as_text_are_sent_in_order_piece_by_piece(count: int) -> None:
    records = [{"_ng_task_index": n, "_ng_rollout_index": 0, "reward": 1.0, "t": "\ud800"} for n in range(count)]
    kept = RecordTexts()
    for record in reversed(records):
        kept.append(record)
    in_order = kept.in_order(list(range(count))[::-1])

    async def sent() -> list[bytes]:
        return [piece async for piece in in_order.as_request()["data"]]

    pieces = asyncio.run(sent())
    whole = b"".join(pieces)
    assert whole == request_of(records)["data"] == request_of(in_order)["data"]
    assert in_order.as_request()["headers"]["Content-Length"] == str(len(whole))
    assert len(pieces) == count // 257 + 1 + (count > 0)
    assert [record["_ng_task_index"] for record in in_order] == list(range(count))
    assert len(in_order.scores) == count
