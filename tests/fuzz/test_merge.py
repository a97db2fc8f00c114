"""Shards of any content: what is merged holds every record once, or nothing is written and one message says why."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.cli.command import command_named
from nemo_gym.runs.record import RolloutKey, key_or_none
from tests.fuzz.bad_values import TEXT, json_trees
from tests.fuzz.conftest import Run

aggregate_rollouts = command_named("aggregate_rollouts")


INDICES = st.one_of(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), json_trees())
AGENTS = st.one_of(st.sampled_from([{"name": "alpha"}, {"name": "beta", "type": "responses_api_agents"}]), json_trees())
USAGE = st.sampled_from(["usage", "output", "input_tokens", "output_tokens", "total_tokens"])
REST = st.fixed_dictionaries(
    {},
    optional={
        "reward": st.one_of(st.floats(0, 1), json_trees()),
        "response": json_trees(USAGE),
        "_ng_failure_class": json_trees(),
        "score": json_trees(),
        "x": TEXT,
    },
)


def record(task: Any, rollout: Any, agent: Any, rest: dict[str, Any]) -> str:
    return json.dumps({"_ng_task_index": task, "_ng_rollout_index": rollout, "agent_ref": agent, **rest})


GOOD = st.builds(
    record,
    st.integers(0, 5),
    st.integers(0, 2),
    st.just({"name": "alpha"}),
    st.fixed_dictionaries({"reward": st.floats(0, 1)}),
)
ODD = st.builds(record, INDICES, INDICES, AGENTS, REST)
LINES = st.one_of(GOOD, GOOD, GOOD, ODD, st.sampled_from(["", "{", "[]", "null", '{"a": 1', "{}"]))
SHARDS = st.lists(st.lists(LINES, max_size=5), min_size=1, max_size=3)


def split(lines: list[str]) -> tuple[list[RolloutKey], Counter[str]]:
    """The keys of the lines that have one, and the other lines."""
    keys = {line: key_or_none(json.loads(line)) for line in lines}
    return [key for line in lines if (key := keys[line]) is not None], Counter(
        line for line in lines if keys[line] is None
    )


@given(shards=SHARDS, on_duplicate=st.sampled_from(["error", "first", "last"]))
def test_no_record_is_lost_and_none_is_there_twice(run: Run, shards: list[list[str]], on_duplicate: str) -> None:
    shutil.rmtree("shards", ignore_errors=True)
    shutil.rmtree("out", ignore_errors=True)
    Path("shards").mkdir()
    for number, lines in enumerate(shards):
        Path(f"shards/{number}.jsonl").write_text("".join(line + "\n" for line in lines))

    done = run(
        aggregate_rollouts,
        "+input_glob=shards/*.jsonl",
        "+output_jsonl_fpath=out/all.jsonl",
        f"+on_duplicate={on_duplicate}",
        "+offline=true",
    )

    merged = Path("out/all.jsonl")
    assert done.exit_code in (0, 1, 2), done
    assert "Traceback" not in done.stderr, done.stderr
    if done.exit_code == 2:
        assert done.stderr.rpartition("Error: ")[2].strip()
    for number, lines in enumerate(shards):
        assert Path(f"shards/{number}.jsonl").read_text() == "".join(line + "\n" for line in lines)
    if not merged.exists():
        assert done.exit_code != 0, done
        return
    written = [line for line in merged.read_text().splitlines() if line.strip()]
    every = [line for lines in shards for line in lines if line]
    kept_keys, kept_others = split(written)
    all_keys, all_others = split(every)
    assert set(written) <= set(every), "a line was changed"
    assert len(set(kept_keys)) == len(kept_keys), "a rollout is there twice"
    assert set(kept_keys) == set(all_keys), "a rollout is lost"
    assert kept_others == all_others, "a line that does not say which rollout it is was lost"
