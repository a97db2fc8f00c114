"""`ng_list_benchmarks`: which benchmarks there are."""

import json
from typing import TYPE_CHECKING

from nemo_gym.cli.command import command
from nemo_gym.schemas.data_config import ListBenchmarksConfig

if TYPE_CHECKING:
    from nemo_gym.benchmarks import BenchmarkConfig


@command(ListBenchmarksConfig, reads_config=False)
def main(config: ListBenchmarksConfig) -> None:
    """List the benchmarks of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    Examples:
        ng_list_benchmarks
        ng_list_benchmarks +query=math
        ng_list_benchmarks +json=true
    """
    from nemo_gym.benchmarks import list_benchmarks, search_benchmarks

    every = list_benchmarks()
    found = search_benchmarks(every, config.query)
    if config.json_format:
        fields = ("agent_name", "domain", "num_repeats", "description")
        rows = [
            {"name": name, **{field: getattr(benchmark, field) for field in fields}}
            for name, benchmark in found.items()
        ]
        print(json.dumps(rows, indent=2))
    elif found:
        _print_table(found)
    elif every:
        print(f"No benchmarks match {config.query!r}. There are: {', '.join(every)}")
    else:
        from nemo_gym.paths import component_search_roots

        print(f"No benchmarks found below {', '.join(f'{root}/benchmarks' for root in component_search_roots())}")


def _print_table(found: "dict[str, BenchmarkConfig]") -> None:
    from nemo_gym.tables import new_table, print_table

    print(f"Available benchmarks in NeMo Gym ({len(found)})")
    table = new_table("Benchmark name", "Domain", "Description", "Agent name", "Num repeats")
    for name, benchmark in found.items():
        table.add_row(
            name,
            benchmark.domain,
            benchmark.description,
            benchmark.agent_name,
            str(benchmark.num_repeats),
        )
    print_table(table)
