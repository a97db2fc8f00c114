"""The names of a run's files, all made from its `output_jsonl_fpath`, and the endings of what may lie beside them."""

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path

from nemo_gym.paths import refuse_long_names

logger = logging.getLogger(__name__)


MATERIALIZED_SUFFIX = "_materialized_inputs.jsonl"
BESIDE_ROLLOUTS = (
    "_failures.jsonl",
    MATERIALIZED_SUFFIX,
    "_reward_profiling.jsonl",
    "_selected.jsonl",
    "_manifest.json",
    "_aggregate_metrics.json",
    "_agent_metrics.json",
    "_reward_profile.html",
    ".lock",
    ".corrupt",
    ".tmp",
    ".partial",
)
"""How the files end that commands write beside rollouts, and that are no rollouts themselves."""


def corrupt_of(path: Path) -> Path:
    """Where the damaged lines go that are taken out of a file of a run."""
    return path.with_name(f"{path.stem}.jsonl.corrupt")


@dataclass(frozen=True)
class RolloutPaths:
    """Where a run's files are.

    Nothing here but the rollouts, the failures and the materialized inputs ends in `.jsonl`, so that a
    glob over rollout files picks up no lock, no manifest and no debris.
    """

    rollouts: Path
    """One line per finished rollout, exactly as the user named it."""

    @classmethod
    def of_output(cls, output: Path) -> "RolloutPaths":
        """Those of a run that is to be written.

        Raises:
            ConfigError: the name is too long for some of them.
        """
        paths = cls(output)
        refuse_long_names("output_jsonl_fpath", *paths.of_one_run)
        return paths

    @property
    def materialized_inputs(self) -> Path:
        """Every row the run sends, with its agent, parameters and indices."""
        return self._sibling(MATERIALIZED_SUFFIX)

    @property
    def failures(self) -> Path:
        """The sidecar: one line per failed attempt."""
        return self._sibling("_failures.jsonl")

    @property
    def aggregate_metrics(self) -> Path:
        """What the agents computed from the finished rollouts."""
        return self._sibling("_aggregate_metrics.json")

    @property
    def manifest(self) -> Path:
        """What was run, with what, and how it ended."""
        return self._sibling("_manifest.json")

    @property
    def lock(self) -> Path:
        """Held by the one collector that may write."""
        return self._sibling(".lock")

    @property
    def log(self) -> Path:
        """What a collector says that runs where nobody sees it."""
        return self._sibling(".log")

    @property
    def previous(self) -> Path:
        """The folder of earlier runs that a fresh run moved out of the way."""
        return self._sibling(".previous")

    @property
    def rollouts_corrupt(self) -> Path:
        """Damaged lines taken out of the rollouts."""
        return corrupt_of(self.rollouts)

    @property
    def failures_corrupt(self) -> Path:
        """Damaged lines taken out of the failures."""
        return corrupt_of(self.failures)

    @property
    def materialized_inputs_corrupt(self) -> Path:
        """Damaged lines taken out of the materialized inputs."""
        return corrupt_of(self.materialized_inputs)

    @property
    def manifest_corrupt(self) -> Path:
        """A manifest that could not be read and was replaced."""
        return self._sibling("_manifest.json.corrupt")

    @property
    def how_to_view(self) -> str:
        """The command that shows the rollouts, for the last lines of those that make them."""
        return f"Read the rollouts: {shlex.join(['ng_view', f'+path={self.rollouts}'])}"

    @property
    def of_one_run(self) -> tuple[Path, ...]:
        """What makes up a run and moves with it."""
        return (
            self.rollouts,
            self.failures,
            self.aggregate_metrics,
            self.materialized_inputs,
            self.manifest,
            self.rollouts_corrupt,
            self.failures_corrupt,
            self.materialized_inputs_corrupt,
            self.manifest_corrupt,
        )

    def _sibling(self, ending: str) -> Path:
        return self.rollouts.with_name(self.rollouts.stem + ending)
