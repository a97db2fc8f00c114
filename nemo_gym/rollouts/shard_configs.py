"""Were the shards collected alike? Rollouts of different models or settings do not make one score.

Only what shapes a rollout is compared, and only between shards of the same agent. Addresses and inputs
differ between shards by design.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.errors import ConfigError
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.rollouts.config import repeats_of
from nemo_gym.rollouts.manifest import RunManifest
from nemo_gym.terminal import shown

logger = logging.getLogger(__name__)

_OF_THE_MACHINE = frozenset({"host", "port", "num_workers", "num_replicas", "isolation", "datasets"})
_DIFFERENCES_NAMED = 10

Settings = dict[str, Any]
"""What shaped the rollouts of one agent, flat."""


class DifferentConfigsError(ConfigError, ValueError):
    """Shards were collected with different settings."""


def check_configs(manifests: Mapping[Path, RunManifest], *, allow_changed: bool) -> list[str]:
    """The differences between shards, each as a line of text.

    Raises:
        DifferentConfigsError: there are some, and they are not allowed.
    """
    differences = list(dict.fromkeys(_differences(manifests)))
    if differences and not allow_changed:
        named = differences[:_DIFFERENCES_NAMED]
        more = len(differences) - len(named)
        lines = "".join(f"\n  {difference}" for difference in [*named, *([f"and {more} more"] if more else [])])
        raise DifferentConfigsError(
            f"the shards were collected differently, so their rollouts do not make one score:{lines}\n"
            "Aggregate them separately, or accept it with +allow_changed_config=true"
        )
    for difference in differences:
        logger.warning("shards were collected differently: %s", difference)
    return differences


def _differences(manifests: Mapping[Path, RunManifest]) -> Iterator[str]:
    first_of_agent: dict[str, tuple[Path, Settings]] = {}
    for path, manifest in manifests.items():
        for agent in manifest.agents:
            settings = _settings(manifest, agent)
            first_path, first = first_of_agent.setdefault(agent, (path, settings))
            for name in first | settings:
                was, now = first.get(name), settings.get(name)
                if was != now:
                    yield f"{name}: {_text(was)} in {first_path}, {_text(now)} in {path}"


def _settings(manifest: RunManifest, agent: str) -> Settings:
    options = manifest.options
    config = manifest.config or {}
    return {
        **dict(_leaves(options.get(RESPONSES_CREATE_PARAMS_KEY_NAME), RESPONSES_CREATE_PARAMS_KEY_NAME)),
        "num_repeats": repeats_of(options.get("num_repeats", 1), agent),
        "num_repeats_add_seed": bool(options.get("num_repeats_add_seed")),
        "prompt_config": None if manifest.prompt is None else f"sha256 {manifest.prompt.sha256[:12]}",
        "models": sorted(manifest.models),
        **{
            name: value
            for instance in _with_servers(config, agent)
            for name, value in _leaves(config[instance], instance)
        },
    }


def _with_servers(config: Mapping[str, Any], agent: str) -> list[str]:
    """The agent and the servers it refers to, directly or not, as far as the config has them."""
    found = [agent] if agent in config else []
    for instance in found:
        found += [name for name in _refs(config[instance]) if name in config and name not in found]
    return found


def _refs(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get("type"), str) and isinstance(node.get("name"), str):
            yield node["name"]
        for inner in node.values():
            yield from _refs(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _refs(inner)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping):
        yield path, node
        return
    for key, inner in node.items():
        name = str(key)
        if name not in _OF_THE_MACHINE and "url" not in name:
            yield from _leaves(inner, f"{path}.{name}")


def _text(value: Any) -> str:
    return "not set" if value is None else shown(repr(value), 60)
