import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_gym.errors import ConfigError
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.rows import InputRows, Repeats, materialized, preprocess

Expand = Callable[..., list[str]]


@pytest.fixture
def expand(tmp_path: Path) -> Expand:
    """The materialized lines of an input, with the given options."""

    def lines(content: str, **options: Any) -> list[str]:
        path = tmp_path / "in.jsonl"
        path.write_text(content, encoding="utf-8")
        config = _config(path, **options)
        written = [line for repeats in InputRows(config) for line in repeats.lines]
        assert preprocess(config) == [json.loads(line) for line in written]
        return [line.decode().removesuffix("\n") for line in written]

    return lines


def _config(path: Path, **options: Any) -> RolloutCollectionConfig:
    files = {"input_jsonl_fpath": str(path), "output_jsonl_fpath": "out.jsonl"}
    return RolloutCollectionConfig.model_validate(files | options)


def _keys(lines: list[str]) -> list[tuple[Any, int]]:
    rows = map(json.loads, lines)
    return [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows]


TWO_AGENTS = """\
{"agent_ref": {"name": "coder"}, "responses_create_params": {"input": "write fizzbuzz"}, "tid": "t-a"}
{"agent_ref": {"name": "tutor"}, "responses_create_params": {"input": "explain gcd"}, "tid": "t-b"}
{"agent_ref": {"name": "coder"}, "responses_create_params": {"input": "sort a list"}, "tid": "t-c"}
"""


def test_rows_are_repeated_as_often_as_their_agent_asks(expand: Expand) -> None:
    head_a = '{"agent_ref":{"name":"coder"},"responses_create_params":{"input":"write fizzbuzz"},"tid":"t-a"'
    head_b = '{"agent_ref":{"name":"tutor"},"responses_create_params":{"input":"explain gcd"},"tid":"t-b"'
    head_c = '{"agent_ref":{"name":"coder"},"responses_create_params":{"input":"sort a list"},"tid":"t-c"'
    assert expand(TWO_AGENTS, num_repeats={"coder": 2, "tutor": 3}) == [
        head_a + ',"_ng_task_index":0,"_ng_rollout_index":0}',
        head_a + ',"_ng_task_index":0,"_ng_rollout_index":1}',
        head_b + ',"_ng_task_index":1,"_ng_rollout_index":0}',
        head_b + ',"_ng_task_index":1,"_ng_rollout_index":1}',
        head_b + ',"_ng_task_index":1,"_ng_rollout_index":2}',
        head_c + ',"_ng_task_index":2,"_ng_rollout_index":0}',
        head_c + ',"_ng_task_index":2,"_ng_rollout_index":1}',
    ]


def test_unlisted_agents_take_the_default_and_unused_names_are_pointed_out(expand: Expand) -> None:
    with pytest.warns(UserWarning, match=r"\['ghost'\]"):
        lines = expand(TWO_AGENTS, num_repeats={"tutor": 1, "_default": 2, "ghost": 9})
    assert _keys(lines) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]


def test_default_agent_overrides_seeds_and_a_duplicate_line(expand: Expand) -> None:
    first = '{"responses_create_params": {"input": "p", "temperature": 0.2, "metadata": {"origin": "row"}}, "n": 1}\n'
    second = (
        '{"responses_create_params": {"input": "q", "metadata": {"extra_body": "{\\"top_k\\": 20, \\"seed\\": 7}"}}, '
        '"n": 2, "agent_ref": {"name": "special"}}\n'
    )
    lines = expand(
        first + second + first,
        agent_name="fallback",
        num_repeats=2,
        num_repeats_add_seed=True,
        responses_create_params={"temperature": 0.9, "max_output_tokens": 64},
    )

    def of_first(rollout: int) -> str:
        return (
            '{"responses_create_params":{"input":"p","temperature":0.9,"metadata":{"origin":"row","extra_body":'
            f'"{{\\"seed\\": {rollout}}}"}},"max_output_tokens":64}},"n":1,"agent_ref":{{"name":"fallback"}},'
            f'"_ng_task_index":0,"_ng_rollout_index":{rollout}}}'
        )

    def of_second(rollout: int) -> str:
        return (
            '{"responses_create_params":{"input":"q","metadata":{"extra_body":'
            f'"{{\\"top_k\\": 20, \\"seed\\": {rollout}}}"}},"temperature":0.9,"max_output_tokens":64}},"n":2,'
            f'"agent_ref":{{"name":"special"}},"_ng_task_index":1,"_ng_rollout_index":{rollout}}}'
        )

    assert lines == [of_first(0), of_first(1), of_second(0), of_second(1), of_first(2), of_first(3)]


