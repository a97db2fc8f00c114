"""Every file of a run, all derived from its `output_jsonl_fpath`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RolloutPaths:
    """Where a run's files are.

    Nothing here but the rollouts, the failures and the materialized inputs ends in `.jsonl`, so that a
    glob over rollout files picks up no lock, no manifest and no debris.
    """

    rollouts: Path
    """One line per finished rollout, exactly as the user named it."""

    @property
    def materialized_inputs(self) -> Path:
        """Every row the run sends, with its agent, parameters and indices."""
        return self._sibling("_materialized_inputs.jsonl")

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
        return self._sibling(".jsonl.corrupt")

    @property
    def failures_corrupt(self) -> Path:
        """Damaged lines taken out of the failures."""
        return self._sibling("_failures.jsonl.corrupt")

    @property
    def materialized_inputs_corrupt(self) -> Path:
        """Damaged lines taken out of the materialized inputs."""
        return self._sibling("_materialized_inputs.jsonl.corrupt")

    @property
    def manifest_corrupt(self) -> Path:
        """A manifest that could not be read and was replaced."""
        return self._sibling("_manifest.json.corrupt")

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
