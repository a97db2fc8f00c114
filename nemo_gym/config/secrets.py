"""What in a configuration is secret, how it is shown (`****`), and the token that lets a caller in: `auth_token`.

A key is secret by its words: `hf_token`, `db_password`, `tavily_key` and `key` are. So are
`Authorization` headers, passwords inside URLs, and whatever a secret key refers to by `${...}`.
Where a config is shown, text under any key with `token` or `key` in its name is masked besides:
`token_file`, `primary_key`; numbers (`max_output_tokens`), switches (`return_token_id_information`)
and tokenizers are not.

There is one token for the head and every server of a run. `auto` stands for a token made when the servers are
started. The servers get the token with their config, in the file that only its owner can read; commands take it
from theirs. Whoever asks the head server for the config sees `****`, which therefore is no token.

Before a client shows the token, the server proves that it knows it: it answers a challenge, never used before, with
a code that only the token and the port it listens on can make. Who merely listens where a server should be learns
nothing from that, and cannot have another server of the run answer for it: that one's code is for another port.
"""

import hashlib
import hmac
import ipaddress
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nemo_gym.config.trees import children, path_parts, walk
from nemo_gym.errors import ConfigError
from nemo_gym.keys import AUTH_TOKEN_KEY_NAME, MASK, MISSING

if TYPE_CHECKING:  # who only reads or writes a run masks plain data, and does not pay for the library
    from omegaconf import DictConfig

