"""`ng_collect_rollouts` as a user sees it: what it prints, how it exits, what it leaves alone."""

import json
import re
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.collection.conftest import Collect
from tests.collection.fakes import FakeRun, Row, failing_with, lines_in, right_away, rows_of, write_rows

PATHS = ["out_materialized_inputs.jsonl", "out.jsonl", "out_aggregate_metrics.json"]


def test_a_run_ends_with_the_outcome_the_tokens_the_time_and_three_paths(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(5))

    done = collect("+num_repeats=2")

    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert "Rollouts: 10 of 10 finished" in lines
    assert "Tokens: 30 in, 20 out" in lines
    assert any(re.fullmatch(r"Time: \d+\.\d s", line) for line in lines)
    assert "Read the rollouts: ng_view +path=out.jsonl" in lines
    assert [line.partition(": ")[2] for line in lines[-3:]] == PATHS
    assert re.search(r"^mean/reward +1 +\[.+, 1\] +10$", done.stdout, re.MULTILINE)


def test_progress_ends_at_a_hundred_percent_and_the_whole_count(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(5))

    progress = [line for line in collect("+num_repeats=2").stderr.splitlines() if "Collecting rollouts" in line]

    assert "Collecting rollouts: 100%" in progress[-1]
    assert "10/10" in progress[-1]


def test_what_is_left_is_listed_by_agent_as_shares_of_the_run_are_done(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), [*rows_of(7, "alpha"), *rows_of(3, "beta")])

    stderr = collect("+num_samples_in_parallel=1").stderr

    listings = re.findall(r"Examples left\n((?:\d\. \w+: \d+\n)+)", stderr)
    assert [re.findall(r"(\w+): (\d+)", listing) for listing in listings] == [
        [("alpha", "5"), ("beta", "3")],
        [("alpha", "3"), ("beta", "3")],
        [("beta", "3"), ("alpha", "1")],
        [("beta", "2")],
        [("beta", "1")],
    ]


def test_the_default_concurrency_is_printed(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(1))

    assert "At most 256 rollouts in parallel" in collect().stderr


