"""`ng_compare` from the files of runs to words, pages and exit codes."""

import csv
import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from nemo_gym.cli.command import command_named
from tests.ports import free_port
from tests.programs import WAIT_S, Program

main = command_named("compare")


Reward = Callable[[int, int], float | None]


def level_and_uuid(task: int) -> dict[str, Any]:
    return {"level": "hard" if task % 2 else "easy", "uuid": f"u{task}"}


def write_run(
    path: Path,
    reward: Reward,
    tasks: Iterable[int] = range(100),
    repeats: int = 2,
    prompt: str = "Task",
    fields: Callable[[int], dict[str, Any]] = level_and_uuid,
    **params: Any,
) -> Path:
    """A run of which `reward` gives the score of each rollout, or None for one that failed."""
    rows, rollouts, failures = [], [], []
    for task in tasks:
        for repeat in range(repeats):
            asked = {"input": [{"role": "user", "content": f"{prompt} {task}?"}], **params}
            row = {"responses_create_params": asked, **fields(task)}
            key = {"_ng_task_index": task, "_ng_rollout_index": repeat, "agent_ref": {"name": path.stem}}
            rows.append({**row, **key})
            score = reward(task, repeat)
            if score is None:
                failures.append({**key, "_ng_failure_class": "timeout"})
                continue
            usage = {"input_tokens": 10, "output_tokens": task % 7, "total_tokens": 10 + task % 7}
            response = {"output": [], "usage": usage}
            rollouts.append({**row, **key, "response": response, "reward": score, "extracted_answer": f"a{score}"})
    for name, lines in (("", rollouts), ("_materialized_inputs", rows), ("_failures", failures)):
        path.with_name(f"{path.stem}{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def weak(task: int, repeat: int) -> float:
    return float((task * 7 + repeat * 3) % 10 < 5)


def strong(task: int, repeat: int) -> float:
    return float((task * 7 + repeat * 3) % 10 < 8)


@pytest.fixture
def weak_and_strong(tmp_path: Path) -> str:
    write_run(tmp_path / "weak.jsonl", weak)
    write_run(tmp_path / "strong.jsonl", strong)
    return f"+runs=[{tmp_path}/weak.jsonl,{tmp_path}/strong.jsonl]"


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main.run([*arguments, "+json=true"])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def exit_code_of(*arguments: str) -> int:
    try:
        main.run(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_verdict_comes_first_in_words(weak_and_strong: str, capsys: pytest.CaptureFixture[str]) -> None:
    main.run([weak_and_strong, "+metric=[reward,pass@2,majority@2,tokens]", "+by=level", "+flips=2"])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].startswith("reward: strong is better by 30.0 points (95 %: 2")
    assert "100 tasks × 2)" in printed.splitlines()[0]  # noqa: RUF001
    assert "Read them side by side: ng_view '+path=[" in printed
    for shown in (
        "pass@2",
        "majority@2",
        "0 tokens",
        "easy",
        "hard",
        "Task ",
    ):
        assert shown in printed


def test_numbers_are_those_of_the_files(weak_and_strong: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = as_json(capsys, weak_and_strong, "+metric=[reward,pass@2]")
    reward, pass_at_2 = (each["found"] for each in printed["metrics"])
    assert (reward["base"], reward["new"], reward["tasks"]) == (0.5, 0.8, 100)
    assert reward["ci95"][0] < 0.3 < reward["ci95"][1]
    assert reward["relative"] == pytest.approx(0.6)
    both = [(weak(task, 0) or weak(task, 1), strong(task, 0) or strong(task, 1)) for task in range(100)]
    assert pass_at_2["base"] == pytest.approx(sum(one for one, _ in both) / 100)
    assert pass_at_2["new"] == pytest.approx(sum(other for _, other in both) / 100)


def test_one_rollout_per_task_gets_mcnemars_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one.jsonl", weak, repeats=1)
    other = write_run(tmp_path / "other.jsonl", strong, repeats=1)
    printed = as_json(capsys, f"+runs=[{one},{other}]")
    assert printed["metrics"][0]["mcnemar_p"] == pytest.approx(2 * 0.5**30)


def test_tasks_are_matched_by_what_was_asked_whatever_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "one.jsonl", weak, tasks=range(60), temperature=0.2)
    other = write_run(tmp_path / "other.jsonl", weak, tasks=range(59, 9, -1), temperature=1.0)
    printed = as_json(capsys, f"+runs=[{one},{other}]")
    assert printed["metrics"][0]["found"]["tasks"] == 50
    assert printed["metrics"][0]["found"]["delta"] == 0
    assert {"what": "temperature", "base": "0.2", "new": "1.0"} in printed["differs"]["other"]
    assert "50 tasks are in both, 10 only in one, 0 only in other" in printed["notes"]


def test_another_prompt_is_refused_with_the_field_that_matches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "one.jsonl", weak)
    other = write_run(tmp_path / "other.jsonl", strong, prompt="Please do")
    runs = f"+runs=[{one},{other}]"
    assert exit_code_of(runs) == 2
    assert "the prompt seems to differ: +pair_by=uuid matches 100 tasks (" in capsys.readouterr().err
    assert as_json(capsys, runs, "+pair_by=uuid")["metrics"][0]["found"]["delta"] == pytest.approx(0.3)
    assert as_json(capsys, runs, "+pair_by=index")["metrics"][0]["found"]["delta"] == pytest.approx(0.3)


