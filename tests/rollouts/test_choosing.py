"""Which rollouts a run with a selection makes: exactly those that a plain definition of the options gives."""

import gzip
import json
from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_gym.errors import ConfigError
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutCollectionConfig
from nemo_gym.runs.rows import InputRows, preprocess
from nemo_gym.runs.run import open_run

Key = tuple[Any, int]
Row = dict[str, Any]
_BITS = 2**64


def _random_number(position: int, seed: int, purpose: str) -> int:
    start = int.from_bytes(blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest(), "little")
    mixed = (position * 0x9E3779B97F4A7C15 + start) % _BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % _BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % _BITS
    return mixed ^ mixed >> 31


class _Numbered(NamedTuple):
    position: int
    row: Row
    task: Any
    first: int


def _numbered(rows: Sequence[Row], repeats: int) -> list[_Numbered]:
    """Every row of the whole input with its indices, as a run of all of them gives them."""
    supplied = {row["_ng_task_index"] for row in rows if "_ng_task_index" in row}
    fresh = (index for index in range(10**6) if index not in supplied)
    task_of_line: dict[str, int] = {}
    emitted: dict[Any, int] = {}
    numbered = []
    for position, row in enumerate(rows):
        line = json.dumps(row)
        if "_ng_task_index" in row:
            task = row["_ng_task_index"]
        elif line in task_of_line:
            task = task_of_line[line]
        else:
            task = task_of_line[line] = next(fresh)
        numbered.append(_Numbered(position, row, task, emitted.get(task, 0)))
        emitted[task] = emitted.get(task, 0) + repeats
    return numbered


class _Earlier(NamedTuple):
    rewards: dict[Key, float]
    failed: set[Key]

    def wanted(self, only: str, task: Any, rollout: int) -> bool:
        key = (task, rollout)
        if only == "unsolved":
            tried = {each for each, _ in (*self.rewards, *self.failed)}
            return task in tried and all(reward < 1 for (each, _), reward in self.rewards.items() if each == task)
        return key not in self.rewards and (only == "missing" or key in self.failed)


def _expected(rows: Sequence[Row], options: Row, earlier: _Earlier) -> list[Key]:
    """The plain definition: every step as a filter or a sort over lists."""
    repeats, only = options["num_repeats"], options.get("only")
    left = _numbered(rows, repeats)
    if options.get("tasks") is not None:
        left = [each for each in left if each.task in options["tasks"]]
    if options.get("where") is not None:
        left = [each for each in left if "level" in each.row and each.row["level"] >= 1]
    keys = {
        each.position: [
            (each.task, rollout)
            for rollout in range(each.first, each.first + repeats)
            if only is None or earlier.wanted(only, each.task, rollout)
        ]
        for each in left
    }
    left = [each for each in left if keys[each.position]]
    if (seed := options.get("shuffle_seed")) is not None:
        left.sort(key=lambda each: _random_number(each.position, seed, "shuffle"))
    if (size := options.get("sample")) is not None:
        by_kind: dict[str, list[int]] = {}
        for each in left:
            kind = each.row.get("level") if options.get("sample_by") else None
            by_kind.setdefault(json.dumps(kind), []).append(each.position)
        turns = {}
        for positions in by_kind.values():
            drawn = sorted(
                positions, key=lambda place: _random_number(place, options.get("sample_seed") or 0, "sample")
            )
            for rank, place in enumerate(drawn):
                number = _random_number(place, options.get("sample_seed") or 0, "sample")
                turns[place] = (Fraction(2 * rank + 1, len(positions)), number)
        sampled = set(sorted(turns, key=lambda place: turns[place])[:size])
        left = [each for each in left if each.position in sampled]
    left = left[: options.get("limit")]
    return [key for each in left for key in keys[each.position]]


