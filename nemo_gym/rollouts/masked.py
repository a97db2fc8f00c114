"""What may be shown of a run: its options and its command line, without their secrets."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.keys import MASK


def masked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `options` (plain data) with `****` for every secret."""
    from omegaconf import OmegaConf

    from nemo_gym.config.secrets import mask_secrets

    config = OmegaConf.create(dict(options))
    mask_secrets(config)
    shown: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    return shown


def masked_command(arguments: Sequence[str]) -> list[str]:
    """A command line with `****` for the values of secret options and for passwords in URLs."""
    from nemo_gym.config.secrets import is_secret_key, mask_url_passwords

    shown = []
    for argument in arguments:
        option, separator, _ = argument.partition("=")
        hide = bool(separator) and is_secret_key(option.rpartition(".")[2])
        shown.append(f"{option}={MASK}" if hide else mask_url_passwords(argument))
    return shown
