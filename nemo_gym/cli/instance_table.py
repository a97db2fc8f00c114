"""The table of running servers that `ng_run` prints. Imports rich, so it is imported only to print one."""

import os
from collections.abc import Mapping, Sequence

from nemo_gym.schemas.server_instance import ServerInstanceDisplayConfig
from nemo_gym.tables import new_table, print_table


def print_instances(
    head_url: str,
    run_id: str,
    instances: Sequence[ServerInstanceDisplayConfig],
    took_s: Mapping[tuple[str, int], float],
) -> None:
    """Print the head server and every instance to stdout."""
    table = new_table("server", "kind", "URL", "pid", "isolation", "ready after")
    table.add_row("head server", f"run {run_id}", head_url, str(os.getpid()), "this process", "")
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
