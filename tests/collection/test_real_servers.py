"""The real commands on real servers: two agents, models that fail in every way, a wrong key."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.collection.fakes import Row, keys_in, lines_in, write_rows
from tests.ports import free_port
from tests.programs import Piped, run_program

ENVIRONMENT = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
MATCHING = "resources_servers/string_match/configs/string_match.yaml"
FILLING_AGENT = """
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig, SimpleAgentRunRequest, Request

class FillingAgent(SimpleAgent):
    config: SimpleAgentConfig

    async def run(self, request: Request, body: SimpleAgentRunRequest):
        return await super().run(request, SimpleAgentRunRequest(**{"expected_answer": "any", **body.model_dump()}))

if __name__ == "__main__":
    FillingAgent.run_webserver()
"""
FAULTS: list[Row] = [
    {"kind": "status", "status": 500, "match": {"last_user_contains": "answer 500"}},
    {"kind": "status", "status": 429, "retry_after": 0.01, "match": {"last_user_contains": "answer 429"}},
    {"kind": "status", "status": 503, "times_per_request": 1, "match": {"last_user_contains": "be busy once"}},
    {"kind": "disconnect", "match": {"last_user_contains": "hang up"}},
    {"kind": "hang", "match": {"last_user_contains": "stay silent"}},
    {"kind": "status", "status": 400, "message": "No more", "match": {"turn": 2, "last_user_contains": "break off"}},
]
WEATHER_TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ROWS = 200
UNLUCKY = 77


def agent(model: str) -> Row:
    references = {
        "resources_server": {"type": "resources_servers", "name": "example_single_tool_call"},
        "model_server": {"type": "responses_api_models", "name": model},
    }
    return {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", **references}}}


def matching_agent() -> Row:
    return {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "string_match"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }


def endpoint(port: int, faults: list[Row]) -> Row:
    block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": port, "script": {"faults": faults}}
    return {"responses_api_models": {"scripted_model": block}}


def model_behind(port: int) -> Row:
    block = {
        "entrypoint": "app.py",
        "openai_base_url": f"http://127.0.0.1:{port}/v1",
        "openai_api_key": "not-the-right-one",
        "openai_model": "any",
    }
    return {"responses_api_models": {"openai_model": block}}


@dataclass
class Servers:
    """What `ng_run` brought up."""

    head_port: int
    folder: Path
    lines: list[str]
    """What they have printed."""

    def collect(self, *options: str, folder: Path | None = None) -> Piped:
        """Start `ng_collect_rollouts` on in.jsonl and out.jsonl of a folder."""
        return Piped(
            "ng_collect_rollouts",
            f"+head_server.port={self.head_port}",
            "+input_jsonl_fpath=in.jsonl",
            "+output_jsonl_fpath=out.jsonl",
            *options,
            folder=folder,
            environment=without_settings("NEMO_GYM", "WANDB"),
        )


def without_settings(*prefixes: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Agents on one environment, each with a model endpoint of its own kind."""
    folder = tmp_path_factory.mktemp("servers")
    flaky, locked = free_port(), free_port()
    config = {
        "config_paths": [ENVIRONMENT, MATCHING],
        "filling_agent": {"responses_api_agents": {"filling_agent": matching_agent()}},
        "policy_model": {"responses_api_models": {"scripted_model": {"entrypoint": "app.py"}}},
        "agent_alpha": agent("policy_model"),
        "agent_beta": agent("policy_model"),
        "flaky_agent": agent("flaky_model"),
        "flaky_model": model_behind(flaky),
        "flaky_endpoint": endpoint(flaky, FAULTS),
        "locked_agent": agent("locked_model"),
        "locked_model": model_behind(locked),
        "locked_endpoint": endpoint(locked, [{"kind": "status", "status": 401, "message": "Incorrect API key"}]),
        "model_retry_max_tries": 2,
        "model_retry_first_delay_s": 0.01,
    }
    (folder / "servers.yaml").write_text(yaml.safe_dump(config))
    (folder / "responses_api_agents/filling_agent").mkdir(parents=True)
    (folder / "responses_api_agents/filling_agent/app.py").write_text(FILLING_AGENT)
    (folder / "responses_api_agents/filling_agent/requirements.txt").write_text("")
    head_port = free_port()
    process = Piped(
        "ng_run",
        "+config_paths=[servers.yaml]",
        f"+head_server.port={head_port}",
        folder=folder,
        environment=without_settings("NEMO_GYM"),
        in_one=True,
    )
    lines: list[str] = []
    drain = threading.Thread(target=lines.extend, args=(process.stdout,))
    overdue = threading.Timer(120, process.kill)
    overdue.start()
    try:
        printed = ""
        for line in process.stdout:
            printed += line
            if "servers ready!" in line:
                break
        assert "servers ready!" in printed, printed
        overdue.cancel()
        drain.start()
        yield Servers(head_port, folder, lines)
    finally:
        overdue.cancel()
        process.send_signal(signal.SIGINT)
        process.wait(30)
        if drain.ident is not None:
            drain.join()
        process.stdout.close()