_ROWS = st.lists(
    st.fixed_dictionaries(
        {"q": st.integers(0, 6)}, optional={"level": st.integers(0, 2), "_ng_task_index": st.integers(0, 12)}
    ),
    min_size=1,
    max_size=14,
)
_SEEDS = st.integers(0, 3)
_OPTIONS = st.fixed_dictionaries(
    {"num_repeats": st.integers(1, 3)},
    optional={
        "tasks": st.sets(st.integers(0, 9), min_size=1),
        "where": st.just("level >= 1"),
        "only": st.sampled_from(["failed", "missing", "unsolved"]),
        "shuffle_seed": _SEEDS,
        "sample": st.integers(1, 9),
        "sample_seed": _SEEDS,
        "sample_by": st.just("level"),
        "limit": st.integers(1, 9),
    },
)
_KEYS = st.tuples(st.integers(0, 9), st.integers(0, 3))
_EARLIER = st.builds(_Earlier, st.dictionaries(_KEYS, st.sampled_from([0.0, 0.5, 1.0])), st.sets(_KEYS))


def _write_earlier(folder: Path, earlier: _Earlier) -> Path:
    path = folder / "of.jsonl"
    results = [
        {"_ng_task_index": task, "_ng_rollout_index": rollout, "reward": reward, "response": {}}
        for (task, rollout), reward in earlier.rewards.items()
    ]
    failures = [
        {"_ng_task_index": task, "_ng_rollout_index": rollout, "_ng_failure_class": "timeout"}
        for task, rollout in sorted(earlier.failed)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in results))
    (folder / "of_failures.jsonl").write_text("".join(json.dumps(each) + "\n" for each in failures))
    return path


def _complete(options: Row, rows: Sequence[Row], folder: Path, earlier: _Earlier) -> Row | None:
    """The options as a run takes them; None when they contradict each other, or the input."""
    given = dict(options)
    if "sample" not in given and ("sample_by" in given or "sample_seed" in given):
        return None
    if "only" in given:
        given["of"] = str(_write_earlier(folder, earlier))
    names = {name for row in rows for name in row}
    if ("where" in given or "sample_by" in given) and "level" not in names:
        return None
    if "tasks" in given:
        there = {each.task for each in _numbered(rows, 1)}
        given["tasks"] = [f"{index}-{index}" if index % 2 else index for index in given["tasks"] & there]
        options["tasks"] = options["tasks"] & there
    return given if given.get("tasks") != [] else None


def _config(folder: Path, **options: Any) -> RolloutCollectionConfig:
    files = {"input_jsonl_fpath": str(folder / "in.jsonl"), "output_jsonl_fpath": str(folder / "out.jsonl")}
    return RolloutCollectionConfig.model_validate({**files, "agent_name": "a", **options})


def _keys_of(config: RolloutCollectionConfig) -> list[Key]:
    return [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in preprocess(config)]


def _write_input(folder: Path, rows: Sequence[Row], name: str = "in.jsonl") -> None:
    lines = "".join(json.dumps({**row, "responses_create_params": {"input": "q"}}) + "\n" for row in rows)
    (folder / name).write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())


def _collect(config: RolloutCollectionConfig, stop_after: int = 999) -> list[Key]:
    """What a run sends, without servers, until it is stopped."""
    sent: list[Key] = []
    with open_run(config) as run:
        plan = run.plan()
        with run.store as store:
            for row in plan:
                if len(sent) == stop_after:
                    break
                sent.append((row["_ng_task_index"], row["_ng_rollout_index"]))
                store.append(row, {"reward": 1.0})
    return sent


@settings(max_examples=250, deadline=None)
@given(rows=_ROWS, options=_OPTIONS, earlier=_EARLIER, shards=st.integers(1, 3))
@example([{"q": n} for n in range(14)], {"num_repeats": 1, "sample": 4, "limit": 3}, _Earlier({}, set()), 2)
@example(
    [{"q": n, "level": n % 3} for n in range(14)],
    {"num_repeats": 2, "shuffle_seed": 1, "sample": 6, "sample_by": "level", "limit": 3},
    _Earlier({}, set()),
    3,
)
def test_a_selection_is_what_its_definition_says_in_one_piece_and_in_shards(
    rows: list[Row], options: Row, earlier: _Earlier, shards: int
) -> None:
    with TemporaryDirectory() as made:
        folder = Path(made)
        given = _complete(options, rows, folder, earlier)
        if given is None:
            return
        _write_input(folder, rows)
        expected = _expected(rows, options, earlier)
        if not expected:
            with pytest.raises(ConfigError, match="leaves none of the"):
                preprocess(_config(folder, **given))
            return
        whole = _config(folder, **given)

        assert _keys_of(whole) == expected
        assert InputRows(whole).count_rollouts() == len(expected)
        for index in range(shards):
            of_shard = _keys_of(_config(folder, **given, shard_index=index, num_shards=shards))
            assert of_shard == [key for key in expected if key[0] % shards == index]


