"""Store responses so that two recordings of the same behaviour are equal, and name the differences of others."""

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LONGEST_BODY = 20_000
"""Characters of a body that are stored; of a longer one the start and a hash of the whole."""
UNSTABLE_HEADERS = {"date", "content-length"}
"""Headers that change from run to run: lengths follow bodies that hold times and ids."""
UNSTABLE_FIELDS = re.compile(
    r"^(created|created_at|completed_at|.*_seconds|.*_time|.*_time_taken|.*_s|duration|elapsed|cpu_.*)$"
)
_REPLACEMENTS = [
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "<uuid>"),
    (re.compile(r"\b([a-z]+[_-])?[0-9a-f]{24,}\b"), r"\1<id>"),
    (re.compile(r"\b(127\.0\.0\.1|localhost|0\.0\.0\.0):\d+"), r"\1:<port>"),
    (re.compile(r"/tmp/[\w./-]+"), "<temporary path>"),
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"\b\d+(\.\d+)? ?(ms|s|seconds)\b"), "<time>"),
    (re.compile(r'("created(?:_at)?":) ?\d+(\.\d+)?'), r"\1<time>"),
]
_COOKIE = re.compile(r"^([^=]+)=[^;]*")


@dataclass(frozen=True)
class Exchange:
    """One request of the net and the response to it."""

    case: str
    status: int
    headers: Mapping[str, Any]
    body: str


class Normalizer:
    """Replaces what differs between two runs of the same code: ids, times, ports, paths."""

    def __init__(self, roots: Mapping[str, str]) -> None:
        self._roots = roots

    def text(self, text: str) -> str:
        """Return the text without ids, ports, temporary paths and times."""
        for root, name in self._roots.items():
            text = text.replace(root, name)
        for pattern, replacement in _REPLACEMENTS:
            text = pattern.sub(replacement, text)
        return text

    def body(self, body: bytes) -> str:
        """Return a body as text; of JSON the fields that hold times are blanked."""
        text = body.decode("utf-8", "surrogateescape")
        try:
            value = json.loads(text)
        except ValueError:
            normal = self.text(text)
        else:
            normal = json.dumps(self._value(value), indent=1)
        if len(normal) <= LONGEST_BODY:
            return normal
        digest = hashlib.sha256(normal.encode("utf-8", "surrogateescape")).hexdigest()
        return f"{normal[:1000]}… {len(normal)} characters, sha256 {digest}"

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                self.text(key): "<number>" if self._is_unstable(key, each) else self._value(each)
                for key, each in value.items()
            }
        if isinstance(value, list):
            return [self._value(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    @staticmethod
    def _is_unstable(key: str, value: Any) -> bool:
        return isinstance(value, int | float) and UNSTABLE_FIELDS.match(key) is not None

    def headers(self, headers: Mapping[str, str], set_cookies: list[str]) -> dict[str, Any]:
        """Return the headers of a response, sorted, without values that change from run to run."""
        kept = {
            name.lower(): self.text(value)
            for name, value in headers.items()
            if name.lower() not in {*UNSTABLE_HEADERS, "set-cookie"}
        }
        cookies = sorted(_COOKIE.sub(r"\1=<value>", cookie) for cookie in set_cookies)
        return dict(sorted({**kept, **({"set-cookie": cookies} if cookies else {})}.items()))


def write(path: Path, exchanges: list[Exchange]) -> None:
    """Write a recording, one exchange per line."""
    with path.open("w") as file:
        for exchange in exchanges:
            file.write(json.dumps(asdict(exchange)) + "\n")


def read(path: Path) -> dict[str, Exchange]:
    """Return the exchanges of a recording by their case."""
    exchanges = (Exchange(**json.loads(line)) for line in path.read_text().splitlines())
    return {exchange.case: exchange for exchange in exchanges}


def differences(before: Mapping[str, Exchange], after: Mapping[str, Exchange]) -> Iterator[str]:
    """Yield a paragraph for every case that one recording lacks or that has another response."""
    for case in sorted({*before, *after}):
        if case not in after or case not in before:
            yield f"{case}\n    only in the {'first' if case in before else 'second'} recording"
        elif lines := _difference(before[case], after[case]):
            yield "\n    ".join([case, *lines])


def _difference(before: Exchange, after: Exchange) -> list[str]:
    lines = []
    if before.status != after.status:
        lines.append(f"status {before.status} -> {after.status}")
    for name in sorted({*before.headers, *after.headers}):
        if before.headers.get(name) != after.headers.get(name):
            lines.append(f"header {name}: {before.headers.get(name)!r} -> {after.headers.get(name)!r}")
    if before.body != after.body:
        changed = difflib.unified_diff(before.body.splitlines(), after.body.splitlines(), lineterm="", n=1)
        lines += [f"body {line[:300]}" for line in [*changed][2:40]]
    return lines
