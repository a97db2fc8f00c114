"""The table of running servers that `ng_run` prints. Imports rich, so it is imported only to print one."""

import os
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from nemo_gym.schemas.server_instance import ServerInstanceDisplayConfig

_WIDTH_WITHOUT_TERMINAL = 200


def print_instances(
    head_url: str, instances: Sequence[ServerInstanceDisplayConfig], took_s: Mapping[tuple[str, int], float]
) -> None:
    """Print the head server and every instance to stdout."""
    table = new_table("server", "kind", "URL", "pid", "isolation", "ready after")
    table.add_row("head server", "head", head_url, str(os.getpid()), "this process", "")
    for instance in instances:
        name, replica = str(instance.process_name), instance.replica or 0
        seconds = took_s.get((name, replica))
        table.add_row(
            f"{name} (replica {replica})" if replica else name,
            f"{instance.server_type}/{instance.name}",
            instance.url,
            str(instance.pid),
            instance.isolation,
            "" if seconds is None else f"{seconds:.2f} s",
        )
    print_table(table)


def new_table(*columns: str) -> Table:
    """A plain table that a terminal, a file and `grep` can all live with."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=not sys.stdout.isatty(), overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print to stdout, in full width when it is no terminal."""
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    Console(file=sys.stdout, width=width, highlight=False, soft_wrap=not sys.stdout.isatty()).print(table)