@settings(max_examples=60, deadline=None)
@given(rows=_ROWS, was=_OPTIONS, now=_OPTIONS, earlier=_EARLIER, stop_after=st.integers(0, 6))
def test_a_run_that_is_stopped_and_then_asked_for_something_else_makes_just_what_is_missing(
    rows: list[Row], was: Row, now: Row, earlier: _Earlier, stop_after: int
) -> None:
    """Rows that share an index but differ would change places with the number of repeats: they have one each here."""
    rows = [{**row, "q": place} for place, row in enumerate(rows)]
    rows = [row for place, row in enumerate(rows) if not any(_same_index(row, other) for other in rows[:place])]
    with TemporaryDirectory() as made:
        folder = Path(made)
        before, after = _complete(was, rows, folder, earlier), _complete(now, rows, folder, earlier)
        if before is None or after is None:
            return
        _write_input(folder, rows)
        first, second = _expected(rows, was, earlier), _expected(rows, now, earlier)
        if not (first and second):
            return

        sent = _collect(_config(folder, **before), stop_after)
        assert sent == first[:stop_after]
        assert sent + _collect(_config(folder, **before, resume_from_cache=True)) == first
        missing = _collect(_config(folder, **after, resume_from_cache=True))

        assert missing == [key for key in second if key not in set(first)]
        manifest = json.loads((folder / "out_manifest.json").read_text())
        assert manifest["counts"]["missing"] == 0
        assert manifest["counts"]["success"] == len(second)
        assert manifest["history"][-1]["rollouts"] == len(second)
        assert manifest["agents"] == {"a": {"tasks": len({task for task, _ in second}), "rollouts": len(second)}}


def _same_index(one: Row, other: Row) -> bool:
    return "_ng_task_index" in one and one["_ng_task_index"] == other.get("_ng_task_index")


