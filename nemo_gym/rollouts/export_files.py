"""Writing a data set: JSONL, or parquet with the extra `data`. A file appears when it is complete, or not at all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from nemo_gym.jsonl import to_line, write_aside
from nemo_gym.keys import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.row_files import MissingLibraryError

Write: TypeAlias = Callable[[dict[str, Any]], None]

_BATCH_ROWS = 512


@contextmanager
def open_data_set(path: Path) -> Iterator[Write]:
    """A function that writes one example; the ending of the name decides the format.

    Raises:
        MissingLibraryError: parquet is asked for and pyarrow is not installed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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
        import pyarrow
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
            schema = _schema(waiting[0], pyarrow)
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(to, schema)
            writer.write_table(pyarrow.Table.from_pylist([_row(example) for example in waiting], schema=schema))
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
    call = arrow.struct(
        [("id", text), ("type", text), ("function", arrow.struct([("name", text), ("arguments", text)]))]
    )
    message = arrow.struct(
        [("role", text), ("content", text), ("tool_calls", arrow.list_(call)), ("tool_call_id", text)]
    )
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
        **dict.fromkeys(("messages", "prompt", "completion", "chosen", "rejected"), arrow.list_(message)),
        "tools": text,
        **dict.fromkeys(("reward", "chosen_reward", "rejected_reward"), number),
        "provenance": of_pair if "chosen" in example else origin,
    }
    columns = [name for name in known if name in example or name == "tools"]
    return arrow.schema([(name, known[name]) for name in columns])


def _row(example: dict[str, Any]) -> dict[str, Any]:
    """An example in fixed columns: tools, and content that is more than text, as JSON text."""
    row = dict(example)
    if "tools" in row:
        row["tools"] = orjson.dumps(row["tools"]).decode()
    for name, value in example.items():
        if isinstance(value, list) and name != "tools":
            row[name] = [_message(message) for message in value]
    return row


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    columns = {**message, "content": content if isinstance(content, str) else orjson.dumps(content).decode()}
    if "tool_calls" in message:
        columns["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return columns


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A custom tool call in the columns of a function call; its type still tells."""
    if "custom" not in call:
        return call
    custom = call["custom"]
    return {**call, "function": {"name": custom["name"], "arguments": custom["input"]}}