def test_json_is_one_line_on_stdout_and_nothing_else(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(500, lambda row: row["n"] == 1)
    write_rows(Path("in.jsonl"), rows_of(3))

    done = collect("+json=true")

    assert done.stdout.count("\n") == 1
    summary = json.loads(done.stdout)
    assert done.exit_code == summary["exit_code"] == 1
    assert [summary[name] for name in ("expected", "finished", "missing", "failed", "given_up")] == [3, 2, 1, 1, 1]
    assert summary["failures"]["agent_error"]["attempts"] == 3
    assert summary["failures"]["agent_error"]["rollouts"] == 1
    assert "alpha, task 1, rollout 0" in summary["failures"]["agent_error"]["example"]
    assert summary["tokens"] == {"input_tokens": 6, "output_tokens": 4, "total_tokens": 10}
    assert summary["percentiles"]["alpha"]["total_tokens"] == {"p50": 5, "p95": 5}
    assert 0 < summary["percentiles"]["alpha"]["duration_s"]["p50"] < 60
    assert summary["key_metrics"]["alpha"]["mean/reward"] == 1.0
    assert summary["coverage"]["alpha"]["failed"]["rollouts"] == 1
    assert [summary[name] for name in ("output_jsonl_fpath", "aggregate_metrics_fpath")] == [
        "out.jsonl",
        "out_aggregate_metrics.json",
    ]


def test_failures_are_a_table_with_one_example_each(fake_run: FakeRun, collect: Collect) -> None:
    async def answer(row: Row, attempt: int) -> Any:
        if row["n"] < 2:
            return web.json_response({"detail": "too hot"}, status=422 if row["n"] else 503)
        return {**row, "_ng_failure_class": "skipped", "_ng_failure_terminal": True} if row["n"] == 2 else {"reward": 1}

    fake_run.answer = answer
    write_rows(Path("in.jsonl"), rows_of(6))

    done = collect("+max_attempts=2")

    assert done.exit_code == 1
    table = done.stdout.partition("failure ")[2]
    assert re.search(r"^connect +2 +1 +alpha, task 0, rollout 0, .*503.*too hot", table, re.MULTILINE)
    assert re.search(r"^http_4xx +1 +1 +alpha, task 1, rollout 0, .*422", table, re.MULTILINE)
    assert re.search(r"^skipped +1 +1 +alpha, task 2, rollout 0", table, re.MULTILINE)
    assert "Rollouts: 3 of 6 finished, 3 failed" in done.stdout
    assert "Failures: out_failures.jsonl" in done.stdout


def test_a_run_that_is_not_complete_says_how_to_go_on(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(503, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(2))

    last = collect().stderr.splitlines()[-1]

    assert last == "1 rollout is missing. Go on with: the same command and +resume_from_cache=true"


def test_what_was_tried_often_enough_is_only_tried_again_on_request(fake_run: FakeRun, collect: Collect) -> None:
    fake_run.answer = failing_with(500, lambda row: row["n"] == 0)
    write_rows(Path("in.jsonl"), rows_of(2))
    first = collect()
    again = collect("+resume_from_cache=true")
    fake_run.answer = right_away

    retried = collect("+resume_from_cache=true", "+retry_exhausted=true")

    hint = "1 rollout is missing, given up. To try again all the same: the same command and "
    assert [done.stderr.splitlines()[-1] for done in (first, again)] == [
        f"{hint}+resume_from_cache=true +retry_exhausted=true"
    ] * 2
    assert again.exit_code == 1
    assert "Nothing to do: 1 of 2 rollouts finished before, 1 given up." in again.stdout
    assert re.search(r"^agent_error +3 +1 ", again.stdout, re.MULTILINE)
    assert retried.exit_code == 0
    assert lines_in(Path("out.jsonl"))[-1]["_ng_attempt_index"] == 3
    assert fake_run.keys().count((0, 0)) == 4


def test_nothing_to_do_says_so_and_exits_0(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect()

    done = collect("+resume_from_cache=true")

    assert done.exit_code == 0
    assert "Nothing to do: 2 of 2 rollouts finished before." in done.stdout
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()[-3:]] == PATHS
    assert fake_run.asked["/run"] == 2
    assert fake_run.asked["/aggregate_metrics"] == 2  # what computes them may have changed


def test_without_an_input_the_command_that_needs_none_is_named(collect: Collect) -> None:
    done = collect("~input_jsonl_fpath")

    assert done.exit_code == 2
    assert "+input_jsonl_fpath=<text> is required" in done.stderr
    assert "ng_e2e_collect_rollouts" in done.stderr


def test_a_missing_input_is_named(collect: Collect) -> None:
    done = collect()

    assert done.exit_code == 2
    assert "+input_jsonl_fpath=in.jsonl: there is no such file" in done.stderr


def test_everything_wrong_with_the_input_is_one_error_before_any_request(fake_run: FakeRun, collect: Collect) -> None:
    good = json.dumps(rows_of(1)[0])
    Path("in.jsonl").write_text(f'{good}\n\n{{"broken\n{good}\n{{"n": 1}}\n')

    done = collect()

    assert done.exit_code == 2
    assert "line 3: not valid JSON" in done.stderr
    assert "rows [5] have no responses_create_params" in done.stderr
    assert fake_run.rows == []
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_an_agent_that_is_not_there_is_named_with_its_likely_spelling(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))

    done = collect("+agent_name=alpa")

    assert done.exit_code == 2
    assert "has no agent called 'alpa'; did you mean 'alpha'? Its agents: alpha, beta." in done.stderr
    assert not Path("out_materialized_inputs.jsonl").exists()


def test_without_a_head_server_nothing_is_touched_and_the_remedy_is_named(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect()
    before = {path.name: path.read_bytes() for path in Path().iterdir()}

    done = collect("+head_server.port=1")

    assert done.exit_code == 2
    assert "Could not connect to the head server at http://127.0.0.1:1/" in done.stderr
    assert "ng_run" in done.stderr
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_a_folder_is_not_taken_for_an_output_file(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(1))
    Path("out.jsonl").mkdir()

    done = collect()

    assert done.exit_code == 2
    assert "+output_jsonl_fpath=out.jsonl is a folder; name a file in it" in done.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_fresh_run_moves_the_earlier_one_away_and_says_where(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))
    collect()
    first = Path("out.jsonl").read_bytes()

    done = collect()

    (folder,) = Path("out.previous").iterdir()
    assert f"The files of the earlier run are now in {folder}" in done.stderr
    assert (folder / "out.jsonl").read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == [
        "out.jsonl",
        "out_aggregate_metrics.json",
        "out_failures.jsonl",
        "out_manifest.json",
        "out_materialized_inputs.jsonl",
    ]


def test_the_marker_of_a_failed_request_is_on_stdout_when_request_debugging_is_on(
    fake_run: FakeRun, collect: Collect
) -> None:
    fake_run.answer = failing_with(500)
    write_rows(Path("in.jsonl"), rows_of(1, secret="do not show"))

    marker = '[rollout_collection] /run failed status=500 row={"_ng_rollout_index": 0, "_ng_task_index": 0, '
    quiet = collect("+max_attempts=1")
    loud = collect("+max_attempts=1", "+global_aiohttp_client_request_debug=true")

    assert "/run failed" not in quiet.stdout
    assert loud.stdout.splitlines()[0] == marker + '"agent_name": "alpha"}'
    assert "do not show" not in loud.stdout


def test_an_output_below_a_file_is_refused_with_the_file(fake_run: FakeRun, collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(1))
    Path("notes").write_text("mine")

    done = collect("+output_jsonl_fpath=notes/deep/out.jsonl")

    assert done.exit_code == 2
    assert "the folder of +output_jsonl_fpath: notes is a file, so there can be no folder notes/deep" in done.stderr
    assert "Errno" not in done.stderr
    assert Path("notes").read_text() == "mine"


def test_a_run_begins_with_one_block_that_says_what_it_is(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), [*rows_of(2, "alpha"), *rows_of(1, "beta")])

    header = collect("+num_repeats=2").stderr.partition("Collecting rollouts")[0].splitlines()

    assert header[0].startswith("Run: fake-run at 127.0.0.1:")
    assert header[1:5] == [
        "Rollouts: 3 rows \N{MULTIPLICATION SIGN} 2 = 6",
        "Agents: alpha (4), beta (2)",
        "Model: a-model",
        "Output: out.jsonl",
    ]
    assert [line.partition(",")[0] for line in header[5:]] == ["At most 256 rollouts in parallel"]