def finish(process: Piped) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=120)
    return process.wait(), stdout, stderr


def weather_rows(agent_name: str, number: int, unlucky: str = "") -> list[Row]:
    asked = ["What is the weather in Paris?" if n != UNLUCKY or not unlucky else unlucky for n in range(number)]
    return [
        {
            "agent_ref": {"name": agent_name},
            "n": n,
            "responses_create_params": {"input": [{"role": "user", "content": it}]},
        }
        for n, it in enumerate(asked)
    ]


WALKTHROUGH = [
    {"agent_ref": {"name": name}, "responses_create_params": {"input": [{"role": "user", "content": text}]}}
    for name, text in (("agent_alpha", "What is the weather in Rome?"), ("agent_beta", "And in Oslo?"))
]


def test_the_walkthrough_with_two_agents(servers: Servers) -> None:
    write_rows(Path("in.jsonl"), WALKTHROUGH)

    code, stdout, stderr = finish(
        servers.collect(
            "+num_repeats={agent_alpha: 4, agent_beta: 1}",
            "+responses_create_params={max_output_tokens: 64, temperature: 0.0}",
        )
    )

    assert code == 0, stderr
    results = lines_in(Path("out.jsonl"))
    found = sorted((it["agent_ref"]["name"], it["_ng_task_index"], it["_ng_rollout_index"]) for it in results)
    assert found == [("agent_alpha", 0, n) for n in range(4)] + [("agent_beta", 1, 0)]
    materialized = lines_in(Path("out_materialized_inputs.jsonl"))
    assert [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in materialized] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 0),
    ]
    assert all(row["responses_create_params"]["max_output_tokens"] == 64 for row in materialized)
    assert all(row["responses_create_params"]["temperature"] == 0.0 for row in materialized)
    assert "Rollouts: 5 of 5 finished" in stdout
    metrics = json.loads(Path("out_aggregate_metrics.json").read_text())
    assert [entry["agent_ref"]["name"] for entry in metrics] == ["agent_alpha", "agent_beta"]
    for result in results:
        check_times(result["_ng_timing"])
    slowest = max(it["_ng_timing"]["duration_s"] for it in results if it["agent_ref"]["name"] == "agent_alpha")
    assert metrics[0]["percentiles"]["duration_s"]["p95"] == float(f"{slowest:.3g}")
    assert "_ng_timing" not in json.dumps(metrics)
    for entry in metrics:
        took, used = (entry["percentiles"][name] for name in ("duration_s", "total_tokens"))
        agent = entry["agent_ref"]["name"]
        assert f"Per rollout of {agent}: median {took['p50']:,g} s (p95 {took['p95']:,g} s), " in stdout
        assert f"median {used['p50']:,} tokens (p95 {used['p95']:,})" in stdout


def check_times(timing: Row) -> None:
    assert list(timing) == ["started_at", "duration_s", "calls"]
    assert [(call["server"], call["path"]) for call in timing["calls"]] == [
        ("example_single_tool_call", "/seed_session"),
        ("policy_model", "/v1/responses"),
        ("example_single_tool_call", "/verify"),
    ]
    for before, after in pairwise(timing["calls"]):
        assert 0 < before["start_s"] < before["start_s"] + before["duration_s"] <= after["start_s"] + 2e-6
    last = timing["calls"][-1]
    assert last["start_s"] + last["duration_s"] < timing["duration_s"]


