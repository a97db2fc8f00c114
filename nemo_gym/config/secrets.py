"""What in a configuration is secret, and how it is shown: `****`.

A key is secret by its words, not by a substring: `hf_token`, `db_password` and `policy_api_key`
are, `max_output_tokens`, `tokenizer` and `return_token_id_information` are not. So are
`Authorization` headers, passwords inside URLs, and whatever a secret key refers to by `${...}`.
"""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override

from nemo_gym.config.trees import children, path_parts
from nemo_gym.keys import MASK, MISSING

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_LAST_WORDS = frozenset(
    {"token", "password", "passwords", "passwd", "secret", "secrets", "credential", "credentials", "authorization"}
    | {"apikey", "apikeys"}
)
_SECRET_KINDS_OF_KEY = frozenset({"api", "access", "private", "secret"})
_URL_PASSWORD = re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.\-]*://[^\s/?#:@]*:)[^\s/?#]+(?=@)")
_URL_PARAMETER = re.compile(r"(?P<before>[?&](?P<name>[^\s=&#?]+)=)[^\s&#]+")
_HEADER = re.compile(r"""(?P<before>\bauthorization["']?\s*[:=]\s*["']?)[^\s"'][^\n"']*""", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(?P<name>[^\s,}]+)")
_WHOLE_REFERENCE = re.compile(r"\s*\$\{\s*(?P<dots>\.*)(?P<path>[^\s.:${}][^:${}]*?)\s*\}\s*")

_SHORTEST_SECRET = 6

Path = tuple[str, ...]


def is_secret_key(key: object) -> bool:
    """Whether values under `key` must not be shown."""
    words = [word.lower() for word in _WORD.findall(str(key))]
    if not words:
        return False
    if words[-1] in ("key", "keys"):
        return len(words) > 1 and words[-2] in _SECRET_KINDS_OF_KEY
    return words[-1] in _SECRET_LAST_WORDS


def mask_url_passwords(text: str) -> str:
    """`text` with the secrets of every URL in it masked: `scheme://user:password@host` and `?api_key=value`."""
    if "://" not in text:
        return text
    without_password = _URL_PASSWORD.sub(lambda match: match["before"] + MASK, text)
    return _URL_PARAMETER.sub(
        lambda match: match["before"] + MASK if is_secret_key(match["name"]) else match[0], without_password
    )


def mask_tree(tree: Any) -> Any:
    """A copy of plain data with every secret masked; its shape, empty values and `${...}` references stay."""
    return _masked(tree, (), _referred_to_by_secret_keys(tree), secret=False)


def mask_message(text: str, tree: Any) -> str:
    """`text` with every secret of `tree` masked that it quotes; very short ones may be part of any word and stay."""
    referred = _referred_to_by_secret_keys(tree)
    for path, value, secret in _texts(tree, (), secret=False):
        hidden = secret or any(path[:length] in referred for length in range(1, len(path) + 1))
        if hidden and len(value) >= _SHORTEST_SECRET and not _WHOLE_REFERENCE.fullmatch(value):
            text = text.replace(value, MASK)
    return text


def mask_secrets(config: DictConfig) -> None:
    """Mask every secret of `config` in place."""
    tree = OmegaConf.to_container(config, resolve=False)
    with flag_override(config, ["struct", "readonly"], [False, False]):
        _copy_changes(config, tree, mask_tree(tree))


def holds_secret(config: DictConfig) -> bool:
    """Whether masking would change anything."""
    tree = OmegaConf.to_container(config, resolve=False)
    return bool(mask_tree(tree) != tree)


def _referred_to_by_secret_keys(tree: Any) -> set[Path]:
    """The paths of values that secret keys refer to, directly or through others."""
    texts = {path: (value, secret) for path, value, secret in _texts(tree, (), secret=False)}
    waiting = [path for path, (_, secret) in texts.items() if secret]
    referred: set[Path] = set()
    while waiting:
        path = waiting.pop()
        target = _target(path, texts[path][0])
        if target is None or target in referred:
            continue
        referred.add(target)
        waiting += [target] if target in texts else [path for path in texts if path[: len(target)] == target]
    return referred


def _texts(node: Any, path: Path, *, secret: bool) -> Iterator[tuple[Path, str, bool]]:
    for key, value in children(node):
        here, hidden = (*path, str(key)), secret or is_secret_key(key)
        if isinstance(value, str):
            yield here, value, hidden
        else:
            yield from _texts(value, here, secret=hidden)


def _target(path: Path, text: str) -> Path | None:
    """Where the text at `path` refers to when it is nothing but a reference."""
    match = _WHOLE_REFERENCE.fullmatch(text)
    if match is None:
        return None
    above = path[: len(path) - len(match["dots"])] if match["dots"] else ()
    return (*above, *path_parts(match["path"]))


def _masked(node: Any, path: Path, referred: set[Path], *, secret: bool) -> Any:
    if not isinstance(node, dict | list):
        return _masked_value(node, secret=secret)
    masked = {}
    for key, value in children(node):
        here = (*path, str(key))
        masked[key] = _masked(value, here, referred, secret=secret or is_secret_key(key) or here in referred)
    return list(masked.values()) if isinstance(node, list) else masked


def _masked_value(value: Any, *, secret: bool) -> Any:
    if value is None or value in ("", MISSING):
        return value
    if secret:
        return value if isinstance(value, str) and _WHOLE_REFERENCE.fullmatch(value) else MASK
    if not isinstance(value, str):
        return value
    if any(is_secret_key(match["name"]) for match in _VARIABLE.finditer(value)):
        return MASK
    return mask_url_passwords(_HEADER.sub(lambda match: match["before"] + MASK, value))


def _copy_changes(live: Any, before: Any, after: Any) -> None:
    for key, value in children(before):
        if isinstance(value, dict | list):
            if value != after[key]:
                _copy_changes(live[key], value, after[key])
        elif value != after[key]:
            live[key] = after[key]