def test_what_nobody_asked_for_is_not_said(collect: Collect) -> None:
    write_rows(Path("in.jsonl"), rows_of(2))

    done = collect("+shard=1/2")

    assert "aabbcc" not in done.stderr
    assert "disable_aggregation" not in done.stdout
    assert "None" not in done.stdout
    assert "No metrics: ng_aggregate_rollouts computes them over all shards" in done.stdout


def test_odd_rollouts_are_told_of_at_the_end_and_only_then(collect: Collect, fake_run: FakeRun) -> None:
    write_rows(Path("in.jsonl"), rows_of(6))
    assert "Health" not in collect().stdout

    async def cut_off(row: Row, attempt: int) -> Row:
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
        details = {"reason": "max_output_tokens"} if row["n"] < 2 else None
        return {**row, "reward": 1.0, "response": {"output": [message], "incomplete_details": details}}

    fake_run.answer = cut_off
    done = collect()
    assert (
        "Health: 2 of 6 rollouts look odd (2 truncated). Look at them: ng_check_rollouts +input=out.jsonl"
        in done.stdout
    )
    assert json.loads(collect("+json=true").stdout)["health"] == {"truncated": 2, "odd": 2}


def test_what_an_agent_tells_of_its_rollout_is_in_the_record_though_nothing_is_captured(
    fake_run: FakeRun, collect: Collect
) -> None:
    async def telling(row: Row, attempt: int) -> Row:
        return {**await right_away(row, attempt), "ng_agent_observations": {"source": "pi", "records": []}}

    fake_run.answer = telling
    write_rows(Path("in.jsonl"), rows_of(1))

    collect()

    [record] = lines_in(Path("out.jsonl"))
    assert record["ng_trajectory"]["rollout_id"] == "0-0"
