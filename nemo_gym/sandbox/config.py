"""How a configuration names a provider: by a top-level block that holds it, conventionally `sandbox`, or inline.

sandbox:
  docker: {create: {network: none}}
  default_metadata: {team: mine}
"""

from collections.abc import Mapping
from typing import Any

SANDBOX_BLOCK_DEFAULT_METADATA_KEY = "default_metadata"
SANDBOX_BLOCK_RESERVED_KEYS = frozenset({SANDBOX_BLOCK_DEFAULT_METADATA_KEY})


def resolve_provider_config(
    sandbox_provider: str | Mapping[str, Any], named_configs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The provider and its settings, `{name: settings}`, as `create_provider` takes them.

    Args:
        sandbox_provider: The name of a block in `named_configs`, or such a block itself.
        named_configs: The merged configuration.

    Raises:
        ValueError: there is no such block, or it does not name exactly one provider.
    """
    block = _block(sandbox_provider, named_configs)
    named = {str(key): value for key, value in block.items() if key not in SANDBOX_BLOCK_RESERVED_KEYS}
    if len(named) != 1:
        what = ", ".join(sorted(named)) or "none"
        raise ValueError(f"{_where(sandbox_provider)} must name exactly one provider, and names {what}")
    return named


def resolve_provider_metadata(
    sandbox_provider: str | Mapping[str, Any], named_configs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The metadata that every sandbox of this block is to have, under what an agent adds.

    Raises:
        ValueError: there is no such block, or its metadata is no mapping.
    """
    metadata = _block(sandbox_provider, named_configs).get(SANDBOX_BLOCK_DEFAULT_METADATA_KEY)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ValueError(f"{SANDBOX_BLOCK_DEFAULT_METADATA_KEY} of {_where(sandbox_provider)} must be a mapping")
    return dict(metadata or {})


def _block(sandbox_provider: str | Mapping[str, Any], named_configs: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(sandbox_provider, str):
        if not isinstance(sandbox_provider, Mapping):
            raise ValueError(f"a sandbox provider is the name of a block or a mapping, not {sandbox_provider!r}")
        return _plain(sandbox_provider)
    configs = named_configs or {}
    block = configs.get(sandbox_provider) if sandbox_provider in configs else None
    if not isinstance(block, Mapping):
        raise ValueError(
            f"the configuration has no block {sandbox_provider!r} that says which sandbox provider to use "
            f"(such blocks: {', '.join(_candidates(configs)) or 'none'}); add one of the files "
            "nemo_gym/sandbox/providers/<provider>/configs/<provider>.yaml to config_paths, which define `sandbox`"
        )
    return _plain(block)


def _candidates(configs: Mapping[str, Any]) -> list[str]:
    """Blocks that look as if they held a provider."""
    from nemo_gym.sandbox.providers.registry import ELSEWHERE, list_providers

    known = {*list_providers(), *ELSEWHERE}
    names = []
    for name in configs:
        try:
            value = configs[name]
        except Exception:  # noqa: BLE001 - a value that nobody has set yet, which is not what is asked about
            continue
        if isinstance(value, Mapping) and len(set(value) - SANDBOX_BLOCK_RESERVED_KEYS) == 1 and known & set(value):
            names.append(str(name))
    return sorted(names)


def _plain(block: Mapping[str, Any]) -> dict[str, Any]:
    """Without OmegaConf's containers, which are mappings but no dictionaries."""
    return {key: _plain_value(value) for key, value in block.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    is_list = not isinstance(value, str | bytes) and hasattr(value, "__iter__")
    return [_plain_value(each) for each in value] if is_list else value


def _where(sandbox_provider: str | Mapping[str, Any]) -> str:
    return f"the block `{sandbox_provider}`" if isinstance(sandbox_provider, str) else "the sandbox provider"
