"""A tenth of the rollouts fails for reasons of the infrastructure: the score says so and is still the right one."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.fleet import AGENT, counter_config, right_answers
from tests.chaos.lab import Job, Lab, Shared
from tests.chaos.ledger import read_lines

ROWS = 400
_UNLUCKY = "[unlucky]"


@dataclass
class HonestyRow:
    """One statement about the run."""

    what: str
    measured: str
    bound: str
    is_good: bool

    def line(self) -> str:
        """For the terminal."""
        return f"{'ok  ' if self.is_good else 'FAIL'} {self.what:<74} {self.measured} (bound: {self.bound})"

    def cells(self) -> list[str]:
        """For the page."""
        return [self.what, self.measured, self.bound]


def check_honesty(folder: Path, seed: int, add: Callable[[Any], None]) -> None:
    """The same rows with and without failures."""
    lab = Lab(folder / "honesty", Random(f"{seed}/honesty"), Shared(folder))
    try:
        _check(lab, add)
    finally:
        lab.close()


def _config() -> dict[str, Any]:
    """Two agents on equal models, of which one answers some rows with an error, always."""
    gives_up = {"match": {"turn": 2}, "probability": 0.3, "reply": {"text": "I would rather not."}}
    script = right_answers(latency_s=0.01)
    script["rules"] = [gives_up, *script["rules"]]
    config = counter_config(script=script)
    fault = {"kind": "status", "status": 503, "match": {"last_user_contains": _UNLUCKY}}
    block = {"entrypoint": "app.py", "script": {**script, "faults": [fault]}}
    config["failing_model"] = {"responses_api_models": {"scripted_model": block}}
    references = {
        "resources_server": {"type": "resources_servers", "name": "example_session_state_mgmt_resources_server"},
        "model_server": {"type": "responses_api_models", "name": "failing_model"},
    }
    config["failing_agent"] = {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", **references}}}
    return config


def _collected(lab: Lab, agent: str, rows: list[str]) -> tuple[Job, dict[str, Any]]:
    fleet = lab.shared.fleet("honesty-servers", _config)
    job = Job(lab, fleet, rows=ROWS, repeats=1, agent=agent, options=("+max_attempts=2",))
    (job.folder / "in.jsonl").write_text("".join(row.replace(AGENT, agent) + "\n" for row in rows))
    with job.collecting("+json=true") as collector:
        collector.wait()
        summary = json.loads(collector.stdout_path.read_text())
    return job, summary


def _rows(lab: Lab) -> tuple[list[str], int]:
    fleet = lab.shared.fleet("honesty-servers", _config)
    plain = (Job(lab, fleet, rows=ROWS, repeats=1, folder=lab.folder / "rows").folder / "in.jsonl").read_text()
    lines = plain.splitlines()
    unlucky = set(lab.chance.sample(range(ROWS), ROWS // 10))
    marked = [line.replace("now? (", f"now? {_UNLUCKY} (") if n in unlucky else line for n, line in enumerate(lines)]
    return marked, len(unlucky)


def _check(lab: Lab, add: Callable[[Any], None]) -> None:
    rows, failing = _rows(lab)
    whole, whole_summary = _collected(lab, AGENT, rows)
    job, summary = _collected(lab, "failing_agent", rows)
    with job.collecting(name="words") as again:  # there is nothing to do but to say it once more, to people
        again.wait()
        words = again.printed
    truth = whole_summary["key_metrics"][AGENT]["mean/reward"]
    score = summary["key_metrics"]["failing_agent"]["mean/reward"]
    coverage = summary["coverage"]["failing_agent"]
    low, high = coverage["ci95"]["mean_excluding_failures"]
    rewards = [record["reward"] for record in read_lines(job.output)]
    failures = read_lines(job.output.with_name("out_failures.jsonl"))
    invented = sum("reward" in record for record in failures)
    lab.shared.close()
    add(
        HonestyRow(
            "true score, with every rollout there",
            f"{truth:.4f} over {whole.finished}",
            f"{ROWS}",
            whole.finished == ROWS,
        )
    )
    in_it = low <= truth <= high
    add(
        HonestyRow(
            "score with a tenth failing, and its 95 % interval",
            f"{score:.4f} [{low:.4f}, {high:.4f}]",
            "covers the true one",
            in_it,
        )
    )
    says = f"{coverage['scored']['rollouts']} scored, {coverage['failed']['rollouts']} failed"
    is_said = (
        coverage["failed"]["rollouts"] == failing
        and summary["missing"] == failing
        and f"{ROWS - failing} of {ROWS}" in words
    )
    add(HonestyRow("how many are missing is said", says, f"{ROWS - failing} and {failing}", is_said))
    is_mean = abs(score - sum(rewards) / len(rewards)) < 1e-9 and len(rewards) == ROWS - failing
    add(
        HonestyRow(
            "failures that were given a reward, or entered the score", str(invented), "0", invented == 0 and is_mean
        )
    )
