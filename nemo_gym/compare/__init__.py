"""Comparing runs: whether one is better than another, by how much, and how sure that is; what `ng_compare` is told.

This module is imported for every help page, so it stays light.
"""

from typing import Any, Literal

from pydantic import AliasChoices, Field, field_validator

from nemo_gym.runs.spending import PriceOptions
from nemo_gym.schemas.path_text import PathText


class CompareConfig(PriceOptions):
    """Arguments of `ng_compare`."""

    runs: dict[str, list[PathText]]
    """The rollouts of each run, the baseline first: '[base.jsonl,new.jsonl]' or '{base: a.jsonl, new: b/*.jsonl}'."""
    metric: list[str] = Field(["reward"], min_length=1)
    """What is compared, the first decides: reward, any number or boolean of a record (a.b for one inside another),
    pass@4, majority@4, tokens, input_tokens, output_tokens, duration, cost (with prices: those given, else those that a
    run was collected with)."""
    pair_by: str = Field("content", min_length=1)
    """How tasks of the runs are matched: content (what was asked), index (their number in the input), or a field of
    the rows."""
    where: str | None = Field(None, min_length=1)
    """Compare only rollouts for which this holds, such as 'level == "hard"': fields of rows and of records."""
    by: str | None = Field(None, min_length=1)
    """A field of the rows; the comparison is also made for each of its values."""
    answer_field: str | None = Field(None, min_length=1)
    """Where records hold the answer that majority@k votes on; extracted_answer, when unset, or what it resembles."""
    allow_unmatched: bool = False
    """Compare even though fewer than half of the tasks are in both runs."""
    flips: int = Field(10, ge=0)
    """How many of the tasks that changed most are listed."""
    fail_if: str | None = Field(None, min_length=1)
    """Exit with 1 if this holds, such as 'delta < -0.01': over delta, relative, ci_low, ci_high, p, base, new,
    tokens.delta, cost.delta, failed.delta, coverage."""
    on_undecided: Literal["undecided", "pass", "fail"] = "undecided"
    """What becomes of a condition that this much data cannot decide: exit code 3, 0 or 1."""
    output: list[PathText] = Field(default_factory=list)
    """Also write the comparison to this file: .html, .md, .json or .csv."""
    junit: PathText | None = Field(None, min_length=1)
    """Also write what became of fail_if as a JUnit file, which CI systems show."""
    json_format: bool = Field(False, validation_alias=AliasChoices("json", "json_format"))
    """Print the comparison as JSON on stdout instead of tables."""

    @field_validator("runs", mode="before")
    @classmethod
    def _name_runs(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = [part.strip() for part in given.strip("[]").split(",") if part.strip()]
        if isinstance(given, list | tuple):
            given = _named([str(path) for path in given])
        if isinstance(given, dict):
            if len(given) < 2:
                raise ValueError("a comparison needs two runs, the baseline first: '[base.jsonl,new.jsonl]'")
            return {str(name): [paths] if isinstance(paths, str) else paths for name, paths in given.items()}
        return given

    @field_validator("metric", "output", mode="before")
    @classmethod
    def _one_or_more(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("output")
    @classmethod
    def _known_endings(cls, given: list[str]) -> list[str]:
        for path in given:
            if not path.lower().endswith((".html", ".md", ".json", ".csv")):
                raise ValueError(f"{path}: the ending says what is written: .html, .md, .json or .csv")
        return given


def _named(paths: list[str]) -> dict[str, list[str]]:
    """Runs by the shortest ends of their paths that tell them apart, without the ending."""
    parts = [path.removesuffix(".jsonl").strip("/").split("/") for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return {name: [path] for name, path in zip(names, paths, strict=True)}
    repeated = sorted({path for path in paths if paths.count(path) > 1})
    raise ValueError(f"{', '.join(repeated)} is given twice; name the runs: {{a: {paths[0]}, b: {paths[-1]}}}")
