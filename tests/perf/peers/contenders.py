"""Who takes part: how each is started on a task, with how many rollouts, and where its results are."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson

from nemo_gym import __version__
from tests.perf.peers.tasks import ROOT, Task

VENVS = ROOT / ".venv-peers"
OURS = "nemo_gym"
IN_FLIGHT = 256


@dataclass(frozen=True)
class Contender:
    """A way to play rollouts: ours, or the program of a peer in the peer's own environment."""

    name: str
    package: str
    """What is installed in its environment, by the name of its distribution."""
    results: str
    """Where in its folder the results are."""
    rollouts: int
    """Of one measurement: enough to take a few seconds."""
    in_flight: int = IN_FLIGHT

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return Path(sys.executable) if self.name == OURS else VENVS / self.name / "bin" / "python"

    def version(self) -> str:
        """Package and version, as installed; the remedy when it is not."""
        if self.name == OURS:
            return f"{OURS} {__version__}"
        ask = f"from importlib.metadata import version; print(version({self.package!r}))"
        try:
            done = subprocess.run([str(self.python), "-c", ask], capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise SystemExit(
                f"{self.package} is not installed in {VENVS / self.name}; run `make bench-peers`"
            ) from error
        return f"{self.package} {done.stdout.strip()}"

    def command(self, task: Task, rollouts: int, base_url: str, folder: Path) -> list[str]:
        """One run of so many rollouts that writes its results into the folder."""
        if self.name == OURS:
            return _our_command(task, rollouts, self.in_flight, base_url, folder)
        module = "with_verifiers" if self.name == "verifiers" else f"tests.perf.peers.with_{self.name}"
        return [
            *(str(self.python), "-m", module, task.name),
            *(str(rollouts), str(min(rollouts, self.in_flight)), base_url, str(folder)),
        ]

    def environment(self) -> dict[str, str]:
        """Environment variables of its run; what verifiers keeps in the home directory stays with its environment."""
        here = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
        kept = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": here}
        if self.name == OURS:
            del kept["PYTHONPATH"]
        if self.name == "verifiers":
            kept["HOME"] = str(VENVS / "home")
            kept["PATH"] = os.pathsep.join((str(self.python.parent), os.environ.get("PATH", "")))
        return kept

    def scored(self, folder: Path) -> tuple[int, float]:
        """Rollouts in the results, and their mean reward."""
        if self.name == OURS:
            rewards = [orjson.loads(line)["reward"] for line in (folder / self.results).read_bytes().splitlines()]
            return len(rewards), sum(rewards) / max(1, len(rewards))
        said = orjson.loads((folder / "output.log").read_bytes().splitlines()[-1])
        return int(said["rollouts"]), float(said["reward"])


CONTENDERS = (
    Contender(OURS, OURS, "rollouts.jsonl", 2000),
    Contender("inspect_ai", "inspect_ai", "*.eval", 256),
    Contender("verifiers_tool_env", "verifiers", "results.jsonl", 256),
    Contender("verifiers", "verifiers", "traces.jsonl", 12, in_flight=4),
)


def _our_command(task: Task, rollouts: int, in_flight: int, base_url: str, folder: Path) -> list[str]:
    rows = folder / "rows.jsonl"
    rows.write_bytes(b"".join(orjson.dumps({**task.row, "id": number}) + b"\n" for number in range(rollouts)))
    data_sets = f"[{{name: example, type: example, jsonl_fpath: {rows}, num_repeats: 1}}]"
    return [
        str(Path(sys.executable).parent / "ng_e2e_collect_rollouts"),
        f"+environment={task.environment}",
        "+split=example",
        "+config_paths=[responses_api_models/openai_model/configs/openai_model.yaml]",
        f"+policy_base_url={base_url}",
        "+policy_api_key=none",
        "+policy_model_name=canned",
        f"+num_samples_in_parallel={in_flight}",
        f"+output_jsonl_fpath={folder / 'rollouts.jsonl'}",
        f"++{task.environment}_simple_agent.responses_api_agents.simple_agent.datasets={data_sets}",
    ]
