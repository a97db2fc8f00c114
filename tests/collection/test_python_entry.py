"""`run_from_config` and `run_examples` against servers: what trainers and notebooks call."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import aiohttp
import orjson
import pytest
from aiohttp import web

from nemo_gym.config_types import BaseServerConfig, ConfigError
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, Row, failing_with, keys_in, lines_in, right_away, rows_of, serve, write_rows
from tests.perf.side_by_side import payloads

pytestmark = pytest.mark.usefixtures("head_config", "quick_retries")

CASES = {
    "good": {"reward": 1.0, "response": {"usage": {"total_tokens": 21}}},
    "flaky": {"reward": 0.0, "_ng_failure_class": "transient"},
    "killed": {"reward": 0.0, "_ng_failure_class": "kill_shaped", "_ng_no_persist": True},
    "timeout": {"reward": 0.0, "_ng_failure_class": "timeout_exceeded", "_ng_failure_terminal": True},
}
FOUR_ROWS = [
    {"agent_ref": {"name": agent}, "responses_create_params": {"input": case}, "case": case}
    for agent, case in [("alpha", "good"), ("beta", "flaky"), ("alpha", "killed"), ("beta", "timeout")]
]
MATERIALIZED = """\
{"agent_ref":{"name":"alpha"},"responses_create_params":{"input":"good"},"case":"good","_ng_task_index":0,"_ng_rollout_index":0}
{"agent_ref":{"name":"beta"},"responses_create_params":{"input":"flaky"},"case":"flaky","_ng_task_index":1,"_ng_rollout_index":0}
{"agent_ref":{"name":"alpha"},"responses_create_params":{"input":"killed"},"case":"killed","_ng_task_index":2,"_ng_rollout_index":0}
{"agent_ref":{"name":"beta"},"responses_create_params":{"input":"timeout"},"case":"timeout","_ng_task_index":3,"_ng_rollout_index":0}
"""
MAIN = """\
{"reward":1.0,"response":{"usage":{"total_tokens":21}},"_ng_task_index":0,"_ng_rollout_index":0,"agent_ref":{"name":"alpha"}}
"""
SIDECAR = [
    '{"reward":0.0,"_ng_failure_class":"transient","_ng_task_index":1,"_ng_rollout_index":0,"agent_ref":{"name":"beta"}}',
    '{"reward":0.0,"_ng_failure_class":"timeout_exceeded","_ng_failure_terminal":true,"_ng_task_index":3,'
    '"_ng_rollout_index":0,"agent_ref":{"name":"beta"}}',
    '{"reward":0.0,"_ng_failure_class":"transient","_ng_task_index":1,"_ng_rollout_index":0,"agent_ref":{"name":"beta"},'
    '"_ng_attempt_index":1}',
    '{"reward":0.0,"_ng_failure_class":"transient","_ng_task_index":1,"_ng_rollout_index":0,"agent_ref":{"name":"beta"},'
    '"_ng_attempt_index":2}',
]
DISPATCHED = [
    [(0, 0, "good", None), (1, 0, "flaky", None), (2, 0, "killed", None), (3, 0, "timeout", None)],
    [(1, 0, "flaky", 1), (2, 0, "killed", None)],
    [(1, 0, "flaky", 2), (2, 0, "killed", None)],
    [(2, 0, "killed", None)],
]
RETURNED = [
    [(0, 0, 1.0), (1, 0, 0.0), (2, 0, 0.0), (3, 0, 0.0)],
    [(0, 0, 1.0), (1, 0, 0.0), (2, 0, 0.0)],
    [(0, 0, 1.0), (1, 0, 0.0), (2, 0, 0.0)],
    [(0, 0, 1.0), (2, 0, 0.0)],
]


def without_times(name: str) -> str:
    """The rollouts of a file, each without the times at the end of its line."""
    text, times = re.subn(
        r',"_ng_timing":\{"started_at":"[0-9T:.-]+Z","duration_s":[0-9.e-]+\}\}\n', "}\n", Path(name).read_text()
    )
    assert times == len(lines_in(Path(name)))
    return text


async def by_case(row: Row, attempt: int) -> Row:
    return CASES[row["case"]]


def config(**options: Any) -> RolloutCollectionConfig:
    given = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl", "agent_name": "alpha", **options}
    return RolloutCollectionConfig.model_validate(given)


def run(**options: Any) -> list[Row]:
    return asyncio.run(RolloutCollectionHelper().run_from_config(config(**options)))


def test_a_fresh_run_and_three_resumed_ones_match_the_golden_data(fake_run: FakeRun) -> None:
    fake_run.answer = by_case
    write_rows(Path("in.jsonl"), FOUR_ROWS)

    for number in range(4):
        fake_run.rows.clear()
        fake_run.metric_requests.clear()
        results = run(num_samples_in_parallel=1, resume_from_cache=number > 0)

        keys = ("_ng_task_index", "_ng_rollout_index", "case", "_ng_attempt_index")
        assert [tuple(row.get(key) for key in keys) for row in fake_run.rows] == DISPATCHED[number]
        assert [(it["_ng_task_index"], it["_ng_rollout_index"], it["reward"]) for it in results] == RETURNED[number]
        asked = [record for request in fake_run.metric_requests for record in request["verify_responses"]]
        assert [(record["_ng_task_index"], record["_ng_rollout_index"]) for record in asked] == [(0, 0)]
        assert without_times("out.jsonl") == MAIN
        if number == 0:
            assert Path("out_materialized_inputs.jsonl").read_text() == MATERIALIZED
            assert Path("out_failures.jsonl").read_text().splitlines() == SIDECAR[:2]

    assert Path("out_failures.jsonl").read_text().splitlines() == SIDECAR


def test_the_command_asks_for_the_same_rollouts_and_metrics(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = by_case
    write_rows(Path("in.jsonl"), FOUR_ROWS)

    for number in range(4):
        fake_run.rows.clear()
        done = collect("+num_samples_in_parallel=1", *["+resume_from_cache=true"] * (number > 0))

        assert done.exit_code == 1
        keys = ("_ng_task_index", "_ng_rollout_index", "case", "_ng_attempt_index")
        assert [tuple(row.get(key) for key in keys) for row in fake_run.rows] == DISPATCHED[number]

    assert without_times("out.jsonl") == MAIN
    assert Path("out_failures.jsonl").read_text().splitlines() == SIDECAR
    sent = [record for request in fake_run.metric_requests for record in request["verify_responses"]]
    assert {(record["_ng_task_index"], record["_ng_rollout_index"]) for record in sent} == {(0, 0)}


def test_long_lists_are_stored_and_returned_as_they_came(fake_run: FakeRun, collect: Collect) -> None:
    rollout = {"reward": 1.0, "response": orjson.loads(payloads.with_tokens(4096))}

    async def answer(row: Row, attempt: int) -> web.Response:
        return web.json_response(rollout)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(2, "alpha"))

    assert [result["response"] for result in run()] == [rollout["response"]] * 2
    assert [json.loads(line)["response"] for line in Path("out.jsonl").read_text().splitlines()] == [
        rollout["response"]
    ] * 2


def test_a_failed_call_is_retried_recorded_and_part_of_the_results(fake_run: FakeRun) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] == 0 or (row["n"] == 1 and attempt == 1):
            return web.json_response({"detail": "no"}, status=500)
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(3))

    results = run()

    assert keys_in(Path("out.jsonl")) == [(1, 0), (2, 0)]
    failures = lines_in(Path("out_failures.jsonl"))
    assert [(line["_ng_task_index"], line.get("_ng_attempt_index")) for line in failures] == [
        (0, None),
        (1, None),
        (0, 1),
        (0, 2),
    ]
    assert [result.get("reward") for result in results] == [None, 1.0, 1.0]
    assert results[0]["_ng_failure_class"] == "agent_error"
    assert results[1]["_ng_attempt_index"] == 1


def test_attempts_of_earlier_runs_count(fake_run: FakeRun) -> None:
    fake_run.answer = failing_with(500)
    write_rows(Path("in.jsonl"), rows_of(1))

    run(max_attempts=2)
    run(max_attempts=3, resume_from_cache=True)
    results = run(max_attempts=3, resume_from_cache=True)

    assert len(fake_run.rows) == len(lines_in(Path("out_failures.jsonl"))) == 3
    assert results == []


def test_the_limits_of_the_command_hold_for_python_too(fake_run: FakeRun) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] == 0:
            await asyncio.sleep(60)
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), [*rows_of(3), *rows_of(3, "beta")])

    results = run(rollout_timeout_s=2, max_attempts=1, num_samples_in_parallel={"beta": 1, "_default": 2}, limit=6)

    assert [result.get("_ng_failure_class") for result in results] == ["timeout", None, None, "timeout", None, None]
    assert "rollout_timeout_s=2;" in results[0]["_ng_failure_message"]
    assert results[0]["_ng_started_at"] < results[0]["_ng_ended_at"]
    assert fake_run.most_in_flight <= 3


@pytest.mark.parametrize(
    ("options", "sent", "said"),
    [
        ({"fail_fast": True}, 1, "fail_fast is on"),
        ({"max_failure_fraction": 0.5}, 20, "max_failure_fraction=0.5"),
        ({"status": 401}, 3, "the key was refused"),
    ],
)
def test_a_run_from_python_stops_for_the_same_reasons(
    options: dict[str, Any], sent: int, said: str, fake_run: FakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    fake_run.answer = failing_with(options.pop("status", 500))
    write_rows(Path("in.jsonl"), rows_of(40))

    results = run(num_samples_in_parallel=1, max_attempts=1, **options)

    assert len(results) == len(lines_in(Path("out_failures.jsonl"))) == sent
    assert said in caplog.text


def test_a_run_from_python_ends_when_its_time_is_over(fake_run: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] == 1:
            await asyncio.sleep(60)
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(2))

    results = run(run_timeout_s=0.4)

    assert [result["n"] for result in results] == [0]
    assert "run_timeout_s=0.4 is over" in caplog.text
    assert keys_in(Path("out.jsonl")) == [(0, 0)]


def test_the_config_of_the_run_is_read_once(fake_run: FakeRun) -> None:
    fake_run.answer = failing_with(500, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(3))

    run()
    from_python = fake_run.asked["/global_config_dict_yaml"]
    asyncio.run(RolloutCollectionHelper().collect(config(output_jsonl_fpath="other.jsonl")))

    assert (from_python, fake_run.asked["/global_config_dict_yaml"]) == (1, 2)


def test_python_and_the_command_can_go_on_with_each_others_runs(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    run(limit=1)

    assert collect("+limit=2", "+resume_from_cache=true").exit_code == 0
    results = run(limit=2, num_repeats=2, resume_from_cache=True)

    assert keys_in(Path("out.jsonl")) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(it["_ng_task_index"], it["_ng_rollout_index"]) for it in results] == keys_in(Path("out.jsonl"))


def test_nothing_is_touched_when_the_servers_or_agents_are_not_there(fake_run: FakeRun) -> None:
    write_rows(Path("in.jsonl"), rows_of(1))
    run()
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    fake_run.agents = ("gamma",)

    with pytest.raises(ConfigError, match="has no agent called 'alpha'"):
        run()

    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_all_four_artifacts_appear_in_a_folder_that_did_not_exist(fake_run: FakeRun) -> None:
    write_rows(Path("in.jsonl"), rows_of(1))

    run(output_jsonl_fpath="a/b/out.jsonl", resume_from_cache=True)

    assert {path.name for path in Path("a/b").iterdir()} >= {
        "out.jsonl",
        "out_failures.jsonl",
        "out_materialized_inputs.jsonl",
        "out_aggregate_metrics.json",
    }


def test_an_agent_that_runs_more_than_once_shares_its_rollouts_out(fake_run: FakeRun) -> None:
    with serve(FakeRun("alpha")) as second:
        agent = {"server_type": "responses_api_agents", "process_name": "alpha", "host": "127.0.0.1"}
        fake_run.instances = [{**agent, "port": fake_run.port}, {**agent, "port": second.port}, {"host": None}]
        write_rows(Path("in.jsonl"), rows_of(10))

        run()

    assert sorted(fake_run.keys() + second.keys()) == [(n, 0) for n in range(10)]
    assert min(len(fake_run.rows), len(second.rows)) > 0


def test_a_tracker_that_is_open_already_gets_rollouts_and_metrics(
    fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = MagicMock()
    monkeypatch.setattr("nemo_gym.trackers.wandb.get_wandb_run", lambda: tracker)
    fake_run.answer = failing_with(422, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(2))

    run(max_attempts=1)

    (uploaded,), (metrics,) = (call.args for call in tracker.log.call_args_list)
    assert [json.loads(line)["_ng_task_index"] for (line,) in uploaded["Rollouts"].data] == [1, 0]
    assert metrics["alpha/mean/reward"] == 1.0
    tracker.finish.assert_not_called()


def test_a_trainer_gets_its_own_rows_back_as_they_finish(fake_run: FakeRun) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] == 2:
            return web.json_response({"detail": "no"}, status=503)
        return await right_away(row, attempt)

    fake_run.answer = answer
    rows = [
        {**row, "_ng_task_index": row["n"], "_ng_rollout_index": 0, "_rowidx": row["n"]} for row in rows_of(4, "alpha")
    ]
    head = BaseServerConfig(host="127.0.0.1", port=fake_run.port)
    finished: list[tuple[Row, Row]] = []
    errors: list[aiohttp.ClientResponseError] = []

    async def consume() -> None:
        helper = RolloutCollectionHelper()
        for awaitable in helper.run_examples(
            examples=iter(rows), head_server_config=head, semaphore=asyncio.Semaphore(1)
        ):
            try:
                finished.append(await awaitable)
            except aiohttp.ClientResponseError as error:
                errors.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(consume()))  # a trainer's loop need not be the main thread's
    thread.start()
    thread.join(20)

    assert [row is rows[row["n"]] for row, _ in finished] == [True] * 3
    assert [result["_rowidx"] for _, result in finished] == [0, 1, 3]
    (error,) = errors
    assert (error.status, json.loads(error.response_content)) == (503, {"detail": "no"})  # type: ignore[attr-defined]
    assert error.row is rows[2]  # type: ignore[attr-defined]
    assert [row["n"] for row in fake_run.rows] == [0, 1, 2, 3]


def test_an_unreachable_head_server_is_a_value_error() -> None:
    head = BaseServerConfig(host="127.0.0.1", port=1)

    with pytest.raises(ValueError, match="Could not connect to the head server"):
        RolloutCollectionHelper().run_examples([], head_server_config=head)


@pytest.mark.parametrize("options", [{"fail_fast": True}, {"max_failure_fraction": 0.5}])
def test_the_command_and_python_stop_alike_and_leave_the_same_files(
    options: dict[str, Any], fake_run: FakeRun, collect: Collect
) -> None:
    fake_run.answer = failing_with(500, lambda row: row["n"] >= 2)
    write_rows(Path("in.jsonl"), rows_of(30))

    results = run(num_samples_in_parallel=1, max_attempts=1, output_jsonl_fpath="python.jsonl", **options)
    sent = fake_run.keys()
    fake_run.rows.clear()
    given = [f"+{name}={str(value).lower()}" for name, value in options.items()]
    done = collect("+num_samples_in_parallel=1", "+max_attempts=1", *given)

    def failures(name: str) -> list[Row]:
        return [{**line, "_ng_started_at": None, "_ng_ended_at": None} for line in lines_in(Path(name))]

    assert done.exit_code == 1
    assert sent == fake_run.keys() == [(n, 0) for n in range(len(results))]
    assert len(results) < 30
    assert without_times("python.jsonl") == without_times("out.jsonl")
    assert failures("python_failures.jsonl") == failures("out_failures.jsonl")


class Passing(RolloutCollectionHelper):
    """Looks at what goes by, and leaves the work to ours."""

    def run_examples(self, examples: Any, head_server_config: Any = None, semaphore: Any = None) -> Any:
        _SENT.append([row["n"] for row in examples])
        _SLOTS.append(semaphore._value)
        yield from super().run_examples(examples, head_server_config, semaphore)


_SENT: list[list[int]] = []
_SLOTS: list[int] = []


def run_passing(**options: Any) -> list[Row]:
    _SENT.clear()
    _SLOTS.clear()
    return asyncio.run(Passing().run_from_config(config(**options)))


def test_an_override_gets_all_rows_at_once_a_semaphore_and_the_retries_as_a_list(fake_run: FakeRun) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] == 1 and attempt < 3:
            return web.json_response({"detail": "no"}, status=500)
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(400))

    results = run_passing(num_samples_in_parallel=7)

    assert [list(range(400)), [1], [1]] == _SENT
    assert _SLOTS == [7, 7, 7]
    assert fake_run.most_in_flight <= 7
    assert [result["n"] for result in results] == list(range(400))
    assert [line.get("_ng_attempt_index") for line in lines_in(Path("out_failures.jsonl"))] == [None, 1]


def test_the_limits_of_a_run_hold_for_an_override_that_calls_ours(
    fake_run: FakeRun, capfd: pytest.CaptureFixture[str]
) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] == 0:
            await asyncio.sleep(60)
        return await right_away(row, attempt)

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), [*rows_of(3), *rows_of(3, "beta")])

    results = run_passing(rollout_timeout_s=1, max_attempts=1, num_samples_in_parallel={"beta": 1, "_default": 2})

    assert [result.get("_ng_failure_class") for result in results] == ["timeout", None, None, "timeout", None, None]
    assert "rollout_timeout_s=1;" in results[0]["_ng_failure_message"]
    assert fake_run.most_in_flight <= 3
    assert "100%" in capfd.readouterr().err


def test_an_override_that_calls_ours_starts_nothing_more_when_the_run_stops(fake_run: FakeRun) -> None:
    fake_run.answer = failing_with(500)
    write_rows(Path("in.jsonl"), rows_of(40))

    results = run_passing(num_samples_in_parallel=1, max_attempts=1, fail_fast=True)

    assert len(results) == len(lines_in(Path("out_failures.jsonl")))
    assert len(fake_run.rows) <= 2  # the next had begun when the first had failed


def test_what_an_override_has_no_result_for_is_left_to_be_resumed(fake_run: FakeRun) -> None:
    class Choosy(RolloutCollectionHelper):
        def run_examples(self, examples: Any, *args: Any, **kwargs: Any) -> Any:
            copies = [json.loads(json.dumps(row)) for row in examples if row["n"] != 1]
            return super().run_examples([*copies, copies[0]], *args, **kwargs)

    write_rows(Path("in.jsonl"), rows_of(3))

    results = asyncio.run(Choosy().run_from_config(config()))

    assert [result["n"] for result in results] == [0, 2]
    assert keys_in(Path("out.jsonl")) == [(0, 0), (2, 0)]
    assert lines_in(Path("out_failures.jsonl")) == []
    assert [result["n"] for result in run(resume_from_cache=True)] == [0, 1, 2]


def test_an_override_that_never_answers_ends_with_the_run(fake_run: FakeRun) -> None:
    given_up: list[int] = []

    class Hanging(RolloutCollectionHelper):
        def run_examples(self, examples: Any, *args: Any, **kwargs: Any) -> Any:
            return [self._hang(row) for row in examples[:1]]

        async def _hang(self, row: Row) -> tuple[Row, Row]:
            try:
                await asyncio.sleep(600)
            finally:
                given_up.append(row["n"])
            return row, {}

    write_rows(Path("in.jsonl"), rows_of(2))

    assert asyncio.run(Hanging().run_from_config(config(run_timeout_s=0.2))) == []
    assert given_up == [0]
    assert lines_in(Path("out_failures.jsonl")) == []


@pytest.mark.parametrize("row", [{"n": 1}, {"n": 1, "agent_ref": None}, {"n": 1, "agent_ref": "alpha"}])
def test_a_row_without_an_agent_is_refused_with_what_it_lacks(fake_run: FakeRun, row: Row) -> None:
    async def send() -> None:
        head = BaseServerConfig(host="127.0.0.1", port=fake_run.port)
        await next(RolloutCollectionHelper().run_examples([row], head_server_config=head))

    with pytest.raises(KeyError) as refusal:
        asyncio.run(send())

    assert isinstance(refusal.value, ConfigError)
    assert str(refusal.value).startswith("a row does not say which agent it is for; it has n")
    assert '{"agent_ref": {"name": "my_agent"}}' in str(refusal.value)
