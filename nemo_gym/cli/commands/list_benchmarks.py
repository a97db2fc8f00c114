"""`ng_list_benchmarks`: which benchmarks there are."""

import json
from typing import TYPE_CHECKING, Any

from nemo_gym.cli.command import command
from nemo_gym.paths import component_search_roots
from nemo_gym.schemas.data_config import ListBenchmarksConfig
from nemo_gym.terminal import harmless_json, new_table, print_table

if TYPE_CHECKING:
    from nemo_gym.benchmarks import BenchmarkConfig


@command(ListBenchmarksConfig, reads_config=False)
def main(config: ListBenchmarksConfig) -> None:
    """List the benchmarks of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    Each is used by name, +benchmark=gsm8k. Rows that are not there yet are made by ng_prepare_benchmark, and by
    ng_e2e_collect_rollouts when it needs them.

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
            {"name": name, **{field: getattr(benchmark, field) for field in fields}, **_tasks_and_needs(benchmark)}
            for name, benchmark in found.items()
        ]
        print(harmless_json(json.dumps([{**row, "option": f"+benchmark={row['name']}"} for row in rows], indent=2)))
    elif found:
        _print_table(found)
    elif every:
        print(f"No benchmarks match {config.query!r}. There are: {', '.join(every)}")
    else:
        print(f"No benchmarks found below {', '.join(f'{root}/benchmarks' for root in component_search_roots())}")


def _tasks_and_needs(benchmark: "BenchmarkConfig") -> dict[str, Any]:
    from nemo_gym.cli.gallery import needs_of, read_tree, tasks_of

    tree = read_tree(str(benchmark.path))
    tasks = {kind: rows for kind, rows in tasks_of(tree).items() if kind == "benchmark"}
    return {"tasks": tasks, "needs": needs_of(tree), "config_path": str(benchmark.path)}


def _print_table(found: "dict[str, BenchmarkConfig]") -> None:
    from nemo_gym.cli.gallery import tasks_in_words

    print(f"Available benchmarks in NeMo Gym ({len(found)}); use one with +benchmark=<name>")
    table = new_table("Benchmark name", "Domain", "Description", "Agent name", "Num repeats", "Tasks", "Needs")
    for name, benchmark in found.items():
        more = _tasks_and_needs(benchmark)
        table.add_row(
            name,
            benchmark.domain,
            benchmark.description,
            benchmark.agent_name,
            str(benchmark.num_repeats),
            tasks_in_words(more["tasks"]),
            ", ".join(more["needs"]),
        )
    print_table(table, described_by="Description")
