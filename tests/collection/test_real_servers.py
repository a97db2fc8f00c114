"""The real commands on real servers: two agents, models that fail in every way, a wrong key."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.collection.fakes import Row, keys_in, lines_in, write_rows
from tests.ports import free_port

ENVIRONMENT = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
FAULTS: list[Row] = [
    {"kind": "status", "status": 500, "match": {"last_user_contains": "answer 500"}},
    {"kind": "status", "status": 429, "retry_after": 0.01, "match": {"last_user_contains": "answer 429"}},
    {"kind": "disconnect", "match": {"last_user_contains": "hang up"}},
    {"kind": "hang", "match": {"last_user_contains": "stay silent"}},
]
ROWS = 200
UNLUCKY = 77


def agent(model: str) -> Row:
    references = {
        "resources_server": {"type": "resources_servers", "name": "example_single_tool_call"},
        "model_server": {"type": "responses_api_models", "name": model},
    }
    return {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", **references}}}


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

    def collect(self, *options: str, folder: Path | None = None) -> "subprocess.Popen[str]":
        """Start `ng_collect_rollouts` on in.jsonl and out.jsonl of a folder."""
        return subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ng_collect_rollouts")),
                f"+head_server.port={self.head_port}",
                "+input_jsonl_fpath=in.jsonl",
                "+output_jsonl_fpath=out.jsonl",
                *options,
            ],
            cwd=folder or Path.cwd(),
            env={name: value for name, value in os.environ.items() if not name.startswith(("NEMO_GYM", "WANDB"))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Agents on one environment, each with a model endpoint of its own kind."""
    folder = tmp_path_factory.mktemp("servers")
    flaky, locked = free_port(), free_port()
    config = {
        "config_paths": [ENVIRONMENT],
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
    head_port = free_port()
    process = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ng_run")),
            "+config_paths=[servers.yaml]",
            f"+head_server.port={head_port}",
        ],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    drain = threading.Thread(target=process.stdout.read)
    overdue = threading.Timer(120, process.kill)
    overdue.start()
    try:
        printed = ""
        for line in process.stdout:
            printed += line
            if "servers ready!" in line:
                break
        assert "servers ready!" in printed, printed
        drain.start()
        yield Servers(head_port, folder)
    finally:
        overdue.cancel()
        process.send_signal(signal.SIGINT)
        process.wait(30)
        if drain.ident is not None:
            drain.join()
        process.stdout.close()


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


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
    names = [entry["agent_ref"]["name"] for entry in json.loads(Path("out_aggregate_metrics.json").read_text())]
    assert names == ["agent_alpha", "agent_beta"]


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
    started: dict[str, subprocess.Popen[str]] = {}
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


def test_a_wrong_key_stops_the_run_after_three_rollouts_with_one_clear_message(servers: Servers) -> None:
    write_rows(Path("in.jsonl"), weather_rows("locked_agent", 60))

    code, stdout, _ = finish(servers.collect("+num_samples_in_parallel=1"))

    assert code == 1
    assert not lines_in(Path("out.jsonl"))
    failures = lines_in(Path("out_failures.jsonl"))
    assert [line["_ng_failure_class"] for line in failures] == ["auth"] * len(failures)
    assert len({line["_ng_task_index"] for line in failures}) == 3
    (line,) = [line for line in stdout.splitlines() if line.startswith("Stopped early: ")]
    assert "the key was refused in 3 rollouts of agent 'locked_agent'" in line
    assert "refused the API key (status 401): correct policy_api_key" in line
