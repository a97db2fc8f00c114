import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym.errors import ConfigError
from nemo_gym.jsonl import iter_lines, parse
from nemo_gym.prompt import materialize_prompts
from nemo_gym.row_files import MissingLibraryError, RowFileError, iter_row_lines, read_rows, stem_of
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.rows import preprocess

TEXT = b'{"a": 1}\n\n  {"b": "\xc3\xa9"}  \n{"c": [1, 2]}'


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", zstandard.compress)])
def test_compressed_lines_keep_their_numbers_and_become_compact(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"rows.jsonl.{ending}"
    path.write_bytes(pack(b"\xef\xbb\xbf" + TEXT))
    lines = [(line.number, line.content.decode()) for line in iter_row_lines(path)]
    assert lines == [(1, '{"a":1}'), (3, '{"b":"é"}'), (4, '{"c":[1,2]}')]


@given(rows=st.lists(st.dictionaries(st.text(), st.text() | st.integers(-(2**53), 2**53)), max_size=20))
@settings(max_examples=25, deadline=None)
def test_compressing_changes_nothing(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rows")
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "a.jsonl").write_bytes(text)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(text))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(text))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert [row for _, row in read_rows(folder / name)] == rows


def test_plain_lines_are_read_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(TEXT)
    assert list(iter_row_lines(path)) == list(iter_lines(path))


def test_cells_are_text_unless_they_hold_objects(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        "\ufeffquestion, expected_answer,messages,options,_ng_task_index\n"
        '"a, ""b""\nc",007,"[{""role"": ""user"", ""content"": ""hi""}]","[1, 2]",12\n'
        "\n"
        "d,{not json,,{},\n"
    )
    rows = {line.number: row for line, row in read_rows(path)}
    assert rows == {
        2: {
            "question": 'a, "b"\nc',
            "expected_answer": "007",
            "messages": [{"role": "user", "content": "hi"}],
            "options": "[1, 2]",
            "_ng_task_index": 12,
        },
        5: {"question": "d", "expected_answer": "{not json", "options": {}},
    }


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"a\n{'x' * 300_000}\n")
    ((_, row),) = read_rows(tmp_path / "rows.csv")
    assert len(row["a"]) == 300_000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2,3\n", "line 2: 3 cells, but there are 2 columns"),
        ("a,b\n1\n", "line 2: 1 cells"),
        ("a,a\n1,2\n", r"name every column, each differently; it has \['a'\]"),
        ("", "it is empty"),
        ('a\n"open\n', "cannot be read as csv"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(RowFileError, match=complaint):
        list(iter_row_lines(tmp_path / "rows.csv"))


def test_parquet_rows_come_back_as_they_were_before_structs_made_them_alike(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "q": "a",
            "options": [{"A": "x"}, {"B": "y"}],
            "note": None,
            "day": date(2024, 2, 3),
            "price": Decimal("1.50"),
        },
        {"q": "b", "options": [], "note": "n", "day": None, "price": None},
    ]
    lines = list(read_rows(write_parquet(tmp_path / "rows.parquet", rows)))
    assert [line.number for line, _ in lines] == [1, 2]
    assert [row for _, row in lines] == [
        {"q": "a", "options": [{"A": "x"}, {"B": "y"}], "note": None, "day": "2024-02-03", "price": "1.50"},
        {"q": "b", "options": [], "note": "n", "day": None, "price": None},
    ]


def test_a_column_of_bytes_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [{"picture": b"\xff"}])
    with pytest.raises(RowFileError, match=r"row 1: .*leave out the column"):
        list(iter_row_lines(path))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_file_that_is_not_what_it_is_called_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"a": 1}\n' * 50)
    with pytest.raises(RowFileError, match=f"{name} cannot be read as"):
        list(iter_row_lines(tmp_path / name))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    with pytest.raises(RowFileError, match="end-of-stream"):
        list(iter_row_lines(tmp_path / "rows.jsonl.gz"))


@pytest.mark.parametrize(("name", "library"), [("rows.parquet", "pyarrow"), ("rows.jsonl.zst", "zstandard")])
def test_a_missing_library_is_named(tmp_path: Path, name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingLibraryError, match=f"needs {library}.*pip install -c .* -e .*data"):
        list(iter_row_lines(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "stem"), [("a.jsonl", "a"), ("a.jsonl.gz", "a"), ("a.b.jsonl.zst", "a.b"), ("a.csv", "a"), ("a", "a")]
)
def test_the_stem_is_the_name_without_its_ending(name: str, stem: str) -> None:
    assert stem_of(f"folder/{name}") == stem


