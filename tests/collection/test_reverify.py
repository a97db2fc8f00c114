"""Stored responses scored again: only an environment runs, old verdicts stay beside new ones, all can be resumed."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from nemo_gym.cli.command import command_named
from nemo_gym.collect.failures import RetryPauses
from nemo_gym.paths import PARENT_DIR
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.rollout_reverification import CacheKeysByStatus, RolloutReverificationHelper, summarize_cache_usage
from tests.collection.conftest import Done
from tests.collection.fakes import Row, keys_in, lines_in, right_away, rows_of, serve, write_rows
from tests.collection.scoring import FakeEnvironment, manifest_of, response_of, rollout, rows_made, write_run
from tests.ports import free_port
from tests.programs import Program

collect = command_named("collect_rollouts")
main = command_named("reverify")


Reverify = Callable[..., Done]


@pytest.fixture
def environment() -> Iterator[FakeEnvironment]:
    with serve(FakeEnvironment()) as run:
        assert isinstance(run, FakeEnvironment)
        yield run


@pytest.fixture
def reverify(
    environment: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Reverify:
    """Run `ng_reverify` in this process on old.jsonl and new.jsonl."""
    monkeypatch.setattr(RolloutReverificationHelper, "retry_pauses", RetryPauses(first_s=0.01, longest_s=0.02))

    def run(*options: str) -> Done:
        defaults = [f"+head_server.port={environment.port}", "+rollouts_jsonl_fpath=old.jsonl"]
        exit_code = 0
        try:
            main.run([*defaults, "+output_jsonl_fpath=new.jsonl", *options])
        except SystemExit as ended:
            exit_code = int(ended.code or 0)
        printed = capsys.readouterr()
        return Done(exit_code, printed.out, printed.err)

    return run


def write_ten_tasks(folder: Path) -> None:
    """20 rollouts of 10 tasks, all of them scored 1; half of the answers of tasks 0 to 3 are wrong."""
    rows = rows_made(10, 2)
    texts = ["wrong" if row["_ng_task_index"] < 4 and row["_ng_rollout_index"] else "right" for row in rows]
    write_run(folder, rows, [rollout(row, text, 1.0) for row, text in zip(rows, texts, strict=True)])


def test_a_changed_verifier_is_asked_and_the_difference_is_told(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    write_ten_tasks(tmp_path)
    done = reverify()
    assert done.exit_code == 0, done.stderr
    assert "Mean reward: 1 before, 0.8 now: -0.2 (95 % interval" in done.stdout
    assert "Verdicts: 0 better, 4 worse, 16 as before" in done.stdout
    assert "Tokens:" not in done.stdout
    assert "Tasks that changed: 0 better, 4 worse, of 10" in done.stdout
    assert "task 3: 1 → 0.5" in done.stdout
    records = lines_in(tmp_path / "new.jsonl")
    assert len(records) == 20
    changed = next(record for record in records if record["reward"] == 0)
    assert changed["_ng_previous_verdict"] == {"reward": 1.0, "words": 5}
    assert changed["_ng_timing"]["duration_s"] == 12.5
    assert changed["agent_ref"] == {"name": "alpha"}
    delta = manifest_of(tmp_path / "new.jsonl")["delta"]
    assert delta["mean_reward"]["delta"] == pytest.approx(-0.2)
    assert delta["interval"]["low"] < -0.2 < delta["interval"]["high"] < 0.1
    assert environment.asked["/run"] == 0
    assert environment.asked["/seed_session"] == 0
    metrics = json.loads((tmp_path / "new_aggregate_metrics.json").read_text())
    assert metrics[0]["agent_metrics"]["mean/reward"] == pytest.approx(0.8)
    assert metrics[0]["agent_ref"] == {"name": "alpha"}


def test_the_tasks_that_changed_most_are_told_first(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    write_ten_tasks(tmp_path)
    rewards = {2: (0.5, 1.0), 5: (0.0, 0.0), 7: (1.0, 0.0)}
    environment.score = lambda body: rewards.get(body["_ng_task_index"], (1.0, 1.0))[body["_ng_rollout_index"]]
    done = reverify("+flips=2")
    assert "  task 5: 1 → 0\n  task 7: 1 → 0.5\n" in done.stdout
    assert "task 2:" not in done.stdout


def test_only_the_row_and_the_response_are_sent(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    write_ten_tasks(tmp_path)
    assert reverify("+limit=1").exit_code == 0
    [sent] = environment.verified
    assert set(sent) == {
        *("agent_ref", "responses_create_params", "level", "_ng_task_index", "_ng_rollout_index", "response", "session")
    }


def test_where_chooses_and_the_files_are_those_of_an_ordinary_run(
    tmp_path: Path, reverify: Reverify, environment: FakeEnvironment
) -> None:
    write_ten_tasks(tmp_path)
    done = reverify('+where=level == "hard" and row.level == "hard" and 4 < task and output_tokens == 2', "+json=true")
    assert done.exit_code == 0, done.stderr
    assert "Scoring rollouts: 100%" in done.stderr
    wanted = [(task, repeat) for task in (5, 7, 9) for repeat in (0, 1)]
    assert keys_in(tmp_path / "new.jsonl") == wanted == keys_in(tmp_path / "new_materialized_inputs.jsonl")
    told = json.loads(done.stdout)
    assert told["delta"]["rollouts"] == {"compared": 6, "better": 0, "worse": 0}
    assert told["finished"] == told["expected"] == 6


def test_a_name_that_nothing_has_is_refused_before_anything_is_asked(
    tmp_path: Path, reverify: Reverify, environment: FakeEnvironment
) -> None:
    write_ten_tasks(tmp_path)
    done = reverify("+where=lavel == 3")
    assert done.exit_code == 2
    assert "there is no 'lavel' (did you mean 'level'?)" in done.stderr
    assert not environment.asked["/verify"]


def test_it_goes_on_where_it_was_ended(tmp_path: Path, environment: FakeEnvironment, reverify: Reverify) -> None:
    write_ten_tasks(tmp_path)

    def out_of_order(body: dict[str, object]) -> object:
        if body["_ng_task_index"] == 7:
            return web.json_response({"detail": "the verifier crashed"}, status=500)
        return 1.0

    environment.score = out_of_order
    first = reverify("+max_attempts=9", "+fail_fast=false", "+rollout_timeout_s=60", "+max_failure_fraction=1.0")
    assert first.exit_code == 1
    assert "2 rollouts are missing" in first.stderr
    assert len(keys_in(tmp_path / "new.jsonl")) == 18
    environment.asked.clear()
    refused = reverify()
    assert refused.exit_code == 2
    assert "Output file already exists" in refused.stderr
    assert not environment.asked["/reverify_mode"]  # nothing is started or asked for what cannot be written
    environment.score = lambda body: 1.0
    environment.verified.clear()
    resumed = reverify("+resume_from_cache=true", "+max_attempts=20")
    assert resumed.exit_code == 0, resumed.stderr
    assert [sent["_ng_task_index"] for sent in environment.verified] == [7, 7]
    assert len(keys_in(tmp_path / "new.jsonl")) == 20
    other = reverify("+resume_from_cache=true", "+where=reward == 1")
    assert other.exit_code == 2
    assert "where: was None, now reward == 1" in other.stderr
    rollouts = (tmp_path / "old.jsonl").read_bytes()
    (tmp_path / "old.jsonl").write_bytes(rollouts.replace(b"right", b"wrong", 1))
    changed = reverify("+resume_from_cache=true")
    assert changed.exit_code == 2
    assert "rollouts: not the file that it was (old.jsonl)" in changed.stderr
    (tmp_path / "old.jsonl").write_bytes(rollouts)
    again = reverify("+overwrite=true")
    assert again.exit_code == 0, again.stderr
    assert (tmp_path / "new.previous").is_dir()


def test_ctrl_c_ends_in_good_order_and_the_rest_is_scored_later(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    write_ten_tasks(tmp_path)
    environment.score = lambda body: web.json_response({}, status=503) if body["_ng_task_index"] > 6 else 1.0
    files = ["+rollouts_jsonl_fpath=old.jsonl", "+output_jsonl_fpath=new.jsonl", "+num_samples_in_parallel=2"]
    command = Program("ng_reverify", f"+head_server.port={environment.port}", *files, "+max_attempts=1000")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "new.jsonl").exists() or len(keys_in(tmp_path / "new.jsonl")) < 14:
            assert time.monotonic() < deadline, command.stderr
            time.sleep(0.02)
        command.send(signal.SIGINT)
        assert command.wait() == 130, command.stderr
    finally:
        command.stop()
    environment.score = lambda body: 1.0
    done = reverify("+resume_from_cache=true", "+max_attempts=1000")
    assert done.exit_code == 0, done.stderr
    assert "Rollouts: 20 of 20 finished, 14 of them before" in done.stdout


@pytest.mark.parametrize(("mode", "reason"), [("unsupported", "the board is in the session"), (None, "does not say")])
def test_environments_that_need_the_live_session_are_refused_with_the_reason(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify, mode: str | None, reason: str
) -> None:
    write_ten_tasks(tmp_path)
    environment.mode = mode
    done = reverify()
    assert done.exit_code == 2
    assert "judge_of_words" in done.stderr
    assert reason in done.stderr
    assert not environment.asked["/verify"]
    assert not (tmp_path / "new.jsonl").exists()
    forced = reverify("+force=true")
    assert forced.exit_code == 0, forced.stderr
    assert "may be wrong" in forced.stderr
    assert len(keys_in(tmp_path / "unsafe_new.jsonl")) == 20
    assert len(environment.sessions) == 20


def write_manifest(path: Path, implementation: str, agent: str | None = "alpha") -> None:
    """The manifest of a run whose servers were an environment and perhaps an agent that played in it."""
    config: Row = {"envs": {"resources_servers": {implementation: {"entrypoint": "app.py"}}}}
    if agent is not None:
        ref = {"type": "resources_servers", "name": "envs"}
        config[agent] = {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py", "resources_server": ref}}}
    path.with_name(f"{path.stem}_manifest.json").write_text(json.dumps({"config": config}))


@pytest.mark.parametrize("agent", ["alpha", None])
def test_rollouts_of_another_environment_are_refused_in_one_line(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify, agent: str | None
) -> None:
    write_ten_tasks(tmp_path)
    write_manifest(tmp_path / "old.jsonl", "quiz", agent)
    done = reverify()
    assert done.exit_code == 2
    [said] = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert "of alpha in old.jsonl were made in the environment quiz, and fake_environment would score them" in said
    assert not environment.asked["/verify"]
    assert not (tmp_path / "new.jsonl").exists()
    assert reverify("+force=true").exit_code == 0
    assert (tmp_path / "unsafe_new.jsonl").exists()


def test_rollouts_of_the_same_environment_under_another_name_are_scored(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    write_ten_tasks(tmp_path)
    write_manifest(tmp_path / "old.jsonl", "fake_environment")
    assert reverify().exit_code == 0
    (tmp_path / "old_manifest.json").write_text("{}")
    assert reverify("+overwrite=true").exit_code == 0


def test_sessions_are_seeded_where_the_environment_needs_that(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    write_ten_tasks(tmp_path)
    environment.mode = "seeded"
    assert reverify().exit_code == 0
    assert len(environment.verified) == 20
    for sent in environment.verified:
        seeded = environment.sessions[sent["session"]]
        assert (seeded["_ng_task_index"], seeded["_ng_rollout_index"]) == (
            sent["_ng_task_index"],
            sent["_ng_rollout_index"],
        )


def failures_of(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """A judge that failed, a verifier that crashed, and a model that did: of the last the response is not whole."""
    stamped = [{key: row[key] for key in ("agent_ref", "_ng_task_index", "_ng_rollout_index")} for row in rows]
    crashed = {"_ng_failure_class": "agent_error", "_ng_failure_message": "it crashed", "_ng_failed_in": "verify"}
    times = {"_ng_started_at": "2026-01-01T00:00:00.000Z", "_ng_ended_at": "2026-01-01T00:00:07.000Z"}
    return [
        {**rows[0], **stamped[0], "response": response_of("right"), "reward": 0.0, "_ng_failure_class": "judge_failed"},
        {**stamped[1], **crashed, **times, "_ng_partial_response": response_of("right")},
        {**stamped[2], "_ng_failure_class": "timeout", "_ng_partial_response": response_of("right")},
        {**stamped[3], **crashed, "_ng_partial_response": {**response_of("right"), "_ng_items_left_out": 2}},
    ]


def write_run_with_failures(folder: Path) -> None:
    rows = rows_made(6)
    write_run(folder, rows, [rollout(row, "right", 0.5) for row in rows[4:]], failures_of(rows[:4]))


@pytest.mark.parametrize(("option", "scored"), [("judge_failed_only", [0]), ("failed_only", [0, 1])])
def test_what_only_failed_to_be_scored_is_scored_and_the_rest_is_kept(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify, option: str, scored: list[int]
) -> None:
    write_run_with_failures(tmp_path)
    kept = (tmp_path / "old.jsonl").read_bytes()
    done = reverify(f"+{option}=true")
    assert done.exit_code == 0, done.stderr
    assert sorted(sent["_ng_task_index"] for sent in environment.verified) == scored
    assert (tmp_path / "new.jsonl").read_bytes().startswith(kept)
    assert keys_in(tmp_path / "new.jsonl") == [(task, 0) for task in [*scored, 4, 5]]
    assert f"Scored for the first time: {len(scored)} rollouts, mean reward 1" in done.stdout
    again = reverify(f"+{option}=true", "+append=true")
    assert again.exit_code == 0, again.stderr
    assert len(environment.verified) == len(scored)


@pytest.mark.parametrize(("mode", "exit_code"), [(None, 0), ("unknown", 0), ("unsupported", 2)])
def test_where_a_judge_failed_an_environment_is_asked_unless_it_says_that_it_cannot_score(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify, mode: str | None, exit_code: int
) -> None:
    write_run_with_failures(tmp_path)
    environment.mode = mode
    assert reverify("+failed_only=true").exit_code == 2
    done = reverify("+judge_failed_only=true")
    assert done.exit_code == exit_code, done.stderr
    assert [sent["_ng_task_index"] for sent in environment.verified] == ([0] if exit_code == 0 else [])
    assert (tmp_path / "new.jsonl").exists() == (exit_code == 0)
    assert ("judge_of_words does not say" in done.stderr) == (exit_code == 0)


def test_verdicts_are_added_to_an_output_that_is_resumed(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    write_run_with_failures(tmp_path)
    environment.score = lambda body: web.json_response({**body, "reward": 0, "_ng_failure_class": "judge_failed"})
    assert reverify("+judge_failed_only=true").exit_code == 1
    environment.score = lambda body: 1.0
    done = reverify("+judge_failed_only=true", "+append=true", "+resume_from_cache=true")
    assert done.exit_code == 0, done.stderr
    assert keys_in(tmp_path / "new.jsonl") == [(0, 0), (4, 0), (5, 0)]


def test_a_verdict_has_what_its_row_had_and_goes_where_a_rollout_would(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    """The environment repeats nothing of the row; what was observed of the rollout stays, and goes to no metrics."""
    rows = [{**row, "skills_ref": {"path": "p", "hash": "h", "skills": []}} for row in rows_made(4)]
    observed: Row = {"ng_trajectory": {"gaps": []}, "ng_model_call_capture": {"calls": []}}
    write_run(tmp_path, rows, [{**rollout(row, "right", 1.0), **observed} for row in rows])
    flags: list[Row] = [{}, {"_ng_failure_class": "judge_failed"}, {"_ng_no_persist": True}]
    flags.append({"_ng_failure_class": "mine", "_ng_failure_terminal": True})
    environment.score = lambda body: web.json_response(
        {"response": body["response"], "reward": 1.0, **flags[body["_ng_task_index"]]}
    )
    assert reverify().exit_code == 1
    [kept] = lines_in(tmp_path / "new.jsonl")
    assert kept["_ng_task_index"] == kept["_ng_rollout_index"] == 0
    assert (kept["agent_ref"], kept["skills_ref"]) == (rows[0]["agent_ref"], rows[0]["skills_ref"])
    assert kept["ng_trajectory"] == {"gaps": []}
    assert keys_in(tmp_path / "new_failures.jsonl") == [(1, 0), (3, 0)]
    [sent] = environment.metric_requests
    assert sent["verify_responses"][0].keys().isdisjoint(observed)
    environment.verified.clear()
    reverify("+resume_from_cache=true", "+max_attempts=5")
    assert sorted(sent["_ng_task_index"] for sent in environment.verified) == [1, 2]


def test_all_stored_responses_are_those_of_the_failures_too(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    write_run_with_failures(tmp_path)
    assert reverify().exit_code == 0
    records = {record["_ng_task_index"]: record for record in lines_in(tmp_path / "new.jsonl")}
    assert sorted(records) == [0, 1, 4, 5]
    assert records[1]["_ng_previous_verdict"]["_ng_failure_class"] == "agent_error"
    assert records[1]["_ng_timing"]["duration_s"] == 7.0
    assert records[4]["_ng_previous_verdict"]["reward"] == 0.5
    assert "_ng_timing" not in records[0]  # nobody has noted when the judge failed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["+append=true"], "append needs +judge_failed_only=true"),
        (["+overwrite=true", "+resume_from_cache=true"], "contradict each other"),
        (["+overwrite=true", "+append=true", "+judge_failed_only=true"], "contradict each other"),
        (["+output_jsonl_fpath=old.jsonl"], "belongs to the run that is scored again"),
        (["+rollouts_jsonl_fpath=gone.jsonl"], "gone.jsonl does not exist"),
        (["+materialized_inputs_jsonl_fpath=gone.jsonl"], "gone.jsonl does not exist"),
        (["+where=reward > 1"], "no rollout with a response for which reward > 1 holds"),
        (["+where=reward >"], "+where, position"),
    ],
)
def test_mistakes_are_refused_before_anything_is_asked(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify, options: list[str], said: str
) -> None:
    write_ten_tasks(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    done = reverify(*options)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not environment.asked["/verify"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_rollouts_of_other_rows_are_refused(tmp_path: Path, environment: FakeEnvironment, reverify: Reverify) -> None:
    rows = rows_made(3)
    write_run(tmp_path, rows[:2], [rollout(row, "right", 1.0) for row in rows])
    done = reverify()
    assert done.exit_code == 2
    assert "1 of the 3 rollouts of old.jsonl have no row" in done.stderr
    write_run(tmp_path, rows[1:], [rollout(row, "right", 1.0) for row in rows[1:]], failures_of(rows * 2)[:1])
    done = reverify("+judge_failed_only=true")
    assert done.exit_code == 2
    assert "1 of the 1 rollouts of old_failures.jsonl have no row" in done.stderr


def test_several_environments_and_no_agent_that_names_one(
    tmp_path: Path, environment: FakeEnvironment, reverify: Reverify
) -> None:
    write_ten_tasks(tmp_path)
    block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": environment.port}
    environment.config = {"other": {"resources_servers": {"fake_environment": block}}}
    done = reverify()
    assert done.exit_code == 2
    assert "it cannot be told which environment scores the rollouts of 'alpha'" in done.stderr
    ref = {"type": "resources_servers", "name": "other"}
    environment.config["alpha"] = {
        "responses_api_agents": {"fake_agent": {**block, "port": 1, "resources_server": ref}}
    }
    named = reverify()
    assert named.exit_code == 0, named.stderr


def test_from_python_the_records_come_in_task_order(
    tmp_path: Path, environment: FakeEnvironment, head_config_of: Callable[[int], None]
) -> None:
    from nemo_gym.rollout_reverification import RolloutReverificationConfig
    from nemo_gym.runtime import run

    write_ten_tasks(tmp_path)
    head_config_of(environment.port)
    config = RolloutReverificationConfig(rollouts_jsonl_fpath="old.jsonl", output_jsonl_fpath="new.jsonl")
    records = run(RolloutReverificationHelper().run_from_config(config))
    assert [(record["_ng_task_index"], record["_ng_rollout_index"]) for record in records] == [
        (task, repeat) for task in range(10) for repeat in range(2)
    ]


@pytest.fixture
def head_config_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    from omegaconf import OmegaConf

    from nemo_gym import global_config

    def name(port: int) -> None:
        config = OmegaConf.create({"head_server": {"host": "127.0.0.1", "port": port}})
        monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", config)

    return name


class WithAgent(FakeEnvironment):
    """The same with the agent `alpha`, whose rollouts only fail to be scored."""

    def settings(self) -> Row:
        block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": self.port}
        ref = {"type": "resources_servers", "name": self.name}
        agent = {"alpha": {"responses_api_agents": {"fake_agent": {**block, "resources_server": ref}}}}
        return {**super().settings(), **agent}


@pytest.mark.parametrize(("mode", "asks_agent"), [("stateless", False), ("seeded", False), ("unsupported", True)])
def test_a_resumed_run_scores_what_it_failed_to_score_without_asking_the_agent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    asks_agent: bool,
) -> None:
    """Of both kinds: a judge that failed, and a verifier that crashed."""
    monkeypatch.setattr(RolloutCollectionHelper, "retry_pauses", RetryPauses(first_s=0.01, longest_s=0.02))
    write_rows(tmp_path / "in.jsonl", rows_of(4, "alpha"))

    async def unscored(row: Row, attempt: int) -> object:
        if row["n"] % 2:
            return {**row, "reward": 0.0, "response": response_of("right"), "_ng_failure_class": "judge_failed"}
        both = {"error": "it crashed", "partial_response": response_of("right"), "failed_in": "verify"}
        return web.json_response(both, status=500, headers={"x-nemo-gym-has-partial": "true"})

    with serve(WithAgent()) as run:
        assert isinstance(run, WithAgent)
        run.answer, run.mode = unscored, mode
        command = [f"+head_server.port={run.port}", "+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=out.jsonl"]
        with pytest.raises(SystemExit):
            collect.run([*command, "+max_attempts=1"])
        failures = lines_in(tmp_path / "out_failures.jsonl")
        assert [line.get("_ng_failed_in") for line in failures].count("verify") == 2
        run.answer, run.rows = right_away, []
        collect.run([*command, "+resume_from_cache=true", "+max_attempts=2"])
        assert len(run.rows) == (4 if asks_agent else 0)
        assert len(run.verified) == (0 if asks_agent else 4)
        assert len(run.sessions) == (4 if mode == "seeded" else 0)
    records = lines_in(tmp_path / "out.jsonl")
    assert sorted(record["n"] for record in records) == [0, 1, 2, 3]
    assert all(record["reward"] == 1.0 and "_ng_previous_verdict" not in record for record in records)
    assert "4 of 4 finished" in capsys.readouterr().out


def test_the_command_starts_the_environment_and_nothing_else(tmp_path: Path) -> None:
    """The bundled environment of multiple choice, whose rollouts were scored 0; its agent and its model are absent."""
    made = lines_in(PARENT_DIR / "resources_servers/mcqa/data/example_rollouts.jsonl")
    verdict = ("response", "reward", "extracted_answer")
    rows = [{key: value for key, value in record.items() if key not in verdict} for record in made]
    write_run(tmp_path, rows, [{**record, "reward": 0.0} for record in made])
    files = ["+rollouts_jsonl_fpath=old.jsonl", "+output_jsonl_fpath=new.jsonl"]
    command = Program("ng_reverify", "+environment=mcqa", *files, f"+head_server.port={free_port()}")
    try:
        assert command.wait() == 0, command.stderr
    finally:
        command.stop()
    assert "All 1 / 1 servers ready!" in command.stdout
    assert "Verdicts: 5 better, 0 worse, 0 as before" in command.stdout
    records = lines_in(tmp_path / "new.jsonl")
    assert [record["reward"] for record in records] == [1.0] * 5
    assert {record["_ng_previous_verdict"]["reward"] for record in records} == {0.0}


OWN_ENVIRONMENT = """
import sys

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, ReverifyMode, SimpleResourcesServer
)


