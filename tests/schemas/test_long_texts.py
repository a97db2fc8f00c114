"""JSON that is read around its long texts says what it says when all of it is parsed, or is refused just so."""

import random
from typing import Any

import orjson
import pytest

from nemo_gym.schemas.token_lists import long_texts_in, read_around_texts, texts_beside
from nemo_gym.schemas.wire import LONG_TEXT
from tests.perf.side_by_side import endpoint, payloads

LONG = "x" * (2 * LONG_TEXT)
REFUSED = {
    "a line break": b'{"output":[{"content":"%b\n"}]}' % LONG.encode(),
    "a null": b'{"output":[{"content":"\0%b"}]}' % LONG.encode(),
    "no UTF-8": b'{"output":[{"content":"%b\xff"}]}' % LONG.encode(),
    "half a pair": rb'{"output":[{"content":"%b\ud800"}]}' % LONG.encode(),
    "an unknown escape": rb'{"output":[{"content":"%b\q"}]}' % LONG.encode(),
    "something after a text": b'{"output":"a"%b"b"}' % LONG.encode(),
    "no end": b'{"output":[{"content":"%b' % LONG.encode(),
    "no end around": b'{"output":[{"content":"%b"}' % LONG.encode(),
}


def texts_of(value: Any) -> list[str]:
    """The long texts of a document, in order; no key is one."""
    if isinstance(value, str):
        return [value] if len(value) >= LONG_TEXT else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inner for text in texts_of(part)]


def anything(chance: random.Random) -> Any:
    """Values of every kind, some of which look like the end of a text, or its beginning."""
    size = chance.choice([0, 3, LONG_TEXT - 1, LONG_TEXT, LONG_TEXT + 1, 3 * LONG_TEXT])
    kinds = [",", ":", "a", "é", "\n", " ", "}", "x\\"]
    text = (chance.choice(kinds) + "b" * size + chance.choice(kinds))[:size]
    return chance.choice([text, {"k,": text}, [1.5] * (size // 3), [text, ","], None, 'q"' * chance.randrange(2)])


@pytest.mark.parametrize("seed", range(150))
def test_long_texts_are_found_where_they_are_or_not_at_all(seed: int) -> None:
    chance = random.Random(seed)
    document = {"x": [anything(chance) for _ in range(chance.randrange(1, 7))], "y": anything(chance)}
    body = orjson.dumps(document)

    spans = long_texts_in(body)
    if spans is not None:
        found = [orjson.loads(body[start:end]) for start, end in spans]
        assert [text for text in texts_of(document) if len(text) > LONG_TEXT] == [
            text for text in found if len(text) > LONG_TEXT
        ]
    beside = texts_beside(body)
    if beside is not None:
        assert orjson.loads(beside.written()[0]) == document
        assert beside.whole() is body


@pytest.mark.parametrize("size", [0, LONG_TEXT, 100_000])
def test_an_answer_is_read_as_it_is_said(size: int) -> None:
    text = endpoint.message(size)
    for body in (text, text.replace(b"x" * 9, "ünïcödé".encode()), text.replace(b"xxx", rb"\n\u00e9 ")):
        assert read_around_texts(body)[0] == orjson.loads(body)


def test_a_text_without_escapes_is_copied_and_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    loads = orjson.loads

    def noted(body: bytes) -> Any:
        parsed.append(len(body))
        return loads(body)

    monkeypatch.setattr(orjson, "loads", noted)
    answers = [endpoint.message(100_000), payloads.chat_with_tokens({"content": LONG}, 1)]
    for answer in answers:
        content, beside = read_around_texts(answer)
        assert beside is not None
        assert content == loads(answer)
    assert max(parsed) < 3_000


@pytest.mark.parametrize(
    "document",
    [{LONG: 1}, [LONG], {"output": [LONG]}, {"output": [{"content": [[LONG]]}]}, {"stop": [LONG]}, LONG, {"a": LONG}],
)
def test_texts_in_other_places_are_read_with_all_else(document: Any) -> None:
    content, beside = read_around_texts(orjson.dumps(document))

    assert content == document
    assert beside is None


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_json_is_refused_in_the_same_words(kind: str) -> None:
    body = REFUSED[kind]
    with pytest.raises(orjson.JSONDecodeError) as whole:
        orjson.loads(body)
    with pytest.raises(orjson.JSONDecodeError) as around:
        read_around_texts(body)

    assert str(around.value) == str(whole.value)