def questions_with_answers(task: int) -> dict[str, Any]:
    """Fifty tasks as of a data set: 41 different answers, and a uuid that only some runs share."""
    known = {"expected_answer": str(task % 41), "question": f"How much is {task}?", "verifier_metadata": {"at": task}}
    return {**known, "level": "easy", "options": [task, 1], "uuid": f"u{task}" if task < 30 else None}


def test_only_fields_that_identify_tasks_are_advised_and_the_best_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def elsewhere(task: int) -> dict[str, Any]:
        return {**questions_with_answers(task), "question": f"How much is {task}{'' if task < 40 else ' now'}?"}

    one = write_run(tmp_path / "one.jsonl", weak, range(50), fields=questions_with_answers)
    other = write_run(tmp_path / "other.jsonl", weak, range(50), prompt="Do", fields=questions_with_answers)
    third = write_run(tmp_path / "third.jsonl", weak, range(50), prompt="Do", fields=elsewhere)
    assert exit_code_of(f"+runs=[{one},{other}]") == 2
    advice = "+pair_by=question matches 50 tasks or +pair_by=options matches 50 tasks or +pair_by=verifier_metadata.at"
    assert f"the prompt seems to differ: {advice}" in capsys.readouterr().err
    assert exit_code_of(f"+runs=[{one},{third}]") == 2
    advice = "+pair_by=options matches 50 tasks or +pair_by=verifier_metadata.at matches 50 tasks or +pair_by=question "
    assert f"{advice}matches 40 tasks (its value is another one in every task" in capsys.readouterr().err


def test_tasks_that_a_field_does_not_tell_apart_are_said_to_count_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (
        write_run(tmp_path / f"{name}.jsonl", weak, range(50), 1, fields=questions_with_answers) for name in ("a", "b")
    )
    notes = as_json(capsys, f"+runs=[{one},{other}]", "+pair_by=expected_answer")["notes"]
    assert "a: 9 rows have the same expected_answer as others; their rollouts count as repeats of one task" in notes


def write_manifest_of(path: Path, prompt: str, size: int) -> None:
    digest = hashlib.sha256(path.name.encode()).hexdigest()
    files = {"prompt": {"path": prompt, "sha256": digest, "size_bytes": size}}
    path.with_name(f"{path.stem}_manifest.json").write_text(json.dumps(files))


