import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigPathNotFoundError
from nemo_gym.runs.manifest import RunChangedError, RunFacts
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.record import Result, RolloutKey, Row
from nemo_gym.runs.run import open_run

KeyAndAttempt = tuple[Any, int, int | None]


def _config(**options: Any) -> RolloutCollectionConfig:
    files = {"input_jsonl_fpath": "in.jsonl", "output_jsonl_fpath": "out.jsonl"}
    return RolloutCollectionConfig.model_validate(files | options)


def _collect(
    config: RolloutCollectionConfig,
    answer: Callable[[Row], Result] = lambda row: {"reward": 1.0},
    stop_after: int = 999,
) -> list[KeyAndAttempt]:
    """Run what is owed, without servers; returns what was dispatched."""
    dispatched: list[KeyAndAttempt] = []
    with open_run(config) as run:
        plan = run.plan()
        with run.store as store:
            for row in plan:
                if len(dispatched) == stop_after:
                    break
                dispatched.append((*RolloutKey.of(row), row.get("_ng_attempt_index")))
                store.append(row, answer(row))
    return dispatched


def _input(content: str) -> None:
    Path("in.jsonl").write_text(content)


def _rows(count: int, **extra: Any) -> str:
    rows = [{"responses_create_params": {"input": f"q{n}"}, "agent_ref": {"name": "a"}, **extra} for n in range(count)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def _keys(path: str = "out.jsonl") -> list[tuple[Any, int]]:
    return [RolloutKey.of(json.loads(line)) for line in Path(path).read_text().splitlines()]


def _manifest() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("out_manifest.json").read_text())
    return content


def _files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (
            {},
            {"responses_create_params": {"temperature": 0.9}},
            "responses_create_params.temperature: was not set, now 0.9",
        ),
        (
            {"responses_create_params": {"temperature": 0.2, "top_p": 1}},
            {"responses_create_params": {"temperature": 0.9, "top_p": 1}},
            "responses_create_params.temperature: was 0.2, now 0.9",
        ),
        ({}, {"num_repeats_add_seed": True}, "num_repeats_add_seed: was False, now True"),
        ({}, {"agent_name": "b"}, "agent_name: was not set, now b"),
        ({}, {"prompt_config": "p.yaml"}, "prompt_config: was not set, now"),
    ],
)
def test_a_changed_run_is_refused_and_the_change_is_named(was: dict[str, Any], now: dict[str, Any], said: str) -> None:
    _input(_rows(4))
    Path("p.yaml").write_text("user: hi\n")
    _collect(_config(**was), stop_after=1)
    before = {name: Path(name).read_bytes() for name in _files()}
    with pytest.raises(RunChangedError) as caught:
        _collect(_config(resume_from_cache=True, **was | now))
    assert said in str(caught.value)
    assert "+allow_changed_config=true" in str(caught.value)
    assert {name: Path(name).read_bytes() for name in _files()} == before


def test_a_changed_input_is_refused() -> None:
    _input(_rows(2))
    _collect(_config(), stop_after=1)
    _input(_rows(2, extra=1))
    with pytest.raises(RunChangedError, match=r"input: was .*in\.jsonl \(\d+ bytes\), now .*in\.jsonl \(\d+ bytes\)"):
        _collect(_config(resume_from_cache=True))


def test_the_same_input_under_another_name_is_the_same_run() -> None:
    _input(_rows(2))
    _collect(_config(), stop_after=1)
    Path("in.jsonl").rename("moved.jsonl")
    assert _collect(_config(resume_from_cache=True, input_jsonl_fpath="moved.jsonl")) == [(1, 0, None)]


def test_a_changed_prompt_file_is_refused_and_a_moved_one_is_not() -> None:
    Path("in.jsonl").write_text('{"q": 1}\n{"q": 2}\n')
    Path("p.yaml").write_text("user: '{q}'\n")
    options = {"agent_name": "a", "prompt_config": "p.yaml"}
    _collect(_config(**options), stop_after=1)
    Path("p.yaml").rename("moved.yaml")
    moved = options | {"prompt_config": "moved.yaml", "resume_from_cache": True}
    assert _collect(_config(**moved)) == [(1, 0, None)]
    Path("moved.yaml").write_text("user: '{q}?'\n")
    with pytest.raises(RunChangedError, match="prompt_config: was"):
        _collect(_config(**moved))


def test_options_that_shape_no_row_may_change_freely() -> None:
    _input(_rows(3))
    _collect(_config(), stop_after=1)
    changed = {"num_samples_in_parallel": 3, "max_attempts": 5, "rollout_timeout_s": 5, "limit": 99, "fail_fast": True}
    assert _collect(_config(resume_from_cache=True, num_repeats={"_default": 1}, **changed)) == [
        (1, 0, None),
        (2, 0, None),
    ]