def test_an_override_replaces_a_nested_object_wholesale(expand: Expand) -> None:
    line = '{"responses_create_params": {"input": "p", "temperature": 0.2, "metadata": {"origin": "row"}}, "n": 1}\n'
    options = {"agent_name": "fallback", "num_repeats_add_seed": True}
    assert expand(line, responses_create_params={"metadata": {"run": "r1"}}, **options) == [
        '{"responses_create_params":{"input":"p","temperature":0.2,"metadata":{"run":"r1","extra_body":'
        '"{\\"seed\\": 0}"}},"n":1,"agent_ref":{"name":"fallback"},"_ng_task_index":0,"_ng_rollout_index":0}'
    ]


def test_supplied_task_indices_are_kept_and_never_given_to_another_task(expand: Expand) -> None:
    content = """\
{"responses_create_params": {"input": "a"}, "_ng_task_index": 40, "_ng_rollout_index": 3}
{"responses_create_params": {"input": "b"}, "_ng_task_index": 0}
{"responses_create_params": {"input": "c"}}
"""
    a = '{"responses_create_params":{"input":"a"},"_ng_task_index":40,"_ng_rollout_index":%d,"agent_ref":{"name":"x"}}'
    b = '{"responses_create_params":{"input":"b"},"_ng_task_index":0,"agent_ref":{"name":"x"},"_ng_rollout_index":%d}'
    c = '{"responses_create_params":{"input":"c"},"agent_ref":{"name":"x"},"_ng_task_index":1,"_ng_rollout_index":%d}'
    expected = [template % rollout for template in (a, b, c) for rollout in (0, 1)]
    assert expand(content, agent_name="x", num_repeats=2) == expected


def _rows(*extras: str) -> str:
    return "".join(f'{{"responses_create_params": {{"input": "q"}}{extra}}}\n' for extra in extras)


def test_rows_that_share_a_supplied_index_share_its_numbering(expand: Expand) -> None:
    lines = expand(_rows(', "_ng_task_index": 7, "n": 1', "", ', "_ng_task_index": 7'), agent_name="x", num_repeats=2)
    assert _keys(lines) == [(7, 0), (7, 1), (0, 0), (0, 1), (7, 2), (7, 3)]


def test_identical_rows_with_their_own_indices_stay_different_tasks(expand: Expand) -> None:
    lines = expand(_rows(', "_ng_task_index": 42', ', "_ng_task_index": 99', ""), agent_name="x")
    assert _keys(lines) == [(42, 0), (99, 0), (0, 0)]


def test_a_supplied_null_stays_null(expand: Expand) -> None:
    assert _keys(expand(_rows(', "_ng_task_index": null'), agent_name="x")) == [(None, 0)]


def test_indices_beyond_the_limit_are_taken_too_so_that_keys_survive_an_extension(expand: Expand) -> None:
    content = _rows(', "n": 1', ', "n": 2', ', "_ng_task_index": 0', ', "n": 3')
    short, long = expand(content, agent_name="x", limit=2), expand(content, agent_name="x")
    assert _keys(short) == [(1, 0), (2, 0)]
    assert short == long[:2]


def test_the_limit_counts_rows_and_not_lines(expand: Expand) -> None:
    content = "\n" + _rows(', "n": 1') + "  \n\n" + _rows(', "n": 2', ', "n": 3') + '{"torn": '
    assert _keys(expand(content, agent_name="x", limit=2)) == [(0, 0), (1, 0)]


def test_lines_are_one_task_when_their_bytes_are_equal_but_for_surrounding_whitespace(expand: Expand) -> None:
    row = '{"responses_create_params": {"input": "q"}}'
    spaced = '{"responses_create_params":  {"input": "q"}}'
    lines = expand(f"{row}\n  {row} \r\n{spaced}\n{row}", agent_name="x")
    assert _keys(lines) == [(0, 0), (0, 1), (1, 0), (0, 2)]