def test_an_agent_without_a_number_is_an_error_and_a_number_without_an_agent_a_warning(servers: Servers) -> None:
    write_rows(Path("in.jsonl"), [*WALKTHROUGH, *WALKTHROUGH])
    unlisted = servers.collect("+num_repeats={agent_alpha: 4}")
    (Path("other")).mkdir()
    write_rows(Path("other/in.jsonl"), WALKTHROUGH)
    unused = servers.collect("+num_repeats={agent_alfa: 2, _default: 1}", folder=Path("other"))

    code, _, stderr = finish(unlisted)
    assert code == 2
    assert stderr.count("'agent_beta'") == 1
    assert "has no '_default'" in stderr
    code, _, stderr = finish(unused)
    assert code == 0
    assert "num_repeats names agents that no row uses (a typo?): ['agent_alfa']" in stderr


def matching_row(agent_name: str, params: Row | None = None, **fields: object) -> Row:
    return {
        "agent_ref": {"name": agent_name},
        "responses_create_params": {"input": "Say hello", **(params or {})},
        **fields,
    }


def test_rows_that_a_server_would_refuse_end_the_run_before_the_first_call(servers: Servers) -> None:
    strict = "string_match_simple_agent"
    good = [matching_row(strict, n=n, expected_answer="hello") for n in range(3)]
    unfit = [
        matching_row(strict, {"temperatur": 1.0}, expected_answer="hello"),
        *[matching_row(strict, n=n, expected_anser="hello") for n in range(2)],
        matching_row(strict, expected_answer=["hello"]),
    ]
    write_rows(Path("in.jsonl"), [*good, *unfit])
    write_rows(Path("out.jsonl"), [])
    module = "tests.collection.python_run"
    options = [f"+head_server.port={servers.head_port}", "+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=new.jsonl"]
    program = run_program("python", "-m", module, *options)

    code, _, stderr = finish(servers.collect())

    assert code == 2
    file, params = Path("in.jsonl").absolute(), "responses_create_params"
    assert stderr.splitlines()[-5:] == [
        "Error: rows cannot be rolled out, so nothing was written:",
        f"  {file}, line 4: {params}.temperatur: there is no such parameter; did you mean 'temperature'?",
        f"  {file}, line 5: expected_answer: it is missing; is it 'expected_anser'? (2 rows are like this)",
        f"  {file}, line 7: expected_answer: Input should be a valid string",
        "Correct or remove them, or pass +keep_offending_rows=true to send them all the same.",
    ]
    assert "in.jsonl, row 4: responses_create_params.temperatur: there is no such parameter" in program.stderr
    assert {path.name for path in Path().iterdir()} == {"in.jsonl", "out.jsonl"}

    code, stdout, stderr = finish(servers.collect("+keep_offending_rows=true"))
    assert code == 1
    assert "line 4: responses_create_params.temperatur: there is no such parameter" in stderr
    assert "Rollouts: 3 of 7 finished, 4 failed" in stdout


def test_rows_that_may_succeed_are_sent(servers: Servers) -> None:
    write_rows(
        Path("in.jsonl"),
        [
            *[matching_row("filling_agent", n=n) for n in range(3)],
            matching_row("string_match_simple_agent", expected_answer=7, extra={"any": "thing"}),
            matching_row("string_match_simple_agent", expected_answer="(", match="regex"),
        ],
    )

    code, _, stderr = finish(servers.collect())

    assert code == 1, stderr
    assert {row["_ng_task_index"] for row in lines_in(Path("out.jsonl"))} == {0, 1, 2, 3}
    warned = [line for line in stderr.splitlines() if "some rollouts may fail" in line]
    assert len(warned) == 1
    assert "line 1: expected_answer: it is missing (3 rows are like this) and 1 more" in warned[0]


@dataclass
class Case:
    """One way in which a model endpoint treats one of many rows."""

    unlucky: str
    failure_class: str
    status: int | None
    server: str
    options: tuple[str, ...] = ()


CASES = {
    "HTTP 500": Case("please answer 500", "agent_error", 500, "flaky_endpoint"),
    "a permanent 429": Case("please answer 429", "rate_limited", 429, "flaky_endpoint"),
    "a closed connection": Case("please hang up", "server_gone", 500, "flaky_model"),
    "no answer": Case("please stay silent", "timeout", None, "flaky_agent", ("+rollout_timeout_s=3",)),
}