def test_more_repeats_extend_a_run(caplog: pytest.LogCaptureFixture) -> None:
    _input(_rows(2))
    _collect(_config())
    assert _collect(_config(resume_from_cache=True, num_repeats=3)) == [
        (0, 1, None),
        (0, 2, None),
        (1, 1, None),
        (1, 2, None),
    ]
    assert "Extending the run: num_repeats: was 1, now 3" in caplog.text
    assert _manifest()["agents"] == {"a": {"tasks": 2, "rollouts": 6}}
    assert sorted(_keys()) == _keys("out_materialized_inputs.jsonl")


@pytest.mark.parametrize(
    ("was", "now", "said", "asked"),
    [
        ({"limit": 3}, {"limit": 2}, "limit: was 3, now 2", [(0, 0), (1, 0)]),
        ({}, {"limit": 2}, "limit: was not set, now 2", [(0, 0), (1, 0)]),
        ({"num_repeats": 3, "limit": 1}, {"num_repeats": 2}, "num_repeats: was 3, now 2", [(0, 0), (0, 1)]),
        ({"num_repeats": 2, "limit": 1}, {"num_repeats": {"a": 1}}, "num_repeats: was 2, now {'a': 1}", [(0, 0)]),
    ],
)
def test_asking_for_less_keeps_what_there_is(
    caplog: pytest.LogCaptureFixture,
    was: dict[str, Any],
    now: dict[str, Any],
    said: str,
    asked: list[tuple[int, int]],
) -> None:
    _input(_rows(4))
    _collect(_config(**was))
    before = _keys()
    assert _collect(_config(resume_from_cache=True, **was | now)) == []
    assert f"Asking for other rollouts than before: {said}" in caplog.text
    assert f"{len(before) - len(asked)} rollouts are no longer asked for" in caplog.text
    assert (_keys(), _keys("out_materialized_inputs.jsonl")) == (before, asked)
    assert _manifest()["counts"] == {
        "expected": len(asked),
        "success": len(asked),
        "failed_attempts": 0,
        "discarded_attempts": 0,
        "missing": 0,
    }
    assert _collect(_config(resume_from_cache=True, **was)) == []
    assert sorted(_keys("out_materialized_inputs.jsonl")) == sorted(before)
    history = [(entry["rollouts"], entry["added"], entry["dropped"]) for entry in _manifest()["history"]]
    gone = len(before) - len(asked)
    assert history == [(len(before), 0, 0), (len(asked), 0, gone), (len(before), gone, 0)]