def collected(path: Path, **options: Any) -> list[dict[str, Any]]:
    files = {"input_jsonl_fpath": str(path), "output_jsonl_fpath": "out.jsonl", "agent_name": "a"}
    return preprocess(RolloutCollectionConfig.model_validate(files | options))


def test_rows_of_any_file_can_be_rolled_out_and_equal_rows_are_one_task(tmp_path: Path) -> None:
    rows = [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "one"}]
    (tmp_path / "r.csv").write_text("prompt\none\ntwo\none\n")
    write_parquet(tmp_path / "r.parquet", rows)
    text = b'{"prompt": "one"}\n{"prompt": "two"}\n{"prompt":"one"}\n'  # spelled differently, the same row
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "r.jsonl.zst").write_bytes(zstandard.compress(text))
    for name in ("r.csv", "r.parquet", "r.jsonl.gz", "r.jsonl.zst"):
        found = collected(tmp_path / name, num_repeats=2)
        keys = [(row["prompt"], row["_ng_task_index"], row["_ng_rollout_index"]) for row in found]
        assert keys == [("one", 0, 0), ("one", 0, 1), ("two", 1, 0), ("two", 1, 1), ("one", 0, 2), ("one", 0, 3)]
        assert found[0]["responses_create_params"] == {"input": "one"}


def test_what_is_wrong_in_a_compressed_file_is_told_by_line(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "q"}\n\n{"torn": \n{"question": "q"}\n'))
    with pytest.raises(ConfigError) as caught:
        collected(tmp_path / "r.jsonl.gz")
    assert "line 3: not valid JSON" in str(caught.value)
    assert "rows [4] have no responses_create_params" in str(caught.value)


def test_templates_are_filled_from_any_file(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("question\n1+1\n")
    (tmp_path / "p.yaml").write_text("user: 'Q: {question}'\n")
    assert materialize_prompts(tmp_path / "r.csv", tmp_path / "p.yaml", tmp_path / "o.jsonl") == 1
    assert json.loads((tmp_path / "o.jsonl").read_text())["responses_create_params"]["input"][0]["content"] == "Q: 1+1"


ROWS = '{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.xlsx", b"PK\x03\x04rest", "is a spreadsheet; save it as CSV"),
        ("r.XLS", b"\xd0\xcf\x11\xe0", "is a spreadsheet; save it as CSV"),
        ("r.jsonl", b"PK\x03\x04rest", "is a zip archive"),
        ("r.jsonl", gzip.compress(ROWS.encode(), mtime=0), "is compressed by gzip; let its name end with .jsonl.gz"),
        ("r.jsonl", b"\x28\xb5\x2f\xfd", "is compressed by zstandard; let its name end with .jsonl.zst"),
        ("r.jsonl", b"PAR1", "is a Parquet file; let its name end with .parquet"),
        ("r.jsonl", ROWS.encode("utf-16"), "is UTF-16 text"),
        ("r.jsonl", ROWS.encode("utf-16-be"), "`iconv -f UTF-16BE -t UTF-8 "),
        ("r.csv", "a,b\n1,2\n".encode("utf-16"), "is UTF-16 text"),
        ("r.json", b'[{"a": 1}, {"a": 2}]', "is one JSON array, and rows are one JSON object per line"),
        ("r.jsonl", b'\xef\xbb\xbf\n[\n {"a": 1},\n {"a": 2}\n]\n', "is one JSON array"),
    ],
)
def test_a_file_that_is_something_else_is_refused_with_the_way_to_make_rows_of_it(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError) as refusal:
        list(iter_row_lines(tmp_path / name))

    assert str(refusal.value).startswith(str(tmp_path / name))
    assert said in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "encoding"), [(f"[{ROWS.strip().replace(chr(10), ',')}]", "utf-8"), (ROWS, "utf-16")]
)
def test_the_command_that_converts_a_file_does(content: str, encoding: str, tmp_path: Path) -> None:
    source = tmp_path / "my rows.jsonl"
    source.write_bytes(content.encode(encoding))
    with pytest.raises(ConfigError) as refusal:
        list(iter_row_lines(source))

    command = str(refusal.value).partition("`")[2].rpartition("`")[0]
    subprocess.run(["bash", "-c", command.replace("python", sys.executable, 1)], cwd=tmp_path, check=True)

    assert [parse(line.content) for line in iter_row_lines(tmp_path / "my rows_rows.jsonl")] == [{"a": 1}, {"a": 2}]


def test_a_line_that_is_a_list_of_other_things_is_a_mistake_of_that_line(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('[1, 2]\n{"a": 1}\n')

    assert len(list(iter_row_lines(tmp_path / "r.jsonl"))) == 2
