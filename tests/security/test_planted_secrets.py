"""Secrets planted in a configuration are looked for in everything that a run leaves behind, says and shows.

A model endpoint that repeats what it was sent, one that cannot be reached, a tracker, debug logs: each has its own
way of carrying a secret to where it does not belong.
"""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ENVIRONMENT = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
SECRETS = {
    "policy_api_key": "PLANTEDpolicy0f3a9c",
    "auth_token": "PLANTEDauth7b21d4",
    "wandb_api_key": "PLANTEDwandb" + "0a1b" * 10,
    "my_service_token": "PLANTEDtoken55e1f0",
    "database_secret": "PLANTEDsecret9d4ab7",
    "url_password": "PLANTEDurl31c8e6",
    "header_key": "PLANTEDheader6f0d21",
}
WAIT_S = 120.0


class Echo(http.server.BaseHTTPRequestHandler):
    """An endpoint that refuses every request and repeats its headers in the answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.dumps({"error": {"message": f"you sent {dict(self.headers)}", "code": "bad"}}).encode()
        self.send_response(400, "Bad")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def agent(model: str) -> dict[str, Any]:
    references = {
        "resources_server": {"type": "resources_servers", "name": "example_single_tool_call"},
        "model_server": {"type": "responses_api_models", "name": model},
    }
    return {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", **references}}}


def model_behind(url: str, **more: Any) -> dict[str, Any]:
    block = {
        "entrypoint": "app.py",
        "openai_base_url": url,
        "openai_api_key": "${policy_api_key}",
        "openai_model": "any",
        "openai_default_headers": {"X-Api-Key": SECRETS["header_key"]},
        **more,
    }
    return {"responses_api_models": {"openai_model": block}}


def config_of(echo_port: int) -> dict[str, Any]:
    with_password = f"http://me:{SECRETS['url_password']}@127.0.0.1"
    return {
        "config_paths": [ENVIRONMENT],
        "policy_model": {"responses_api_models": {"scripted_model": {"entrypoint": "app.py"}}},
        "good_agent": agent("policy_model"),
        "echo_agent": agent("echo_model"),
        "echo_model": model_behind(f"http://127.0.0.1:{echo_port}/v1"),
        "away_agent": agent("away_model"),
        "away_model": model_behind(f"{with_password}:{free_port()}/v1"),
        "alone_agent": agent("alone_model"),
        "alone_model": model_behind(f"{with_password}:{echo_port}/v1", isolation="process"),
        "mlflow_tracking_uri": f"{with_password}/mlflow",
        "services": {"my_service_token": SECRETS["my_service_token"], "database_secret": SECRETS["database_secret"]},
        "model_retry_max_tries": 2,
        "model_retry_first_delay_s": 0.01,
        "http_retry_max_tries": 2,
        "verbose": True,
        "global_aiohttp_client_request_debug": True,
        "wandb_project": "p",
        "wandb_name": "n",
    }


@dataclass
class Evidence:
    """Everything that could be seen of a run."""

    texts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, text: str | bytes) -> None:
        self.texts[f"{len(self.texts)} {name}"] = text if isinstance(text, str) else text.decode(errors="replace")

    def add_files(self, folder: Path, known: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and path != known:
                self.add(str(path.relative_to(folder)), path.read_bytes())

    def leaks(self) -> list[str]:
        return [
            f"{kind} in {name}: ...{text[max(0, text.index(secret) - 100) : text.index(secret) + 10]!r}"
            for name, text in self.texts.items()
            for kind, secret in SECRETS.items()
            if secret in text
        ]


def watch_processes(root: int, evidence: Evidence, over: threading.Event) -> None:
    """Note every command line and environment below a process until told to stop."""
    seen: set[bytes] = set()
    while not over.wait(0.05):
        try:
            tree = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in tree:
            for what in ("cmdline", "environ"):
                try:
                    text = Path(f"/proc/{process.pid}/{what}").read_bytes()
                except OSError:
                    continue
                if text not in seen:
                    seen.add(text)
                    evidence.add(f"{what} of {process.pid}", text)


def run(program: str, *options: str, folder: Path, evidence: Evidence) -> int:
    process = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *options],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    evidence.add(f"stdout of {program}", process.stdout)
    evidence.add(f"stderr of {program}", process.stderr)
    return process.returncode


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_GYM", "WANDB"))}
    return kept | {"WANDB_MODE": "offline"}


def ask(url: str, evidence: Evidence, *, token: str | None = None, body: bytes | None = None) -> int:
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    if token is not None:
        request.add_header("authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            status, headers, text = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        status, headers, text = error.code, error.headers, error.read()
    evidence.add(f"answer of {url}", f"{headers}{text.decode(errors='replace')}")
    return int(status)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user works: secrets in env.yaml, a config, rows."""
    named = {key: value for key, value in SECRETS.items() if key in ("policy_api_key", "auth_token", "wandb_api_key")}
    (tmp_path / "env.yaml").write_text(yaml.safe_dump(named))
    params = {"input": [{"role": "user", "content": "What is the weather in Paris?"}]}
    rows = [
        {"agent_ref": {"type": "responses_api_agents", "name": f"{name}_agent"}, "responses_create_params": params}
        for name in ("good", "echo", "away", "alone")
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def echo_port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_no_secret_is_found_in_what_a_run_leaves_behind_says_or_shows(folder: Path, echo_port: int) -> None:
    (folder / "servers.yaml").write_text(yaml.safe_dump(config_of(echo_port)))
    evidence, head = Evidence(), free_port()
    options = ("+config_paths=[servers.yaml]", f"+head_server.port={head}")
    with (folder / "ng_run.log").open("wb") as log:
        launcher = subprocess.Popen(
            [str(Path(sys.executable).with_name("ng_run")), *options, "+nemo_gym_log_dir=logs"],
            cwd=folder,
            env=clean_environment(),
            stdout=log,
            stderr=log,
        )
    over = threading.Event()
    watcher = threading.Thread(target=watch_processes, args=(os.getpid(), evidence, over))
    watcher.start()
    try:
        wait_until_ready(launcher, folder / "ng_run.log")
        collected = run(
            "ng_collect_rollouts",
            *options,
            "+input_jsonl_fpath=in.jsonl",
            "+output_jsonl_fpath=out/rollouts.jsonl",
            "+results_dir=results",
            "+max_attempts=2",
            folder=folder,
            evidence=evidence,
        )
        assert run("ng_status", f"+head_server.port={head}", folder=folder, evidence=evidence) == 0
        assert run("ng_dump_config", options[0], folder=folder, evidence=evidence) == 0
        question_servers(head, evidence)
    finally:
        over.set()
        watcher.join()
        launcher.send_signal(signal.SIGINT)
        launcher.wait(30)
    evidence.add_files(folder, known=folder / "env.yaml")
    evidence.texts = {name: text for name, text in evidence.texts.items() if not name.endswith(" servers.yaml")}

    assert collected == 1
    failures = [json.loads(line) for line in (folder / "out/rollouts_failures.jsonl").read_text().splitlines()]
    assert {(failure["agent_ref"]["name"], failure["_ng_failure_class"]) for failure in failures} == {
        ("echo_agent", "http_4xx"),
        ("away_agent", "connect"),
        ("alone_agent", "http_4xx"),
    }
    assert len((folder / "out/rollouts.jsonl").read_text().splitlines()) == 1
    assert any("cmdline of" in name for name in evidence.texts)
    assert any(name.endswith(".wandb") for name in evidence.texts)
    assert "you sent" in " ".join(evidence.texts.values())
    assert evidence.leaks() == []


def wait_until_ready(launcher: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while "servers ready!" not in log.read_text():
        assert launcher.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def question_servers(head: int, evidence: Evidence) -> None:
    """Ask the head and every server for whatever they may answer, with the token and without."""
    token = SECRETS["auth_token"]
    request = urllib.request.Request(
        f"http://127.0.0.1:{head}/server_instances", headers={"authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        urls = [f"http://127.0.0.1:{head}", *(entry["url"] for entry in json.loads(answer.read()))]
    for url in urls:
        assert ask(f"{url}/", evidence) == 200
        assert ask(f"{url}/openapi.json", evidence) == 401
        for path in ("/openapi.json", "/health", "/global_config_dict_yaml", "/server_instances", "/nowhere"):
            ask(f"{url}{path}", evidence, token=token)
        for path in ("/run", "/v1/responses", "/v1/chat/completions", "/verify", "/seed_session"):
            for body in (b"{", b"[]", json.dumps({"input": "?", "responses_create_params": {"input": "?"}}).encode()):
                ask(f"{url}{path}", evidence, token=token, body=body)