@pytest.mark.parametrize("reference", ["", ', "agent_ref": null', ', "agent_ref": {}', ', "agent_ref": {"name": ""}'])
def test_a_row_without_an_agent_gets_the_default_one(expand: Expand, reference: str) -> None:
    (line,) = expand(_rows(reference), agent_name="x")
    assert json.loads(line)["agent_ref"] == {"name": "x"}


def test_the_default_agent_completes_a_reference_that_has_only_a_type(expand: Expand) -> None:
    (line,) = expand(_rows(', "agent_ref": {"type": "responses_api_agents"}'), agent_name="x")
    assert json.loads(line)["agent_ref"] == {"type": "responses_api_agents", "name": "x"}


def test_the_default_agent_overrides_none(expand: Expand) -> None:
    (line,) = expand(_rows(', "agent_ref": {"type": "t", "name": "own"}'), agent_name="x")
    assert json.loads(line)["agent_ref"] == {"type": "t", "name": "own"}


def test_an_empty_file_has_no_rows(expand: Expand) -> None:
    assert expand("", agent_name="x", num_repeats={}) == []


def _params(lines: list[str]) -> list[Any]:
    return [json.loads(line)["responses_create_params"] for line in lines]


def test_an_override_may_be_null(expand: Expand) -> None:
    row = '{"responses_create_params": {"temperature": 0.5}}\n'
    assert _params(expand(row, agent_name="x", responses_create_params={"temperature": None})) == [
        {"temperature": None}
    ]


def test_overrides_may_refer_to_one_another(expand: Expand) -> None:
    overrides = OmegaConf.create({"temperature": 0.7, "top_p": "${temperature}", "metadata": {"a": "b"}})
    expected = {"input": "q", "temperature": 0.7, "top_p": 0.7, "metadata": {"a": "b"}}
    assert _params(expand(_rows(""), agent_name="x", responses_create_params=dict(overrides.items()))) == [expected]
    unresolved = {"temperature": 0.7, "top_p": "${temperature}", "metadata": {"a": "b"}}
    assert _params(expand(_rows(""), agent_name="x", responses_create_params=unresolved)) == [expected]


def test_an_override_that_refers_to_nothing_is_an_error(expand: Expand) -> None:
    with pytest.raises(ConfigError, match=r"responses_create_params.*cannot be used"):
        expand(_rows(""), agent_name="x", responses_create_params={"top_p": "${nowhere}"})


@pytest.mark.parametrize(
    ("metadata", "extra_body"),
    [
        ("null", {"seed": 0}),
        ('{"extra_body": {"top_k": 3}}', {"top_k": 3, "seed": 0}),
        ('{"extra_body": ""}', {"seed": 0}),
        ('{"extra_body": null}', {"seed": 0}),
    ],
)
def test_a_seed_finds_its_place_in_any_metadata(expand: Expand, metadata: str, extra_body: Any) -> None:
    row = f'{{"responses_create_params": {{"input": "q", "metadata": {metadata}}}}}\n'
    (params,) = _params(expand(row, agent_name="x", num_repeats_add_seed=True))
    assert params["metadata"] == {"extra_body": json.dumps(extra_body)}


def test_seeded_rows_still_satisfy_the_strict_schema(expand: Expand) -> None:
    params = _params(expand(_rows("", ', "n": 2'), agent_name="x", num_repeats=3, num_repeats_add_seed=True))
    for one in params:
        NeMoGymResponseCreateParamsNonStreaming.model_validate(one)
    assert [json.loads(one["metadata"]["extra_body"])["seed"] for one in params] == [0, 1, 2, 0, 1, 2]