def test_another_prompt_is_named_with_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "Think about the question carefully before you answer, and check your result. "
    one = write_run(tmp_path / "one.jsonl", weak, prompt=f"{long}In short. Task")
    other = write_run(tmp_path / "other.jsonl", weak, prompt=f"{long}At length. Task", instructions="Be kind.")
    edited = write_run(tmp_path / "edited.jsonl", weak, prompt=f"{long}\nIn short.  Task")
    for path, prompt, size in ((one, "a.yaml", 120), (other, "b.yaml", 140), (edited, "a.yaml", 120)):
        write_manifest_of(path, prompt, size)
    differs = as_json(capsys, f"+runs=[{one},{other},{edited}]", "+pair_by=uuid")["differs"]
    assert differs["other"] == [
        {"what": "prompt file", "base": "a.yaml (120 bytes)", "new": "b.yaml (140 bytes)"},
        {
            "what": "prompt (user)",
            "base": "… check your result. In short. Task 0?",
            "new": "… check your result. At length. Task 0?",
        },
        {"what": "prompt (instructions)", "base": "-", "new": "Be kind."},
    ]
    assert differs["edited"] == [
        {"what": "prompt file", "base": "a.yaml (120 bytes)", "new": "a.yaml (120 bytes) with other content"},
        {
            "what": "prompt (user)",
            "base": "…·check·your·result.·In·short.·Task·0?",
            "new": "…·check·your·result.·↵In·short.··Task·0?",
        },
    ]


def test_a_prompt_that_is_part_of_the_rows_is_named_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one.jsonl", weak)
    other = write_run(tmp_path / "other.jsonl", weak, prompt="Please do")
    elsewhere = write_run(tmp_path / "elsewhere.jsonl", weak, prompt="Do", fields=lambda task: {"uuid": f"u{task}"})
    differs = as_json(capsys, f"+runs=[{one},{other},{elsewhere}]", "+pair_by=uuid")["differs"]
    assert differs["other"] == [{"what": "prompt (user)", "base": "Task 0?", "new": "Please do 0?"}]
    assert differs["elsewhere"] == []


def test_runs_without_a_common_task_are_compared_without_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "one.jsonl", weak)
    other = write_run(tmp_path / "other.jsonl", weak, prompt="Please do")
    printed = as_json(capsys, f"+runs=[{one},{other}]", "+allow_unmatched=true")
    assert printed["metrics"][0]["found"] is None


def test_other_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one.jsonl", weak)
    other = write_run(tmp_path / "other.jsonl", strong, tasks=range(80, 200))
    runs = f"+runs=[{one},{other}]"
    assert exit_code_of(runs) == 2
    assert "only 20 of 100 and 120 tasks ask the same; another data set?" in capsys.readouterr().err
    assert as_json(capsys, runs, "+allow_unmatched=true")["metrics"][0]["found"]["tasks"] == 20


def test_rows_with_equal_content_are_one_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (write_run(tmp_path / f"{name}.jsonl", weak, tasks=range(20)) for name in ("one", "other"))
    for path in (one, other):
        for file in (path, path.with_name(f"{path.stem}_materialized_inputs.jsonl")):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            again = [{**line, "_ng_task_index": line["_ng_task_index"] + 100} for line in lines[:10]]
            file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *again]))
    printed = as_json(capsys, f"+runs=[{one},{other}]")
    assert printed["metrics"][0]["found"]["tasks"] == 20
    assert any("5 rows repeat the content of others" in note for note in printed["notes"])


def test_rows_that_orjson_cannot_write_are_matched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd: Callable[[int], dict[str, Any]] = lambda task: {"name": f"\ud800{task}", "number": 10**30 + task}  # noqa: E731
    one, other = (write_run(tmp_path / f"{name}.jsonl", weak, prompt="half \udc00", fields=odd) for name in ("a", "b"))
    third = write_run(tmp_path / "third.jsonl", weak, prompt="a third", fields=odd)
    assert as_json(capsys, f"+runs=[{one},{other}]")["metrics"][0]["found"]["tasks"] == 100
    assert exit_code_of(f"+runs=[{one},{third}]") == 2
    assert "+pair_by=name matches 100 tasks or +pair_by=number matches 100 tasks" in capsys.readouterr().err


