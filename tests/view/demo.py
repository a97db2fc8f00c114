"""A run worth looking at: a bundled environment, the scripted model, the real commands."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_gym.paths import PARENT_DIR
from tests.ports import free_port
from tests.programs import WAIT_S, Program

ENVIRONMENT = PARENT_DIR / "resources_servers" / "example_multi_step"
CONFIGS = [
    str(ENVIRONMENT / "configs" / "example_multi_step.yaml"),
    str(PARENT_DIR / "responses_api_models" / "scripted_model" / "configs" / "scripted_model.yaml"),
]
AGENT = "example_multi_step_simple_agent"
LEVELS = ("easy", "medium", "hard")
OVERLOADED = "the endpoint is overloaded"


def lookups(names: str) -> list[dict[str, Any]]:
    return [{"name": "get_synonym_value", "arguments": {"synonym": f"{{{name}}}"}} for name in names]


def asks_for(names: str, probability: float, reasoning: str, end: str = r"\. Find", **match: str) -> dict[str, Any]:
    words = ", ".join(rf"(?P<{name}>\w+)" for name in names)
    return {
        "match": {"after_user": True, "last_user_regex": f": {words}{end}", **match},
        "probability": probability,
        "reply": {"reasoning": reasoning, "tool_calls": lookups(names)},
    }


def overloaded(**when: Any) -> dict[str, Any]:
    return {"kind": "status", "status": 500, "message": OVERLOADED, **when}


def script(latency_s: float, faults: list[dict[str, Any]]) -> dict[str, Any]:
    """Looks up all words most of the time, and fewer when the task says it is hard."""
    careful = "Every word in the list has a value of its own. I look all of them up before I hand anything in."
    hasty = "The first two words should be enough."
    answer = (
        "### Done\n\nI looked up **every word** and handed the values in, in the order of the list:\n\n"
        '```python\nextract_synonym_values(values)  # returned {"success": true}\n```\n\n- no value was guessed\n'
        "- the word that the others mean was left out"
    )
    rules = [
        *(asks_for(names, 0.35, careful, conversation_contains="(hard)") for names in ("abcd", "abc", "ab")),
        asks_for("ab", 1, hasty, end="", conversation_contains="(hard)"),
        *(asks_for(names, 0.8, careful) for names in ("abcd", "abc", "ab")),
        asks_for("ab", 1, hasty, end=""),
        {"match": {"after_tool": "extract_synonym_values"}, "reply": {"text": answer}},
    ]
    return {"rules": rules, "latency_s": {"lognormal": [latency_s, 0.6], "max": 5}, "faults": faults}


def write_tasks(path: Path, tasks: int) -> None:
    rows = [json.loads(line) for line in (ENVIRONMENT / "data" / "example.jsonl").read_text().splitlines()]
    with path.open("w") as file:
        for number in range(tasks):
            row = json.loads(json.dumps(rows[number % len(rows)]))
            level = LEVELS[number * 7 // 5 % 3]
            row["responses_create_params"]["input"][-1]["content"] += f" This is list {number} ({level})."
            file.write(json.dumps(row | {"id": number, "level": level}) + "\n")


@dataclass
class Demo:
    """Servers that run, and a folder to collect into."""

    folder: Path
    head_port: int

    def collect(self, name: str, tasks: int, repeats: int, *options: str, results: Path | None = None) -> Program:
        """`ng_collect_rollouts`, begun; its rollouts go to `results/<name>/rollouts.jsonl`."""
        write_tasks(self.folder / f"{name}.jsonl", tasks)
        return Program(
            "ng_collect_rollouts",
            f"+agent_name={AGENT}",
            f"+input_jsonl_fpath={self.folder / name}.jsonl",
            f"+output_jsonl_fpath={(results or self.results) / name / 'rollouts.jsonl'}",
            f"+num_repeats={repeats}",
            "+num_repeats_add_seed=true",
            f"+head_server.port={self.head_port}",
            *options,
            folder=self.folder,
            name=f"collect_{name}",
        )

    @property
    def results(self) -> Path:
        return self.folder / "results"


@contextlib.contextmanager
def servers(folder: Path, latency_s: float = 0.02, faults: list[dict[str, Any]] | None = None) -> Iterator[Demo]:
    """The environment with its model, running."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    (folder / "script.yaml").write_text(yaml.safe_dump(script(latency_s, faults or [])))
    run = Program(
        "ng_run",
        f"+config_paths=[{','.join(CONFIGS)}]",
        f"++policy_model.responses_api_models.scripted_model.script={folder / 'script.yaml'}",
        f"+head_server.port={port}",
        folder=folder,
    )
    try:
        wait_for(run, "servers ready")
        yield Demo(folder, port)
        run.send(signal.SIGINT)
        run.wait()
    finally:
        run.stop()


def view(path: Path, folder: Path, *options: str) -> Program:
    """`ng_view`, begun; what it keeps is in `folder`, too."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    return Program("ng_view", f"+path={path}", *options, folder=folder, environment=environment)


@contextlib.contextmanager
def viewer(path: Path, folder: Path) -> Iterator[str]:
    """`ng_view`, serving; its address."""
    program = view(path, folder, "+port=0", "+open=false")
    try:
        yield "http://" + wait_for(program, "http://").split("http://")[1].split()[0]
        program.send(signal.SIGINT)
        program.wait()
    finally:
        program.stop()


def wait_for(program: Program, text: str) -> str:
    """The first line of its output that has `text`."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        found = [line for line in program.stdout.splitlines(keepends=True) if text in line and line.endswith("\n")]
        if found:
            return found[0]
        assert program.is_running, f"{program.command[0]} ended:\n{program.stdout}\n{program.stderr}"
        assert time.monotonic() < deadline_s, f"waited in vain for {text!r}:\n{program.stdout}\n{program.stderr}"
        time.sleep(0.02)