class Config(BaseResourcesServerConfig):
    REVERIFY_MODE = ReverifyMode.UNSUPPORTED


class Own(SimpleResourcesServer):
    config: Config
    REVERIFY_REASON = "the board is gone"

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)
@@MORE@@

if __name__ == "__main__":
    Own.run_webserver()
"""
DECIDES_ITSELF = """
    async def get_reverify_mode(self) -> ReverifyMode:
        return ReverifyMode.UNSUPPORTED
"""
NOT_HERE = """
    assert "ng_reverify" not in sys.argv[0]
"""


@pytest.mark.parametrize(
    ("more", "is_started"),
    [("", False), (DECIDES_ITSELF, True), (NOT_HERE, True)],
    ids=["declared", "decides", "not_here"],
)
def test_an_environment_that_cannot_score_is_refused_before_it_is_started(
    tmp_path: Path, more: str, is_started: bool
) -> None:
    """One that decides while it runs, or that cannot be loaded here, has to be started for that."""
    write_ten_tasks(tmp_path)
    folder = tmp_path / "resources_servers/own"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(OWN_ENVIRONMENT.replace("@@MORE@@", more))
    (folder / "requirements.txt").write_text("")
    Path("own.yaml").write_text("own: {resources_servers: {own: {entrypoint: app.py, domain: other}}}\n")
    files = ["+rollouts_jsonl_fpath=old.jsonl", "+output_jsonl_fpath=new.jsonl"]
    command = Program("ng_reverify", "+config_paths=[own.yaml]", *files, f"+head_server.port={free_port()}")
    try:
        assert command.wait() == 2, command.stderr
    finally:
        command.stop()
    assert "own cannot score without the live session: the board is gone" in command.stderr
    assert ("servers ready!" in command.stdout) == is_started
    assert not (tmp_path / "new.jsonl").exists()


def test_what_an_earlier_run_settled_is_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    summarize_cache_usage(CacheKeysByStatus({(0, 0), (1, 0)}, {(2, 0)}, set()), [{}] * 5, [{}] * 2)
    assert "2 of 5 rollouts are left to be scored: 2 are scored, 1 must not be tried again, 0 were" in caplog.text
