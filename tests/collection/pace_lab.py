"""A run on an endpoint that counts requests: replicas of two model servers, one of which keeps a pace."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nemo_gym
from nemo_gym.collect.summary import RunSummary
from nemo_gym.notebooks import RunningServers
from nemo_gym.paths import PARENT_DIR
from nemo_gym.rollout_collection import RolloutCollectionConfig
from tests.collection.fakes import write_rows

HERE = Path(__file__).parent
MATCHING = PARENT_DIR / "resources_servers/string_match/configs/string_match.yaml"
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "What is the chemical symbol of gold?"}]},
    "expected_answer": "Au",
    "match": "exact",
}
PACED, FREE = "string_match_simple_agent", "free_agent"


@contextmanager
def endpoint_allowing(per_minute: float, log: Path) -> Iterator[int]:
    """The port of an endpoint in a process of its own."""
    command = [sys.executable, str(HERE / "paced_endpoint.py"), str(per_minute), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@dataclass
class PaceLab:
    """The servers, what they sent and what arrived."""

    servers: RunningServers
    folder: Path

    def collect(self, agent: str, rollouts: int, **options: Any) -> RunSummary:
        """Collect so many rollouts, all at once."""
        write_rows(self.folder / "in.jsonl", [ROW])
        return self.servers.collect(
            RolloutCollectionConfig(
                agent_name=agent,
                input_jsonl_fpath=str(self.folder / "in.jsonl"),
                output_jsonl_fpath=str(self.folder / f"{agent}.jsonl"),
                num_repeats=rollouts,
                num_samples_in_parallel=512,
                **options,
            )
        )

    def sent(self) -> list[tuple[float, str]]:
        """When requests were sent, and by which process."""
        return times_in(self.folder / "sent.log")

    def arrived(self) -> list[tuple[float, int]]:
        """When requests arrived, and with which status they were answered."""
        return [(at, int(status)) for at, status in times_in(self.folder / "arrived.log")]


def times_in(log: Path) -> list[tuple[float, str]]:
    """Times with what stands beside them, in order."""
    lines = (line.split() for line in log.read_text().splitlines())
    return sorted((float(at), what) for at, what in lines)


def model_at(port: int, **settings: Any) -> dict[str, Any]:
    """The block of a model server that asks the endpoint there."""
    block = {"entrypoint": "app.py", "openai_base_url": f"http://127.0.0.1:{port}/v1", "openai_api_key": "none"}
    return {"responses_api_models": {"openai_model": {**block, "openai_model": "m", **settings}}}


@contextmanager
def pace_lab(folder: Path, replicas: int, endpoint_allows: float, **pace: Any) -> Iterator[PaceLab]:
    """Two agents on one environment: the model server of one keeps a pace, that of the other does not."""
    agent = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "string_match"},
        "model_server": {"type": "responses_api_models", "name": "free_model"},
    }
    observed = {"PYTHONPATH": str(HERE / "note_sent"), "SENT_LOG": str(folder / "sent.log")}
    with endpoint_allowing(endpoint_allows, folder / "arrived.log") as port, patch.dict(os.environ, observed):
        config = {
            "policy_model": model_at(port, **pace),
            "free_model": model_at(port),
            FREE: {"responses_api_agents": {"simple_agent": agent}},
        }
        with nemo_gym.servers_of([MATCHING], num_replicas=replicas, **config) as servers:
            yield PaceLab(servers, folder)


def most_within(times: list[float], window_s: float) -> int:
    """The largest number of moments in any stretch of time that long."""
    times = sorted(times)
    first = most = 0
    for last, at in enumerate(times):
        while at - times[first] >= window_s:
            first += 1
        most = max(most, last - first + 1)
    return most