def test_a_larger_sample_has_everything_of_a_smaller_one_and_every_kind_its_share(tmp_path: Path) -> None:
    levels = ["easy"] * 60 + ["medium"] * 30 + ["hard"] * 10
    _write_input(tmp_path, [{"n": n, "level": level} for n, level in enumerate(levels)])
    samples = [
        {row["n"] for row in preprocess(_config(tmp_path, sample=size, sample_seed=7, sample_by="level"))}
        for size in (10, 20, 50)
    ]
    assert samples[0] < samples[1] < samples[2]
    for size, sample in zip((10, 20, 50), samples, strict=True):
        counts = [sum(levels[n] == level for n in sample) for level in ("easy", "medium", "hard")]
        assert counts == [size * 6 // 10, size * 3 // 10, size // 10]
    assert len(preprocess(_config(tmp_path, sample=1000))) == 100
    other = {row["n"] for row in preprocess(_config(tmp_path, sample=10, sample_seed=8))}
    assert other != {row["n"] for row in preprocess(_config(tmp_path, sample=10))}


def test_a_shuffled_order_is_the_same_whatever_the_rows_are_packed_in(tmp_path: Path) -> None:
    rows = [{"n": n} for n in range(40)]
    _write_input(tmp_path, rows)
    _write_input(tmp_path, rows, "in.jsonl.gz")
    plain = [row["n"] for row in preprocess(_config(tmp_path, shuffle_seed=1))]
    packed = _config(tmp_path, shuffle_seed=1, input_jsonl_fpath=str(tmp_path / "in.jsonl.gz"))
    assert plain == [row["n"] for row in preprocess(packed)] != sorted(plain)
    assert plain[:5] == [row["n"] for row in preprocess(_config(tmp_path, shuffle_seed=1, limit=5))]
    assert sorted(plain) == list(range(40))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": [3, "x"]}, "+tasks: 'x' is no task index"),
        ({"tasks": "20-10"}, "+tasks: the range 20-10 ends before it begins"),
        ({"tasks": []}, "names no task"),
        ({"tasks": [-3]}, "is no task index"),
        ({"tasks": [2, "4-9"]}, "+tasks=2,4-9: 9 is beyond the input; the tasks of"),
        ({"where": "lvel == 1"}, "there is no 'lvel' (did you mean 'level'?)"),
        ({"where": "level =="}, "this is not an expression"),
        ({"where": "meta.knd == 1"}, "did you mean 'meta.kind'?"),
        ({"where": "level == 7"}, "+where=level == 7 leaves none of the 6 rows of"),
        ({"tasks": "0-1", "where": "level == 2"}, "leaves none of the 2 rows that +tasks leaves of the 6 rows of"),
        ({"sample": 2, "sample_by": "lvel"}, "no row of"),
        ({"sample_by": "level"}, "+sample_by=level needs +sample="),
        ({"sample_seed": 3}, "+sample_seed=3 needs +sample="),
        ({"sample": 0}, "sample"),
        ({"only": "failed"}, "+only=failed needs +of="),
        ({"only": "lost", "of": "of.jsonl"}, "only"),
        ({"of": "of.jsonl"}, "needs +only="),
        ({"only": "missing", "of": "nowhere.jsonl"}, "+of=nowhere.jsonl: there is no such file"),
        ({"only": "missing", "of": "in.jsonl"}, "+of=in.jsonl is a data set (rows without results), not a rollouts"),
        ({"only": "missing", "of": "."}, "is no file"),
        ({"only": "failed", "of": "of.jsonl"}, "+only=failed +of=of.jsonl leaves none of the 6 rows of"),
        ({"only": "missing", "of": "out.jsonl"}, "is the output of this run"),
    ],
)
def test_what_cannot_be_chosen_is_one_message(tmp_path: Path, options: Row, says: str) -> None:
    _write_input(tmp_path, [{"n": n, "level": n % 3, "meta": {"kind": n}} for n in range(6)])
    (tmp_path / "of.jsonl").write_text('{"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "response": {}}\n')
    with pytest.raises((ConfigError, ValueError)) as caught:
        preprocess(_config(tmp_path, **{"output_jsonl_fpath": "out.jsonl", "input_jsonl_fpath": "in.jsonl"} | options))
    assert says in str(caught.value)


def test_a_range_that_the_rows_own_indices_leave_out_is_refused(tmp_path: Path) -> None:
    _write_input(tmp_path, [{"_ng_task_index": index} for index in (2, 9, "text")])
    assert _keys_of(_config(tmp_path, tasks="1-9")) == [(2, 0), (9, 0)]
    with pytest.raises(ConfigError, match="there is no task 4 in"):
        preprocess(_config(tmp_path, tasks=[2, 4]))


def test_unusable_rows_that_are_not_chosen_do_not_matter(tmp_path: Path) -> None:
    content = '{"level": 1, "responses_create_params": {"input": "q"}}\n{"level": 2}\n'
    (tmp_path / "in.jsonl").write_text(content)
    assert _keys_of(_config(tmp_path, where="level == 1")) == [(0, 0)]
    with pytest.raises(ConfigError, match=r"rows \[2\] have no responses_create_params"):
        preprocess(_config(tmp_path, where="level > 0"))
    (tmp_path / "in.jsonl").write_text(content + "{torn\n")
    with pytest.raises(ConfigError, match="line 3: not valid JSON"):
        preprocess(_config(tmp_path, where="level == 1"))


def test_a_mapping_under_the_name_of_an_option_is_something_else(tmp_path: Path) -> None:
    _write_input(tmp_path, [{"n": 1}, {"n": 2}])
    server = {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py"}}}
    names = ("tasks", "where", "only", "of", "shuffle_seed", "sample", "sample_seed", "sample_by")
    config = _config(tmp_path, **dict.fromkeys(names, server))
    assert config.selection == {}
    assert len(preprocess(config)) == 2


def test_the_options_reach_the_rows_that_a_whole_run_prepares() -> None:
    given = {"split": "train", "output_jsonl_fpath": "out.jsonl", "tasks": [3, "10-20"], "sample": 5, "sample_seed": 7}
    collected = E2ERolloutCollectionConfig.model_validate(given).for_rows_in(Path("train.jsonl"))
    assert collected.selection == {"tasks": "3,10-20", "sample": 5, "sample_seed": 7}
