"""What counts as the same response, and how differences are shown."""

from pathlib import Path

import pytest

from tests.net import recording
from tests.net.recording import Exchange, Normalizer


@pytest.fixture
def normalizer() -> Normalizer:
    return Normalizer({"/home/me/project": "<root>"})


def test_ids_ports_times_and_paths_do_not_make_a_difference(normalizer: Normalizer) -> None:
    first = b'{"id": "resp_0123456789abcdef0123456789abcdef", "created_at": 1.5, "url": "http://127.0.0.1:8001/x"}'
    second = b'{"id": "resp_ffff456789abcdef0123456789abcdef", "created_at": 2.5, "url": "http://127.0.0.1:9002/x"}'
    assert normalizer.body(first) == normalizer.body(second)
    assert normalizer.body(b"in /home/me/project/app.py, /tmp/abc/x") == "in <root>/app.py, <temporary path>"
    shown = normalizer.headers({"Date": "now", "Content-Type": "text/plain"}, ["a=1; path=/"])
    assert shown == {"content-type": "text/plain", "set-cookie": ["a=<value>; path=/"]}


def test_the_order_of_fields_and_a_long_body_make_a_difference(normalizer: Normalizer) -> None:
    assert normalizer.body(b'{"a": 1, "b": 2}') != normalizer.body(b'{"b": 2, "a": 1}')
    assert normalizer.body(b"x" * 50_000) != normalizer.body(b"x" * 49_999 + b"y")
    assert len(normalizer.body(b"x" * 50_000)) < 1500


def test_every_difference_is_named(tmp_path: Path) -> None:
    same = Exchange("same", 200, {}, "{}")
    recording.write(
        tmp_path / "before", [same, Exchange("changed", 200, {"a": "1"}, "x"), Exchange("gone", 200, {}, "")]
    )
    recording.write(tmp_path / "after", [same, Exchange("changed", 404, {"a": "2"}, "y")])

    found = list(recording.differences(recording.read(tmp_path / "before"), recording.read(tmp_path / "after")))

    assert found == [
        "changed\n    status 200 -> 404\n    header a: '1' -> '2'\n    body @@ -1 +1 @@\n    body -x\n    body +y",
        "gone\n    only in the first recording",
    ]
