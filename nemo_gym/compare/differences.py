"""What two runs do not have in common besides their results: model, sampling, prompt, data, code, configuration."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from nemo_gym.compare.measure import MeasuredRun, Row, iter_rows
from nemo_gym.compare.pairing import Matched
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import RunManifest, tell_files_apart
from nemo_gym.runs.rows import telling_fields
from nemo_gym.terminal import shown

_LONGEST_SHOWN = 80
_SHOWN_BEFORE = 20
_VISIBLE_SPACE = str.maketrans({" ": "·", "\n": "↵", "\t": "→", "\r": "␍"})
_IGNORED_OPTIONS = frozenset(
    {"output_jsonl_fpath", "input_jsonl_fpath", "resume_from_cache", "responses_create_params", "agent_name"}
    | {"num_samples_in_parallel", "prompt_config", "limit", "num_repeats", "json_format"}
)
"""Options that shape no rollout, or that are told under another name."""
_IGNORED_KEYS = frozenset(
    {
        "host",
        "port",
        "disallowed_ports",
        "run_id",
        "config_paths",
        "head_server",
        "auth_token",
        "wandb_api_key",
        "use_absolute_ip",
    }
)
_IGNORED_KEYS |= _IGNORED_OPTIONS


@dataclass
class Differing:
    """What two runs do not have in common."""

    changes: list[tuple[str, str, str]] = field(default_factory=list)
    """(what, in the baseline, in the other)"""
    subjects: list[str] = field(default_factory=list)
    """Which kinds of things differ: model, sampling, prompt, data, code, agent, configuration."""
    unknown: bool = False
    """Whether a manifest is missing, so that more may differ."""

    def add(self, subject: str, what: str, base: Any, new: Any) -> None:
        """Note a difference, if it is one."""
        if base == new:
            return
        if subject not in self.subjects:
            self.subjects.append(subject)
        self.changes.append((what, _shown(base), _shown(new)))

    @property
    def confounded(self) -> str | None:
        """That several things differ at once, in a sentence."""
        several = [subject for subject in self.subjects if subject != "data"]
        if len(several) < 2:
            return None
        listed = f"{', '.join(several[:-1])} and {several[-1]}"
        return f"{len(several)} things differ at once ({listed}), so a difference cannot be put down to one of them"


def what_differs(base: MeasuredRun, new: MeasuredRun, matched: Matched) -> Differing:
    """Compare the manifests of two runs, and what both asked in a task that they have in common."""
    found = Differing()
    ours, theirs = _manifest(base), _manifest(new)
    found.unknown = ours is None or theirs is None
    if ours is not None and theirs is not None:
        found.add("model", "model", ours.models, theirs.models)
        found.add("agent", "agents", sorted(ours.agents), sorted(theirs.agents))
        if ours.prompt != theirs.prompt:
            found.add("prompt", "prompt file", *_ends(*tell_files_apart(ours.prompt, theirs.prompt)))
    _add_prompt(found, base, new, matched)
    if ours is not None and theirs is not None:
        if ours.input != theirs.input:
            found.add("data", "input", *_ends(*tell_files_apart(ours.input, theirs.input)))
        for name in sorted({*ours.versions, *theirs.versions} - {"python"}):
            found.add("code version", f"version of {name}", ours.versions.get(name), theirs.versions.get(name))
    for name in sorted({*base.sampling, *new.sampling}):
        found.add("sampling", name, base.sampling.get(name), new.sampling.get(name))
    if ours is not None and theirs is not None:
        for name, one, other in _leaves_that_differ(_settings(ours), _settings(theirs)):
            found.add("configuration", name, one, other)
    return found


def _manifest(run: MeasuredRun) -> RunManifest | None:
    try:
        return RunManifest.model_validate_json(RolloutPaths(run.paths[0]).manifest.read_bytes())
    except (OSError, ValidationError):
        return None


def _add_prompt(found: Differing, base: MeasuredRun, new: MeasuredRun, matched: Matched) -> None:
    """Note where the texts around the question differ, in the first task that both runs have.

    Texts of rows that differ in other fields as well are put down to the data, unless the prompt files differ.
    """
    if not len(matched):
        return
    one, other = (_row_of(run, places[0]) for run, places in ((base, matched.base), (new, matched.new)))
    if "prompt" not in found.subjects and telling_fields(one) != telling_fields(other):
        return
    ours, theirs = _texts(one), _texts(other)
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            found.add("prompt", f"prompt ({name})", *_excerpts(ours.get(name), theirs.get(name)))


def _row_of(run: MeasuredRun, wanted: int) -> Row:
    return next(row for place, row in iter_rows(run) if place == wanted)


def _texts(row: Row) -> dict[str, str]:
    """Return what a row asks: instructions, the text of each message by its role, and its tools."""
    params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
    if not isinstance(params, Mapping):
        return {}
    found = {"instructions": params["instructions"]} if params.get("instructions") else {}
    given = params.get("input")
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    roles: Counter[str] = Counter()
    for item in items:
        role = str(item.get("role") or item.get("type")) if isinstance(item, Mapping) else "item"
        roles[role] += 1
        content = item.get("content", item) if isinstance(item, Mapping) else item
        found[role if roles[role] == 1 else f"{role} {roles[role]}"] = _text_of(content)
    return {**found, "tools": _text_of(params["tools"])} if params.get("tools") else found


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "\n".join(str(part["text"]) for part in content)
    return json.dumps(content, ensure_ascii=False)


def _excerpts(one: str | None, other: str | None) -> tuple[str | None, str | None]:
    """Return the parts of two texts that are shown: they begin shortly before the first difference."""
    if one is None or other is None:
        return one, other
    if one.split() == other.split():  # else they would look the same
        one, other = (text.translate(_VISIBLE_SPACE) for text in (one, other))
    if max(len(one), len(other)) <= _LONGEST_SHOWN:
        return one, other
    differing = (place for place, (ours, theirs) in enumerate(zip(one, other, strict=False)) if ours != theirs)
    start = next(differing, min(len(one), len(other))) - _SHOWN_BEFORE
    return (one, other) if start <= 0 else (f"…{one[start:]}", f"…{other[start:]}")


def _ends(one: str, other: str) -> tuple[str, str]:
    """Return the ends of long paths, which say more than their beginnings."""
    return one[-_LONGEST_SHOWN:], other[-_LONGEST_SHOWN:]


def _settings(manifest: RunManifest) -> dict[str, Any]:
    options = {name: value for name, value in manifest.options.items() if name not in _IGNORED_OPTIONS}
    return {**options, **(manifest.config or {})}


def _leaves_that_differ(base: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(base, Mapping) and isinstance(new, Mapping):
        for name in sorted({*map(str, base), *map(str, new)} - _IGNORED_KEYS):
            yield from _leaves_that_differ(base.get(name), new.get(name), f"{path}.{name}" if path else name)
    elif base != new and (base or new):
        yield path, base, new


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(value) or "-"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return shown(text, _LONGEST_SHOWN)