def test_one_row_that_always_fails_costs_only_itself(servers: Servers) -> None:
    started: dict[str, Piped] = {}
    for name, case in CASES.items():  # all at once: most of their time is spent waiting for retries
        write_rows(Path(name) / "in.jsonl", weather_rows("flaky_agent", ROWS, case.unlucky))
        started[name] = servers.collect("+num_samples_in_parallel=8", *case.options, folder=Path(name))
    ended = {name: finish(process) for name, process in started.items()}

    for name, (code, stdout, stderr) in ended.items():
        assert code == 1, f"{name}: {stderr}"
        assert f"Rollouts: {ROWS - 1} of {ROWS} finished, 1 failed" in stdout, name
        assert "Collecting rollouts: 100%" in stderr, name
        assert f"{ROWS}/{ROWS}" in stderr, name
        assert keys_in(Path(name) / "out.jsonl") == [(n, 0) for n in range(ROWS) if n != UNLUCKY], name
        check_failures(lines_in(Path(name) / "out_failures.jsonl"), CASES[name])


def check_failures(failures: list[Row], case: Case) -> None:
    assert [line.get("_ng_attempt_index") for line in failures] == [None, 1, 2], case
    assert {line["_ng_task_index"] for line in failures} == {UNLUCKY}, case
    assert {line["_ng_failure_class"] for line in failures} == {case.failure_class}, case
    assert {line["_ng_failure_status"] for line in failures} == {case.status}, case
    assert {line["_ng_failure_server"] for line in failures} == {case.server}, case
    assert all("reward" not in line and "_ng_failure_terminal" not in line for line in failures), case


def test_what_was_ridden_out_is_told_at_the_end(servers: Servers) -> None:
    write_rows(Path("in.jsonl"), weather_rows("flaky_agent", UNLUCKY + 1, "please be busy once"))

    code, stdout, stderr = finish(servers.collect())
    again, later, _ = finish(servers.collect("+output_jsonl_fpath=again.jsonl", "+json=true"))

    assert (code, again) == (0, 0), stderr
    (line,) = [line for line in stdout.splitlines() if line.startswith("Retries: ")]
    assert re.fullmatch(
        r"Retries: http://127.0.0.1:\d+/v1: tried again after 1 . 503, at a cost of \d+\.\d s over all calls", line
    )
    assert json.loads(later)["retries"] == {}  # those were of the run before


def test_what_a_rollout_had_when_it_failed_is_kept_with_the_failure(servers: Servers) -> None:
    rows = weather_rows("flaky_agent", UNLUCKY + 1, "What is the weather in Rome? Then break off")
    rows[UNLUCKY]["responses_create_params"]["tools"] = [WEATHER_TOOL]
    write_rows(Path("in.jsonl"), rows)

    code, _, stderr = finish(servers.collect("+num_samples_in_parallel=8"))

    assert code == 1, stderr
    (failure,) = lines_in(Path("out_failures.jsonl"))
    assert (failure["_ng_failure_class"], failure["_ng_failure_status"]) == ("http_4xx", 400)
    kept = failure["_ng_partial_response"]
    assert [item["type"] for item in kept["output"]] == ["function_call", "function_call_output"]
    assert kept["usage"]["total_tokens"] > 0
    assert "No more" in failure["_ng_failure_message"]
    assert "function_call" not in failure["_ng_failure_message"]


def test_a_wrong_key_stops_the_run_after_three_rollouts_with_one_clear_message(servers: Servers) -> None:
    write_rows(Path("in.jsonl"), weather_rows("locked_agent", 60))
    before = len(servers.lines)

    code, stdout, stderr = finish(servers.collect("+num_samples_in_parallel=1"))

    assert code == 1
    assert not lines_in(Path("out.jsonl"))
    failures = lines_in(Path("out_failures.jsonl"))
    assert [line["_ng_failure_class"] for line in failures] == ["auth"] * len(failures)
    assert len({line["_ng_task_index"] for line in failures}) == 3
    (line,) = [line for line in stdout.splitlines() if line.startswith("Stopped early: ")]
    assert "the key was refused in 3 rollouts of agent 'locked_agent'" in line
    assert "refused the API key (status 401): Incorrect API key; correct policy_api_key" in line
    said = [*servers.lines[before:], *stderr.splitlines()]
    assert sum("Incorrect API key" in line and "more like this" not in line for line in said) in (1, 2)
    assert not [line for line in [*said, *stdout.splitlines()] if "inner server" in line or "\\" in line]
