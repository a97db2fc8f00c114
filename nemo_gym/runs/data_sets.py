"""Writing a data set: an example per line, or per row of a parquet file; complete, or not at all.

Chat templates look at what a message has: a key that is there and null is not the same to them as one that is absent.
So in parquet messages and tools have Arrow's type for JSON, which `datasets` reads as the very objects of the JSONL.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from nemo_gym.jsonl import to_line
from nemo_gym.keys import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.paths import make_folder, write_aside
from nemo_gym.row_files import MissingLibraryError

Write: TypeAlias = Callable[[dict[str, Any]], None]
_BATCH_ROWS = 512


@contextmanager
def open_data_set(path: Path) -> Iterator[Write]:
    """A function that writes one example; the ending of the name decides the format.

    Raises:
        MissingLibraryError: parquet is asked for and pyarrow is not installed.
    """
    make_folder(path.parent)
    if path.suffix == ".parquet":
        with _parquet(path) as write:
            yield write
    else:
        with write_aside(path) as file:

            def write_line(example: dict[str, Any]) -> None:
                file.write(to_line(example))

            yield write_line


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingLibraryError(
            f"writing {path} needs pyarrow, which is not installed: install the extra `data`, or write .jsonl"
        ) from error
    waiting: list[dict[str, Any]] = []
    writer: Any = None

    def flush(to: Any) -> None:
        nonlocal writer
        if waiting:
            rows = [_row(example) for example in waiting]
            table = _as_json(pyarrow.Table.from_pylist(rows, schema=_schema(waiting[0], pyarrow)), pyarrow)
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(to, table.schema)
            writer.write_table(table)
            waiting.clear()

    with write_aside(path) as file:

        def write(example: dict[str, Any]) -> None:
            waiting.append(example)
            if len(waiting) >= _BATCH_ROWS:
                flush(file)

        yield write
        flush(file)
        if writer is None:
            pyarrow.parquet.write_table(pyarrow.table({}), file)
        else:
            writer.close()


def _schema(example: dict[str, Any], arrow: Any) -> Any:
    """The same columns for every example of a format, whatever the first one happens to have."""
    text, number, count = arrow.string(), arrow.float64(), arrow.int64()
    origin = arrow.struct(
        [
            ("file", text),
            ("line", count),
            (TASK_INDEX_KEY_NAME, count),
            (ROLLOUT_INDEX_KEY_NAME, count),
            ("agent", text),
        ]
    )
    of_pair = arrow.struct([("chosen", origin), ("rejected", origin)])
    known = {
        **dict.fromkeys(("messages", "prompt", "completion", "chosen", "rejected"), arrow.list_(text)),
        "tools": text,
        **dict.fromkeys(("reward", "chosen_reward", "rejected_reward"), number),
        "provenance": of_pair if "chosen" in example else origin,
    }
    columns = [name for name in known if name in example or name == "tools"]
    return arrow.schema([(name, known[name]) for name in columns])


def _as_json(table: Any, arrow: Any) -> Any:
    """The table with its columns of JSON text marked as JSON, alone or in lists."""
    kind = arrow.json_()
    for place, column in enumerate(table.schema):
        values = table[column.name].combine_chunks()
        if column.name == "tools":
            marked = arrow.ExtensionArray.from_storage(kind, values)
        elif arrow.types.is_list(column.type):
            marked = arrow.ListArray.from_arrays(values.offsets, arrow.ExtensionArray.from_storage(kind, values.values))
        else:
            continue
        table = table.set_column(place, column.name, marked)
    return table


def _row(example: dict[str, Any]) -> dict[str, Any]:
    """An example in fixed columns."""
    row = dict(example)
    for name, value in example.items():
        if name == "tools":
            row[name] = orjson.dumps(value).decode()
        elif isinstance(value, list):
            row[name] = [orjson.dumps(message).decode() for message in value]
    return row