def test_records_without_numbers_are_told_apart_where_some_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, order in (("one", range(30)), ("other", reversed(range(30)))):
        records = (
            {"responses_create_params": {"input": f"q{n}"}, "n": n, "response": {}, "reward": float(n % 2)}
            for n in order
        )
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    printed = as_json(capsys, f"+runs=[{tmp_path}/one.jsonl,{tmp_path}/other.jsonl]", "+where=n >= 11")
    assert printed["flips"]["other"] == []
    assert printed["metrics"][0]["found"]["tasks"] == 19


def test_failures_are_never_dropped_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second run fails exactly where it would have been wrong: better among what is scored, equal with failures."""
    one = write_run(tmp_path / "one.jsonl", weak)
    other = write_run(tmp_path / "other.jsonl", lambda task, repeat: weak(task, repeat) or (None if repeat else 0.0))
    main.run([f"+runs=[{one},{other}]"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Attention: with failed rollouts counted as 0 the conclusion is another one:")
    assert "no difference can be claimed" in lines[0]
    assert lines[1].startswith("reward: other is better by")
    assert any(line.startswith("Note: other: 50 rollouts failed (timeout 50)") for line in lines)


def test_a_difference_that_cannot_be_seen_is_not_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one.jsonl", weak, tasks=range(30))
    other = write_run(tmp_path / "other.jsonl", lambda task, repeat: weak(task + (task < 2), repeat), tasks=range(30))
    headline = as_json(capsys, f"+runs=[{one},{other}]")["headlines"][0]
    assert "no difference can be claimed" in headline
    assert "would need about" in headline


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("delta < 0", 0),
        ("delta > 0.1", 1),
        ("delta > 0.3", 3),
        ("ci_low > 0 and p < 0.001", 1),
        ("not delta > 0.1", 0),
        ("relative > 0.2", 1),
        ("failed.delta > 0 or tokens.delta > 5", 0),
        ("coverage < 1", 0),
        ("delta > 0.3 and failed.delta > 0", 0),
        ("delta > 0.3 or failed.delta == 0", 1),
    ],
)
def test_the_gate_decides_by_the_whole_interval(weak_and_strong: str, condition: str, expected: int) -> None:
    assert exit_code_of(weak_and_strong, f"+fail_if={condition}") == expected


def test_undecided_counts_as_told(weak_and_strong: str) -> None:
    codes = [
        exit_code_of(weak_and_strong, "+fail_if=delta > 0.3", f"+on_undecided={each}") for each in ("pass", "fail")
    ]
    assert codes == [0, 1]


def test_every_file_is_written(weak_and_strong: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.jsonl").write_text("")
    outputs = [tmp_path / f"c.{ending}" for ending in ("html", "md", "json", "csv")]
    junit = tmp_path / "gate.xml"
    code = exit_code_of(
        weak_and_strong, f"+output=[{','.join(map(str, outputs))}]", f"+junit={junit}", "+fail_if=delta > 0.1"
    )
    assert code == 1
    page, markdown, data, table = (path.read_text() for path in outputs)
    assert "<script" not in page
    assert "strong is better by 30.0 points" in page
    assert page.count('class="interval"') == 1
    assert "reward of the tasks of weak" in page
    assert "reward of the tasks of strong" in page
    assert "| reward | strong | 100 | 50.0 % | 80.0 % | +30.0 points |" in markdown
    assert json.loads(data)["gate"][0]["outcome"] == "applies"
    assert [row["delta"] for row in csv.DictReader(table.splitlines()) if row["kind"] == "metric"] == [
        "0.30000000000000004"
    ]
    suite = ElementTree.parse(junit).getroot()
    assert suite.attrib["failures"] == "1"
    assert suite.find("testcase/failure") is not None


def test_text_of_a_task_is_text_on_the_page(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    one = write_run(tmp_path / "one.jsonl", weak, prompt=evil)
    other = write_run(tmp_path / "other.jsonl", strong, prompt=evil)
    exit_code_of(f"+runs=[{one},{other}]", f"+output={tmp_path}/c.html")
    page = (tmp_path / "c.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_several_runs_are_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, reward in (("a", weak), ("b", strong), ("c", strong)):
        write_run(tmp_path / f"{name}.jsonl", reward)
    printed = as_json(capsys, f"+runs={{a: {tmp_path}/a.jsonl, b: {tmp_path}/b.jsonl, c: {tmp_path}/c.jsonl}}")
    assert {each["run"]: each["ranks"] for each in printed["standings"]} == {"b": [1, 2], "c": [1, 2], "a": [3, 3]}
    assert len(printed["pairs"]) == 3
    assert all(pair["adjusted_p"] >= pair["found"]["p"] for pair in printed["pairs"])


def test_shards_and_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shards").mkdir()
    for shard in range(3):
        write_run(tmp_path / "shards" / f"s{shard}.jsonl", strong, tasks=range(shard, 100, 3))
    base = write_run(tmp_path / "base.jsonl", weak)
    runs = f"+runs={{base: {base}, new: {tmp_path}/shards/*.jsonl}}"
    assert as_json(capsys, runs)["metrics"][0]["found"]["tasks"] == 100
    assert as_json(capsys, runs, '+where=level == "hard"')["metrics"][0]["found"]["tasks"] == 50


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["+runs=[{0}/weak.jsonl]"], "needs two runs"),
        (["+runs=[{0}/weak.jsonl,{0}/none.jsonl]"], "none.jsonl is not there"),
        (["+runs=[{0}/weak.jsonl,{0}]"], "is a folder; name its rollouts"),
        (["+runs=[{0}/weak.jsonl,{0}/no*.jsonl]"], "no file matches"),
        (["+runs=[{0}/weak.jsonl,{0}/empty.jsonl]"], "empty holds no rollouts"),
        (["+runs=[{0}/weak.jsonl,{0}/strong_materialized_inputs.jsonl]"], "is a materialized-inputs file"),
        (["+runs=[{0}/weak.jsonl,{0}/notes.txt]"], "not a rollouts file"),
        (["+runs=[{0}/weak.jsonl,{0}/unscored.jsonl]"], "no rollout of unscored has it as a number"),
        (["+runs=[{0}/weak.jsonl,{0}/strong.jsonl]", "+metric=rewart"], "did you mean 'reward'?"),
        (["+runs=[{0}/weak.jsonl,{0}/strong.jsonl]", "+by=levle"], "no row has this field; there are level\n"),
        (["+runs=[{0}/weak.jsonl,{0}/many.jsonl]", "+by=uuid"], "more than 50, so no groups; there are level\n"),
        (
            ["+runs=[{0}/weak.jsonl,{0}/strong.jsonl]", "+pair_by=uid"],
            "no task has this field in weak; did you mean 'uuid'?",
        ),
        (["+runs=[{0}/weak.jsonl,{0}/partly.jsonl]", "+pair_by=uuid"], "10 tasks lack this field in partly"),
        (["+runs=[{0}/weak.jsonl,{0}/strong.jsonl]", "+fail_if=delat < 0"], "did you mean 'delta'?"),
        (["+runs=[{0}/weak.jsonl,{0}/strong.jsonl]", "+output=c.pdf"], ".html, .md, .json or .csv"),
        (["+runs=[{0}/weak.jsonl,{0}/strong.jsonl]", "+where=level = 1"], "this is not an expression"),
    ],
)
def test_mistakes_get_one_clear_error(
    weak_and_strong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("no run\n")
    write_run(tmp_path / "many.jsonl", strong)
    write_run(tmp_path / "partly.jsonl", strong, fields=lambda task: level_and_uuid(task) if task >= 10 else {})
    records = [json.loads(line) for line in (tmp_path / "strong.jsonl").read_text().splitlines()]
    unscored = (json.dumps({**record, "reward": None}) + "\n" for record in records)
    (tmp_path / "unscored.jsonl").write_text("".join(unscored))
    assert exit_code_of(*(argument.format(tmp_path) for argument in arguments)) == 2
    assert said in capsys.readouterr().err


MODELS = {"base": 0.6, "better": 0.75, "again": 0.6}


def write_servers_of_models() -> None:
    """Questions, and a model and an agent for each probability of being right; seeds let their draws differ."""
    questions = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"Which letter has number {number}?"}]},
            "options": [{"A": "one"}, {"B": "another"}],
            "expected_answer": "AB"[number % 2],
            "grading_mode": "strict_single_letter_boxed",
            "uuid": f"question {number}",
        }
        for number in range(50)
    ]
    Path("questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    config: dict[str, Any] = {"config_paths": ["resources_servers/mcqa/configs/mcqa.yaml"]}
    for seed, (name, probability) in enumerate(MODELS.items()):
        answers = {
            "jsonl": str(Path("questions.jsonl").absolute()),
            "question_field": "responses_create_params.input.0.content",
            "answer_field": "expected_answer",
            "template": "\\boxed{{answer}}",
            "wrong_template": "I do not know",
            "probability_right": probability,
        }
        model = {"entrypoint": "app.py", "script": {"seed": seed, "answers": answers}}
        config[f"model_{name}"] = {"responses_api_models": {"scripted_model": model}}
        reference = {"model_server": {"name": f"model_{name}"}, "datasets": None}
        config[f"agent_{name}"] = {
            "_inherit_from": "mcqa_simple_agent",
            "responses_api_agents": {"simple_agent": reference},
        }
    config["policy_model"] = config["model_base"]
    Path("servers.yaml").write_text(yaml.safe_dump(config))


def test_runs_of_a_known_difference_are_told_apart_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are right with probability 0.6 and 0.75, and 0.6 again with other draws, as the prompt is another."""
    monkeypatch.chdir(tmp_path)
    write_servers_of_models()
    head = f"+head_server.port={free_port()}"
    servers = Program("ng_run", "+config_paths=[servers.yaml]", head)
    try:
        deadline_s = time.monotonic() + WAIT_S
        while "servers ready!" not in servers.stdout:
            assert servers.is_running, servers.stderr
            assert time.monotonic() < deadline_s, "waited in vain"
            time.sleep(0.05)
        for name in MODELS:
            collector = Program(
                "ng_collect_rollouts",
                head,
                f"+agent_name=agent_{name}",
                "+input_jsonl_fpath=questions.jsonl",
                f"+output_jsonl_fpath={name}.jsonl",
                f"+responses_create_params.instructions={name}",
                "+num_repeats=8",
                "+num_repeats_add_seed=true",
            )
            assert collector.wait() == 0, collector.stderr
    finally:
        servers.send(signal.SIGTERM)
        servers.wait()

    def compare(*arguments: str) -> Program:
        program = Program("ng_compare", "+pair_by=uuid", *arguments)
        program.wait()
        return program

    told = compare("+runs=[base.jsonl,better.jsonl]", "+fail_if=delta > 0")
    assert told.stdout.startswith("reward: better is better by"), told.stdout + told.stderr
    assert told.wait() == 1
    same = compare("+runs=[base.jsonl,again.jsonl]", "+fail_if=delta > 0.3 or delta < -0.3")
    assert "no difference can be claimed" in same.stdout, same.stdout + same.stderr
    assert same.wait() == 0
    assert compare("+runs=[base.jsonl,again.jsonl]", "+fail_if=delta < 0").wait() == 3


@pytest.mark.parametrize("option", ["output", "junit"])
def test_a_file_that_is_no_file_is_not_replaced(
    weak_and_strong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("/dev/null")
    with pytest.raises(SystemExit) as ended:
        main.run([weak_and_strong, f"+{option}={link}"])
    assert ended.value.code == 2
    assert f"link.json is a symbolic link and is left as it is; name another +{option}" in capsys.readouterr().err
    assert link.is_symlink()
