"""What `ng_aggregate_rollouts` prints at the end: a table per agent, what is to be known, and where the files are."""

from dataclasses import replace

from nemo_gym.cli.results import print_metrics
from nemo_gym.rollouts.aggregate import AgentMetrics
from nemo_gym.rollouts.aggregation_summary import AggregationSummary
from nemo_gym.terminal import print_line

_UNKNOWN = "?"


def print_aggregation(summary: AggregationSummary) -> None:
    """Print the end of an aggregation to stdout."""
    for of_agent in summary.metrics:
        print_metrics(_with_unknowns(of_agent))
    print_line()
    print_line(f"Records: {summary.records} in {len(summary.files.shards)} shards")
    for remark in summary.remarks():
        print_line(f"  {remark}")
    if summary.expectations is not None and not summary.expectations.is_known:
        print_line("  how many there should be is not known: shards, or their manifests and inputs, are missing")
    if summary.metrics:
        print_line(f"Computed: {'here, without servers' if summary.is_offline else 'by the running servers'}")
    print_line(f"Merged rollouts: {summary.paths.rollouts if summary.is_merged else 'not merged'}")
    print_line(f"Aggregate metrics: {summary.metrics_path}")


def _with_unknowns(of_agent: AgentMetrics) -> AgentMetrics:
    """The same with a question mark for what is not known."""
    coverage = of_agent.coverage or {}
    if not coverage or coverage["expected"]["rollouts"] is not None:
        return of_agent
    missing = {"rollouts": _UNKNOWN if coverage["failed"]["rollouts"] else 0}
    return replace(of_agent, coverage={**coverage, "expected": {"rollouts": _UNKNOWN}, "missing": missing})