def test_a_prompt_is_filled_from_the_fields_of_each_row(expand: Expand, tmp_path: Path) -> None:
    prompt = tmp_path / "p.yaml"
    prompt.write_text('system: "Answer as {persona}."\nuser: |-\n  {question}\n  Put the result in \\boxed{{}}.\n')
    content = (
        '{"question": "6*7?", "persona": "an abacus", "responses_create_params": {"temperature": 0.1, "input": []}}\n'
        '{"question": "9-4?", "persona": "a clerk", "answer": 5}\n'
    )
    assert expand(content, agent_name="calc", prompt_config=str(prompt)) == [
        '{"question":"6*7?","persona":"an abacus","responses_create_params":{"temperature":0.1,"input":[{"role":'
        '"system","content":"Answer as an abacus."},{"role":"user","content":"6*7?\\nPut the result in \\\\boxed{}."}]}'
        ',"agent_ref":{"name":"calc"},"_ng_task_index":0,"_ng_rollout_index":0}',
        '{"question":"9-4?","persona":"a clerk","answer":5,"responses_create_params":{"input":[{"role":"system",'
        '"content":"Answer as a clerk."},{"role":"user","content":"9-4?\\nPut the result in \\\\boxed{}."}]},'
        '"agent_ref":{"name":"calc"},"_ng_task_index":1,"_ng_rollout_index":0}',
    ]


def test_ten_rows_of_which_three_are_used_twice_with_seeds(expand: Expand) -> None:
    content = "".join(f'{{"responses_create_params": {{"input": []}}, "x": {number}}}\n' for number in range(10))
    lines = expand(
        content,
        agent_name="my agent name",
        limit=3,
        num_repeats=2,
        num_repeats_add_seed=True,
        responses_create_params={"temperature": 0.1},
    )
    assert list(map(json.loads, lines)) == [
        {
            "responses_create_params": {
                "input": [],
                "temperature": 0.1,
                "metadata": {"extra_body": json.dumps({"seed": rollout})},
            },
            "x": task,
            "agent_ref": {"name": "my agent name"},
            "_ng_task_index": task,
            "_ng_rollout_index": rollout,
        }
        for task in range(3)
        for rollout in range(2)
    ]


def test_very_many_repeats_come_in_batches(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(_rows(""))
    batches = list(InputRows(_config(path, agent_name="x", num_repeats=1_000)))
    assert max(len(batch.lines) for batch in batches) <= 256
    assert _keys([line.decode() for batch in batches for line in batch.lines]) == [(0, n) for n in range(1_000)]


def test_rows_in_memory_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(_rows(""))
    first, second = preprocess(_config(path, agent_name="x", num_repeats=2, responses_create_params={"m": {"k": []}}))
    first["responses_create_params"]["m"]["k"].append(1)
    assert second["responses_create_params"]["m"]["k"] == []


def test_a_file_that_changes_between_the_passes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(_rows(""))
    rows = InputRows(_config(path, agent_name="x"))
    assert rows.scan.rows == 1
    path.write_text(_rows("", ""))
    with pytest.raises(ConfigError, match="changed while it was being read"):
        iter(rows)


def test_rows_made_elsewhere_are_written_the_same_way() -> None:
    row = {"agent_ref": {"name": "a"}, "_ng_task_index": 3, "_ng_rollout_index": 1}
    assert list(materialized([row])) == [
        Repeats("a", 1, [b'{"agent_ref":{"name":"a"},"_ng_task_index":3,"_ng_rollout_index":1}\n'])
    ]


def _naive_keys(rows: list[tuple[int, int | None]], limit: int, repeats: int) -> list[tuple[int, int]]:
    """The numbering, spelled out: rows are (content, supplied index)."""
    supplied = {index for _, index in rows if index is not None}
    free = (index for index in range(10_000) if index not in supplied)
    of_content: dict[int, int] = {}
    emitted: dict[int, int] = {}
    keys = []
    for content, index in rows[:limit]:
        if index is None:
            if content not in of_content:
                of_content[content] = next(free)
            index = of_content[content]
        for _ in range(repeats):
            keys.append((index, emitted.setdefault(index, 0)))
            emitted[index] += 1
    return keys


@given(
    st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 6)), max_size=20),
    st.integers(1, 20),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_numbering_agrees_with_its_definition(rows: list[tuple[int, int | None]], limit: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        path = Path(folder) / "in.jsonl"
        indices = [f', "_ng_task_index": {index}' if index is not None else "" for _, index in rows]
        path.write_text(_rows(*(f', "n": {content}{index}' for (content, _), index in zip(rows, indices, strict=True))))
        config = _config(path, agent_name="x", limit=limit, num_repeats=repeats)
        lines = [line.decode() for batch in InputRows(config) for line in batch.lines]
    assert _keys(lines) == _naive_keys(rows, limit, repeats)
