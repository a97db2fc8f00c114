"""What in a configuration is secret, and how it is shown: `****`.

A key is secret by its words, not by a substring: `hf_token`, `db_password` and `policy_api_key`
are, `max_output_tokens`, `tokenizer` and `return_token_id_information` are not. So are
`Authorization` headers, passwords inside URLs, and whatever a secret key refers to by `${...}`.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from nemo_gym.keys import MASK, MISSING

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_LAST_WORDS = {"token", "password", "passwd", "secret", "credential", "credentials", "apikey"}
_SECRET_KEY_KINDS = {"api", "access", "private", "secret"}
_URL_PASSWORD = re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.\-]*://[^\s/?#:@]*:)(?P<password>[^\s/?#@]+)(?=@)")
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_][\w.\-]*)\s*\}")


def is_secret_key(key: object) -> bool:
    """Whether values under `key` must not be shown."""
    words = [word.lower() for word in _WORD.findall(str(key))]
    if not words:
        return False
    if words[-1] in _SECRET_LAST_WORDS or words[-1] == "authorization":
        return True
    return len(words) > 1 and words[-1] == "key" and words[-2] in _SECRET_KEY_KINDS


def mask_url_passwords(text: str) -> str:
    """`text` with the password of every `scheme://user:password@host` masked."""
    return _URL_PASSWORD.sub(lambda match: match["before"] + MASK, text) if "://" in text else text


def mask_secrets(config: DictConfig) -> None:
    """Mask every secret of `config` in place; its shape, empty values and `${...}` references stay."""
    referred = set(_paths_secret_keys_refer_to(OmegaConf.to_container(config, resolve=False), secret=False))
    _mask_node(config, "", referred, secret=False)


def holds_secret(config: DictConfig) -> bool:
    """Whether masking would change anything."""
    masked = copy.deepcopy(config)
    mask_secrets(masked)
    return bool(OmegaConf.to_container(masked, resolve=False) != OmegaConf.to_container(config, resolve=False))


def _paths_secret_keys_refer_to(node: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _paths_secret_keys_refer_to(value, secret=secret or is_secret_key(key))
    elif isinstance(node, list):
        for value in node:
            yield from _paths_secret_keys_refer_to(value, secret=secret)
    elif secret and isinstance(node, str):
        yield from _REFERENCE.findall(node)


def _mask_node(node: DictConfig | ListConfig, path: str, referred: set[str], *, secret: bool) -> None:
    keys: list[Any] = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    for key in keys:
        child = node._get_node(key)
        here = f"{path}.{key}" if path else str(key)
        hidden = secret or is_secret_key(key) or here in referred
        if isinstance(child, DictConfig | ListConfig) and not (child._is_none() or child._is_missing()):
            if child._is_interpolation():
                continue
            _mask_node(child, here, referred, secret=hidden)
        else:
            _mask_leaf(node, key, child, hidden=hidden)


def _mask_leaf(node: Any, key: Any, child: Any, *, hidden: bool) -> None:
    value = child._value()
    if value is None or value in ("", MISSING):
        return
    if hidden and not (isinstance(value, str) and _REFERENCE.fullmatch(value.strip())):
        node[key] = MASK
    elif isinstance(value, str) and (masked := mask_url_passwords(value)) != value:
        node[key] = masked
