"""Files of rows, whatever is in them: each row is read at its line, or one error says what is wrong where."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.cli.command import command_named
from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import iter_lines, parse, to_line
from nemo_gym.row_files import read_rows
from nemo_gym.runs.read import records
from tests.fuzz.bad_values import TEXT, json_trees
from tests.fuzz.conftest import Run

collect_rollouts = command_named("collect_rollouts")


OBJECTS = st.dictionaries(TEXT, json_trees(), max_size=4)
BLANK = st.sampled_from([b"", b" ", b"\t", b"\r", b"  \r"])
GARBAGE = st.one_of(
    st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b"?")),
    st.sampled_from(
        [
            b"{", b"[]", b"nul", b"NaN", b'{"a": NaN}', b'"\\ud800"', b"\xff\xfe{}", b'{"a": 1}{"b": 2}',
            b'{"a": 1e999}', b"\x00", b"[" * 5_000, b'{"a":' * 5_000, b"[" * 5_000 + b'"\\u0041',
            b'{"\\u0041": ' + b"9" * 5_000 + b"}",
        ]
    ),
)  # fmt: skip
PARAMS = st.sampled_from(["input", "model", "tools", "metadata", "role", "content"])
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "responses_create_params": json_trees(PARAMS),
        "agent_ref": st.one_of(json_trees(st.sampled_from(["name", "type"])), st.just({"name": "a"})),
        "_ng_task_index": json_trees(),
        "_ng_rollout_index": json_trees(),
        "skills_ref": json_trees(),
    },
)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


@given(rows=st.lists(st.one_of(OBJECTS, st.none()), max_size=8), mark=st.booleans(), last_newline=st.booleans())
def test_no_row_is_lost_and_each_has_its_line(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any] | None], mark: bool, last_newline: bool
) -> None:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    lines = [b"" if row is None else encoded(row) for row in rows]
    content = b"\n".join(lines) + (b"\n" if last_newline else b"")
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + content)

    found = [(line.number, row) for _, line, row in records(path, "raise", may_lack_key=True)]

    assert found == [(number, json.loads(encoded(row))) for number, row in enumerate(rows, 1) if row is not None]


@given(value=json_trees())
def test_what_is_written_is_one_line_and_is_read_again(value: Any) -> None:
    line = to_line(value)

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert parse(line.strip()) == value


def rows_or_refusal(path: Path) -> list[Any] | None:
    """The rows of a file; None when it is refused by an error that names it."""
    try:
        return list(read_rows(path))
    except ConfigError as error:
        message = str(error)
    assert str(path) in message
    return None


@given(lines=st.lists(st.one_of(GARBAGE, OBJECTS.map(encoded), BLANK), min_size=1, max_size=6))
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.csv"])
def test_garbage_is_one_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, name: str, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("rows") / name
    content = b"\n".join(lines)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)

    rows = rows_or_refusal(path)

    if rows is not None and not name.endswith(".csv"):
        assert len(rows) == sum(1 for line in lines if line.strip().removeprefix(b"\xef\xbb\xbf"))


@given(content=st.binary(max_size=300))
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.csv", "in.parquet"])
def test_a_file_that_is_not_what_its_name_says_is_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("rows") / name
    path.write_bytes(content)

    rows_or_refusal(path)


@given(content=st.binary(max_size=200))
def test_every_byte_belongs_to_a_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    path.write_bytes(content)

    lines = list(iter_lines(path))

    kept = b"".join(line.content for line in lines)
    whitespace = b" \t\n\r\x0b\x0c"
    assert bytes(b for b in kept if b not in whitespace) == bytes(
        b for b in content.removeprefix(b"\xef\xbb\xbf") if b not in whitespace
    )
    assert [content[line.start : line.end].strip().endswith(line.content) for line in lines] == [True] * len(lines)


@given(rows=st.lists(ROWS, min_size=1, max_size=4))
def test_rows_of_any_shape_are_refused_in_words_and_nothing_is_written(run: Run, rows: list[dict[str, Any]]) -> None:
    Path("in.jsonl").write_bytes(b"".join(encoded(row) + b"\n" for row in rows))

    done = run(
        collect_rollouts,
        "+head_server.port=1",
        "+input_jsonl_fpath=in.jsonl",
        "+output_jsonl_fpath=out/rollouts.jsonl",
    )

    assert done.exit_code == 2, done.stderr
    assert done.stderr.rpartition("Error: ")[2].strip()
    assert not Path("out").exists()