AUTO = "auto"
PROOF_PATH = "/.well-known/nemo-gym-proof"
CHALLENGE_HEADER = "x-nemo-gym-challenge"
_PORTS = range(1, 65_536)
_SENDABLE = re.compile(r"[!-~]+")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_LAST_WORDS = frozenset(
    {"token", "password", "passwords", "passwd", "secret", "secrets", "credential", "credentials", "authorization"}
    | {"apikey", "apikeys"}
)
_HARMLESS_KINDS_OF_KEY = frozenset(
    {
        "answer",
        "cache",
        "delete",
        "foreign",
        "group",
        "index",
        "input",
        "output",
        "partition",
        "primary",
        "sort",
        "unknown",
    }
)
_MAY_NAME_A_SECRET = re.compile(r"token(?!iz)|key(?!word|board)", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<before>://[^\s/?#:@]*:)[^\s/?#]+(?=@)")
_URL_PARAMETER = re.compile(r"(?P<before>[?&](?P<name>[^\s=&#?]+)=)[^\s&#]+")
_HEADER = re.compile(r"""(?P<before>\bauthorization["']?\s*[:=]\s*["']?)[^\s"'][^\n"']*""", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(?P<name>[^\s,}]+)")
_WHOLE_REFERENCE = re.compile(r"\s*+\$\{\s*+(?P<dots>\.*+)(?P<path>[^\s.:${}](?:[^:${}]*[^\s:${}])?)\s*+\}\s*+")
_SHORTEST_SECRET = 6
Path = tuple[str, ...]


def auth_token(config: Mapping[Any, Any]) -> str | None:
    """The token `config` gives; None when there is none, or it is masked or yet to be made."""
    from omegaconf.errors import OmegaConfBaseException

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


def make_auth_token(config: "DictConfig") -> str | None:
    """Put a new token in the place of `auto` and return it; None when none was asked for."""
    if config.get(AUTH_TOKEN_KEY_NAME) != AUTO:
        return None
    config[AUTH_TOKEN_KEY_NAME] = made = secrets.token_urlsafe(32)
    return made


def bearer(token: str | None) -> dict[str, str]:
    """The headers of a call to a server of the run."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def new_challenge() -> str:
    """What a server is to answer with its proof."""
    return secrets.token_urlsafe(32)


def proof_of(token: str, challenge: str, port: int) -> str:
    """What only who knows the token can answer to `challenge` on behalf of a server at `port`."""
    return hmac.new(_proof_key(token), f"{challenge} {port}".encode(), hashlib.sha256).hexdigest()


@lru_cache(8)
def _proof_key(token: str) -> bytes:
    """Made slowly, so that proofs are of little use for guessing a token that somebody thought up."""
    return hashlib.pbkdf2_hmac("sha256", token.encode(), b"nemo_gym: a server's proof", 50_000)


def lack_of_proof(token: str, challenge: str, port: int, status: int, body: bytes) -> str | None:
    """Why the answer of who listens at `port` does not prove that it knows the token; None if it does."""
    try:
        answer = json.loads(body) if status == 200 else None
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("proof"), str):
        return "it does not answer as a server with a token does"
    if hmac.compare_digest(answer["proof"].encode(errors="replace"), proof_of(token, challenge, port).encode()):
        return None
    own_port = answer.get("port")
    if own_port != port and own_port in _PORTS:
        return f"it passes on what a server on port {own_port} says; a tunnel has to use that port on both of its ends"
    return "it knows another token"


def unproven(url: str, reason: str) -> str:
    """What to tell a caller that did not show its token to who listens at `url`."""
    return (
        f"What listens at {url} does not prove that it has the token of this run ({reason}), so it was not sent. "
        "Either the servers were started with another or without one, and the one in this command's config is another: "
        f"correct `{AUTH_TOKEN_KEY_NAME}` in env.yaml; or somebody else has taken the port"
    )


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
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_secret_key(key: object) -> bool:
    """Whether values under `key` must not be shown."""
    words = [word.lower() for word in _WORD.findall(str(key))]
    if not words:
        return False
    if words[-1] in ("key", "keys"):
        return len(words) == 1 or words[-2] not in _HARMLESS_KINDS_OF_KEY
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
    """A copy of plain data with every secret masked, and every text whose key may name one.

    Its shape, empty values and `${...}` references stay.
    """
    return _masked(tree, (), _referred_to_by_secret_keys(tree), secret=False)


def mask_message(text: str, tree: Any) -> str:
    """`text` with every secret of `tree` masked that it quotes; very short ones may be part of any word and stay."""
    referred = _referred_to_by_secret_keys(tree)
    for path, value, secret in _texts(tree):
        hidden = secret or any(path[:length] in referred for length in range(1, len(path) + 1))
        if hidden and len(value) >= _SHORTEST_SECRET and not _WHOLE_REFERENCE.fullmatch(value):
            text = text.replace(value, MASK)
    return text


def mask_secrets(config: "DictConfig") -> None:
    """Mask every secret of `config` in place."""
    from omegaconf import OmegaConf, flag_override

    tree = OmegaConf.to_container(config, resolve=False)
    with flag_override(config, ["struct", "readonly"], [False, False]):
        _copy_changes(config, tree, mask_tree(tree))


def holds_secret(config: "DictConfig") -> bool:
    """Whether masking would change anything."""
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(config, resolve=False)
    return bool(mask_tree(tree) != tree)


def _referred_to_by_secret_keys(tree: Any) -> set[Path]:
    """The paths of values that secret keys refer to, directly or through others."""
    texts = {path: (value, secret) for path, value, secret in _texts(tree)}
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


def _texts(tree: Any) -> Iterator[tuple[Path, str, bool]]:
    """Every text with its path, and whether a key on the way to it is secret."""
    secret_at: dict[tuple[Any, ...], bool] = {(): False}
    for place in walk(tree):
        secret = secret_at[place.keys[:-1]] or is_secret_key(place.keys[-1])
        if isinstance(place.value, str):
            yield tuple(map(str, place.keys)), place.value, secret
        else:
            secret_at[place.keys] = secret


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
        hidden = secret or is_secret_key(key) or here in referred or _holds_text_of_a_secret(here, value)
        masked[key] = _masked(value, here, referred, secret=hidden)
    return list(masked.values()) if isinstance(node, list) else masked


def _holds_text_of_a_secret(path: Path, value: Any) -> bool:
    name = next((part for part in reversed(path) if not part.isdecimal()), "")  # of a list in which it stands
    return isinstance(value, str) and _MAY_NAME_A_SECRET.search(name) is not None


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