def _packed(name: str, count: int, level: int) -> None:
    """So many rows in a file of that kind, packed as it may be packed another time."""
    if name.endswith(".gz"):
        Path(name).write_bytes(gzip.compress(_rows(count).encode(), level))
    elif name.endswith(".csv"):
        Path(name).write_text("prompt,n\n" + "".join(f"q{n},{n}\n" for n in range(count)))
    else:
        Path(name).write_text(_rows(count).removesuffix("\n") + "\n" * (level % 2))


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.csv"])
def test_an_input_that_only_got_longer_extends_a_run_whatever_it_is_packed_in(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    given = {"input_jsonl_fpath": name, "agent_name": "a"}
    _packed(name, 2, 2)
    _collect(_config(**given))
    _packed(name, 4, 9)
    assert _collect(_config(resume_from_cache=True, **given)) == [(2, 0, None), (3, 0, None)]
    assert f"Extending the run: input: was {Path(name).resolve()}" in caplog.text
    _packed(name, 3, 9)
    with pytest.raises(RunChangedError, match="input: was"):
        _collect(_config(resume_from_cache=True, **given))


def test_a_row_that_goes_on_where_the_input_ended_is_another_row() -> None:
    Path("in.csv").write_text("prompt\nfirst\nsecond")
    given = {"input_jsonl_fpath": "in.csv", "agent_name": "a"}
    _collect(_config(**given))
    Path("in.csv").write_text("prompt\nfirst\nsecond half\nthird\n")
    with pytest.raises(RunChangedError, match="input: was"):
        _collect(_config(resume_from_cache=True, **given))


def test_a_larger_limit_extends_a_run_without_renumbering_it() -> None:
    _input(_rows(2) + _rows(1, _ng_task_index=0) + _rows(1, other=True))
    _collect(_config(limit=1))
    assert _keys() == [(1, 0)]
    assert _collect(_config(limit=3, resume_from_cache=True)) == [(2, 0, None), (0, 0, None)]
    assert _collect(_config(resume_from_cache=True)) == [(3, 0, None)]


def test_duplicate_lines_survive_an_extension() -> None:
    row = '{"responses_create_params": {}, "agent_ref": {"name": "a"}}\n'
    _input(row + _rows(1) + row)
    _collect(_config())
    assert sorted(_keys()) == [(0, 0), (0, 1), (1, 0)]
    assert _collect(_config(num_repeats=2, resume_from_cache=True)) == [(1, 1, None), (0, 2, None), (0, 3, None)]


def test_an_extension_that_would_mix_up_rows_is_refused() -> None:
    _input(_rows(2, _ng_task_index=5))
    _collect(_config())
    before = Path("out_materialized_inputs.jsonl").read_bytes()
    with pytest.raises(RunChangedError, match="1 of the 2 rows of the earlier run would come out differently"):
        _collect(_config(num_repeats=2, resume_from_cache=True))
    assert Path("out_materialized_inputs.jsonl").read_bytes() == before


def test_an_accepted_change_applies_to_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    _input(_rows(2))
    _collect(_config(), stop_after=1)
    changed = _config(resume_from_cache=True, allow_changed_config=True, responses_create_params={"temperature": 0.9})
    seen: list[Row] = []
    assert _collect(changed, lambda row: seen.append(row) or {"reward": 1.0}) == [(1, 0, None)]  # type: ignore[func-returns-value]
    assert seen[0]["responses_create_params"]["temperature"] == 0.9
    assert "responses_create_params.temperature: was not set, now 0.9" in caplog.text
    assert _manifest()["options"]["responses_create_params"] == {"temperature": 0.9}


def test_a_run_whose_input_is_gone_goes_on_when_that_is_accepted() -> None:
    _input(_rows(2))
    _collect(_config(), stop_after=1)
    Path("in.jsonl").unlink()
    with pytest.raises(RunChangedError, match=r"input: was .*, now not set"):
        _collect(_config(resume_from_cache=True))
    assert _collect(_config(resume_from_cache=True, allow_changed_config=True)) == [(1, 0, None)]
    with pytest.raises(ConfigPathNotFoundError):
        _collect(_config(resume_from_cache=True, allow_changed_config=True, num_repeats=2))


def test_another_model_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    _input(_rows(1))
    with open_run(_config(), RunFacts(models=["one"])) as run, run.store:
        pass
    with open_run(_config(resume_from_cache=True), RunFacts(models=["two"])):
        pass
    assert "['one']" in caplog.text
    assert "['two']" in caplog.text


@pytest.mark.parametrize("manifest", [None, "{torn"])
def test_a_run_without_a_readable_manifest_resumes_as_it_is(
    caplog: pytest.LogCaptureFixture, manifest: str | None
) -> None:
    _input(_rows(3))
    _collect(_config(), stop_after=1)
    Path("out_manifest.json").unlink()
    if manifest is not None:
        Path("out_manifest.json").write_text(manifest)
    Path("in.jsonl").unlink()
    options = {"limit": 1, "responses_create_params": {"temperature": 9}, "resume_from_cache": True}
    assert _collect(_config(**options)) == [(1, 0, None), (2, 0, None)]
    assert caplog.text.count("taken as they are") == 1


def test_a_damaged_manifest_is_written_anew_from_the_input_and_the_run_extended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _input(_rows(3))
    _collect(_config(limit=2), stop_after=1)
    Path("out_manifest.json").write_text("{torn")

    assert _collect(_config(resume_from_cache=True)) == [(1, 0, None), (2, 0, None)]

    assert Path("out_manifest.json.corrupt").read_text() == "{torn"
    assert "out_manifest.json is damaged" in caplog.text
    assert (_manifest()["agents"]["a"]["rollouts"], _manifest()["counts"]["missing"]) == (3, 0)


def test_a_damaged_manifest_is_no_way_round_the_question_whether_it_is_the_same_run() -> None:
    _input(_rows(3))
    _collect(_config(), stop_after=1)
    Path("out_manifest.json").write_text("{torn")

    with pytest.raises(RunChangedError, match="would come out differently"):
        _collect(_config(resume_from_cache=True, responses_create_params={"temperature": 9}))


def test_a_damaged_materialized_file_is_completed_from_the_input(caplog: pytest.LogCaptureFixture) -> None:
    _input(_rows(4))
    _collect(_config(), stop_after=1)
    whole = Path("out_materialized_inputs.jsonl").read_bytes()
    Path("out_materialized_inputs.jsonl").write_bytes(whole[:-30])
    assert _collect(_config(resume_from_cache=True)) == [(1, 0, None), (2, 0, None), (3, 0, None)]
    assert Path("out_materialized_inputs.jsonl").read_bytes() == whole
    assert Path("out_materialized_inputs.jsonl.corrupt").exists()


def test_a_missing_materialized_file_is_rebuilt() -> None:
    _input(_rows(2))
    _collect(_config(), stop_after=1)
    Path("out_materialized_inputs.jsonl").unlink()
    assert _collect(_config(resume_from_cache=True)) == [(1, 0, None)]


def test_rollouts_of_which_nothing_else_is_left_are_not_resumed_blindly() -> None:
    _input(_rows(2))
    _collect(_config(), stop_after=1)
    Path("out_materialized_inputs.jsonl").unlink()
    Path("out_manifest.json").unlink()
    with pytest.raises(RunChangedError, match=r"nothing says which rows.*\+allow_changed_config=true"):
        _collect(_config(resume_from_cache=True))
    assert _keys() == [(0, 0)]
    assert _collect(_config(resume_from_cache=True, allow_changed_config=True)) == [(1, 0, None)]
