"""The token that lets a caller in: `auth_token`, one for the head and every server of a run.

`auto` stands for a token made when the servers are started. The servers get the token with their config, in
the file that only its owner can read; commands take it from theirs. Whoever asks the head server for the config
sees `****`, which therefore is no token.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from nemo_gym.errors import ConfigError
from nemo_gym.keys import AUTH_TOKEN_KEY_NAME, MASK

AUTO = "auto"
_SENDABLE = re.compile(r"[!-~]+")


def auth_token(config: Mapping[Any, Any]) -> str | None:
    """The token `config` gives; None when there is none, or it is masked or yet to be made."""
    try:
        value = config.get(AUTH_TOKEN_KEY_NAME)
    except OmegaConfBaseException:  # a reference that only the config of another process can follow
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value not in ("", AUTO, MASK) else None


def auth_token_problems(resolved: Mapping[str, Any]) -> list[ConfigError]:
    """Why the token cannot travel in a header, if so; the message does not show it."""
    value = resolved.get(AUTH_TOKEN_KEY_NAME)
    if value in (None, "", AUTO) or (isinstance(value, int) and not isinstance(value, bool)):
        return []
    if isinstance(value, str) and value != MASK and _SENDABLE.fullmatch(value):
        return []
    return [
        ConfigError(
            f"{AUTH_TOKEN_KEY_NAME} cannot be used: a token is text of ASCII letters, digits and punctuation without "
            f"spaces, and not {MASK!r}; +{AUTH_TOKEN_KEY_NAME}={AUTO} makes one"
        )
    ]


def make_auth_token(config: DictConfig) -> str | None:
    """Put a new token in the place of `auto` and return it; None when none was asked for."""
    if config.get(AUTH_TOKEN_KEY_NAME) != AUTO:
        return None
    config[AUTH_TOKEN_KEY_NAME] = made = secrets.token_urlsafe(32)
    return made


def bearer(token: str | None) -> dict[str, str]:
    """The headers of a call to a server of the run."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def refused_by_head(url: str, token: str | None) -> str:
    """What to tell a caller whose token the head server did not take."""
    given = "the config of this command has none" if token is None else "the one in this command's config is another"
    return (
        f"The head server at {url} answers only to callers with the token of its run (401), and {given}. Put "
        f"`{AUTH_TOKEN_KEY_NAME}: <token>` into env.yaml; `+{AUTH_TOKEN_KEY_NAME}={AUTO}` printed it when the servers "
        "were started"
    )


def beyond_loopback(hosts: Iterable[str]) -> list[str]:
    """Those of `hosts` that other machines may reach."""
    return sorted({host for host in hosts if not _is_loopback(host)})


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
