"""`manifest.yaml` beside the `config.yaml` of an environment or benchmark: what it is, for catalogs.

The config says how a workload runs; the manifest says who made it, for what, and under which terms. Unknown keys are
errors, so that a misspelt one is not taken for a fact that is missing.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Text = Annotated[str, Field(min_length=1)]
Profile = Literal["custom-gym-verifier", "custom-gym-agent-loop", "external-agent-loop", "external-rollout-driver"]
_DRIVEN: Profile = "external-rollout-driver"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RewardFacts(_Strict):
    """What rewards mean."""

    range: tuple[float, float]
    """The lowest and the highest there are."""
    higher_is_better: bool

    @field_validator("range")
    @classmethod
    def _in_order(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] >= value[1]:
            raise ValueError("write the lowest reward first, such as [0, 1]")
        return value


class ManifestDataset(_Strict):
    """A data set of the workload."""

    name: Text
    type: Literal["train", "validation", "example", "benchmark"]
    jsonl_fpath: Text
    prepare_script: str | None = None
    prompt_config: str | None = None
    num_repeats: int = Field(default=1, ge=1)


class Adoption(_Strict):
    """Where a workload was taken from."""

    source: Text
    ref: str | None = None
    reconciled: bool | str | None = None


class WorkloadManifest(_Strict):
    """All that a manifest says."""

    name: Text
    """Its path below the folder `environments` or `benchmarks`."""
    version: Text
    kind: Literal["environment", "benchmark"]
    integration_profile: Profile
    domain: Text
    description: Text
    modality: Text
    authors: list[Text] = Field(min_length=1)
    reward: RewardFacts
    resources_server: Text
    agent_server: Text
    datasets: list[ManifestDataset] = Field(min_length=1)
    licensing: Text = "unknown"
    determinism: Literal["seeded", "stochastic", "unknown"] = "unknown"
    model_server: str | None = None
    rollout_driver: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    grading_mode: str | None = None
    session_model: Literal["episode", "step"] | None = None
    state: Literal["none", "per_session"] | None = None
    sandbox: Any = None
    canonical_split: str | None = None
    standard_prompt_config: str | None = None
    adopted_from: Adoption | None = None
    lifecycle: Literal["active", "deprecated"] = "active"

    @field_validator("version", mode="before")
    @classmethod
    def _numbers_are_versions(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "WorkloadManifest":
        if len(set(self.authors)) < len(self.authors):
            raise ValueError("authors names somebody twice")
        if (self.rollout_driver is not None) != (self.integration_profile == _DRIVEN):
            raise ValueError(f"rollout_driver belongs to integration_profile {_DRIVEN}, and to no other")
        if self.integration_profile.startswith("custom-gym") and not self.model_server:
            raise ValueError(f"integration_profile {self.integration_profile} needs a model_server")
        if self.kind == "benchmark" and not (self.canonical_split and self.standard_prompt_config):
            raise ValueError("a benchmark needs canonical_split and standard_prompt_config")
        lacking = [each.name for each in self.datasets if each.type == "benchmark" and not each.prepare_script]
        if lacking:
            raise ValueError(f"data sets of type benchmark need a prepare_script: {', '.join(lacking)}")
        return self
