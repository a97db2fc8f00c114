"""One command from data to scores, started as users do; whatever ends it, nothing is left running."""

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from omegaconf import OmegaConf

from nemo_gym.errors import ConfigError
from nemo_gym.launch.end_to_end import plan_end_to_end, prepare_rows
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutCollectionConfig
from tests.ports import free_range
from tests.programs import Piped, ensure_running, still_running

ENVIRONMENT = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
AGENT = "example_single_tool_call_simple_agent"
Start = Callable[..., Piped]


def row(content: str) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": content}]}, "note": content}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """An environment with a training set of four rows, a validation set that is not there, and a model."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row(f"task {number}")) + "\n" for number in range(4)))
    licensed = {"license": "MIT", "num_repeats": 2}
    datasets = [
        {"name": "t", "type": "train", "jsonl_fpath": "train.jsonl", **licensed},
        {"name": "v", "type": "validation", "jsonl_fpath": "gone.jsonl", **licensed},
    ]
    return {
        "config_paths": [ENVIRONMENT],
        AGENT: {"responses_api_agents": {"simple_agent": {"datasets": datasets}}},
        "policy_model": {"responses_api_models": {"scripted_model": {"entrypoint": "app.py"}}},
    }


@pytest.fixture
def start(tmp_path: Path, config: dict[str, Any]) -> Iterator[Start]:
    """Start the command; what it started is gone when the test ends."""
    started: list[Piped] = []

    def run(*arguments: str) -> Piped:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        given = ["+config_paths=[config.yaml]", "+split=train", "+output_jsonl_fpath=results/out.jsonl", *arguments]
        started.append(Piped("ng_e2e_collect_rollouts", *given, folder=tmp_path))
        return started[-1]

    ensure_running()
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}  # by pid: start times shift with the clock
    yield run
    deadline = time.monotonic() + 15
    while left := [child for child in still_running(me) if child.pid not in before]:
        if time.monotonic() > deadline:
            for child in left:
                child.kill()
            pytest.fail(f"left behind: {left}")
        time.sleep(0.05)


def finish(run: Piped) -> tuple[int, str, str]:
    printed, errors = run.communicate(timeout=120)
    return run.wait(), printed, errors


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_runs_that_start_at_the_same_moment_all_come_up(start: Start, tmp_path: Path) -> None:
    """Four runs of three servers and a head server, whose usual port one of them gets, and two ports to spare."""
    low = free_range(17)
    ports = [f"+port_range_low={low}", f"+port_range_high={low + 16}"]
    for attempt in range(3):
        outputs = [f"results/{attempt}_{number}.jsonl" for number in range(4)]
        begun = [start(*ports, f"++output_jsonl_fpath={output}") for output in outputs]
        ended = [finish(run) for run in begun]
        assert [code for code, _, _ in ended] == [0] * 4, ended
        assert [len(lines_in(tmp_path / output)) for output in outputs] == [8] * 4


def test_data_is_prepared_servers_run_and_rollouts_are_scored(start: Start, tmp_path: Path) -> None:
    with socket.socket() as other_run:  # the usual port of the head server is not free
        other_run.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other_run.bind(("127.0.0.1", 11000))
            other_run.listen()
        except OSError:
            pass  # then somebody else has it
        code, printed, errors = finish(start("+num_repeats=2", "+limit=6", "+json=true"))
    assert code == 0, errors
    summary = json.loads(printed)
    assert (summary["finished"], summary["missing"]) == (12, 0)  # 6 of the 8 prepared lines, twice each
    rollouts = lines_in(tmp_path / "results/out.jsonl")
    keys = sorted((each["note"], each["_ng_task_index"], each["_ng_rollout_index"]) for each in rollouts)
    assert keys == [(f"task {task}", task, rollout) for task in range(3) for rollout in range(4)]
    assert {each["reward"] for each in rollouts} == {1.0}
    assert (tmp_path / "results/out_aggregate_metrics.json").is_file()
    prepared = tmp_path / "results/out/preprocessed_datasets"
    assert sorted(path.name for path in prepared.iterdir()) == ["train.jsonl", "train_metrics.json"]

    (tmp_path / "train.jsonl").unlink()  # a resumed run goes on with the rows it had, and may be extended
    code, _, errors = finish(start("+num_repeats=2", "+limit=8", "+resume_from_cache=true", "+head_server.port=0"))
    assert code == 0, errors
    assert "Using the rows prepared before" in errors
    assert lines_in(tmp_path / "results/out.jsonl")[:12] == rollouts
    assert len(lines_in(tmp_path / "results/out.jsonl")) == 16


def test_rows_of_a_given_file_are_rolled_out_in_place_of_data_sets(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text('prompt,note\nOne?,first\n"Two,\nthree?",second\n')
    given = ["+split=null", "+input_jsonl_fpath=mine.csv", "+head_server.port=0"]
    code, _, errors = finish(start(*given))
    assert code == 0, errors
    rollouts = sorted(lines_in(tmp_path / "results/out.jsonl"), key=lambda each: each["_ng_task_index"])
    asked = [each["responses_create_params"]["input"] for each in rollouts]
    assert (asked, [each["note"] for each in rollouts]) == (["One?", "Two,\nthree?"], ["first", "second"])
    assert {each["agent_ref"]["name"] for each in rollouts} == {AGENT}
    assert not (tmp_path / "results/out").exists()  # nothing is prepared

    code, _, errors = finish(start(*given, "+num_repeats=2", "+resume_from_cache=true"))
    assert code == 0, errors
    assert len(lines_in(tmp_path / "results/out.jsonl")) == 4


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (None, [], "mine.jsonl: there is no such file"),
        ('{"note": 1}\n', [], "mine.jsonl: rows [1] have no responses_create_params"),
        ('{"prompt": "a"\n', [], "mine.jsonl: line 1: not valid JSON"),
        ('{"prompt": "a"}\n', ["+agent_name=exmple_single_tool_call_simple_agent"], f"did you mean {AGENT!r}?"),
        ('{"prompt": "a", "agent_ref": {"name": "other"}}\n', [], "has no such agent. Its agents: example_single"),
    ],
)
def test_a_given_file_that_cannot_be_rolled_out_ends_it_before_servers_start(
    start: Start, tmp_path: Path, rows: str | None, options: list[str], said: str
) -> None:
    if rows is not None:
        (tmp_path / "mine.jsonl").write_text(rows)
    code, printed, errors = finish(start("+input_jsonl_fpath=mine.jsonl", *options))
    assert (code, printed) == (2, "")
    assert said in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert "servers" not in errors
    assert not (tmp_path / "results").exists()


def test_rows_without_agent_want_a_name_where_there_are_several_agents(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"prompt": "a"}\n')
    environment = OmegaConf.load(Path(__file__).parents[3] / ENVIRONMENT)
    config["second"] = OmegaConf.to_container(OmegaConf.merge(environment, config))[AGENT]  # type: ignore[index, call-overload]
    merged = OmegaConf.merge(environment, config)
    options = {"output_jsonl_fpath": "results/out.jsonl", "input_jsonl_fpath": "mine.jsonl"}
    with pytest.raises(ConfigError, match=r"No agent specified for rows \[1\]: pass \+agent_name"):
        plan_end_to_end(E2ERolloutCollectionConfig.model_validate(options), merged)  # type: ignore[arg-type]
    made = plan_end_to_end(E2ERolloutCollectionConfig.model_validate({**options, "agent_name": "second"}), merged)  # type: ignore[arg-type]
    assert made.as_json()["agents"] == {"second": {"tasks": 1, "rollouts": 1, "owed": 1}}


def test_a_run_says_which_rows_it_wants() -> None:
    with pytest.raises(ValueError, match=r"\+split=<train\|validation\|benchmark\|example>, or \+input_jsonl_fpath"):
        E2ERolloutCollectionConfig.model_validate({"output_jsonl_fpath": "out.jsonl"})


def test_several_that_are_started_at_once_get_a_head_port_each(start: Start, tmp_path: Path) -> None:
    outputs = [f"+output_jsonl_fpath=results/{number}.jsonl" for number in range(3)]
    runs = [start(output, "+limit=1", "+num_repeats=1", "+json=true") for output in outputs]
    for number, run in enumerate(runs):
        code, _, errors = finish(run)
        assert code == 0, errors
        assert len(lines_in(tmp_path / f"results/{number}.jsonl")) == 1


def wait_for_lines(path: Path, count: int, run: Piped) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def slow_model(config: dict[str, Any]) -> None:
    config["policy_model"]["responses_api_models"]["scripted_model"]["script"] = {"latency_s": 0.4}


def test_ctrl_c_leaves_a_run_that_can_be_resumed(start: Start, tmp_path: Path, slow_model: None) -> None:
    options = ["+num_samples_in_parallel=1", "+head_server.port=0"]
    run = start(*options)
    wait_for_lines(tmp_path / "results/out.jsonl", 2, run)
    run.send_signal(signal.SIGINT)
    code, _, errors = finish(run)
    assert code == 130, errors
    assert "Traceback" not in errors
    assert "+resume_from_cache=true" in errors
    before = lines_in(tmp_path / "results/out.jsonl")
    assert 2 <= len(before) < 8

    code, _, errors = finish(start(*options, "+num_samples_in_parallel=8", "+resume_from_cache=true"))
    assert code == 0, errors
    after = lines_in(tmp_path / "results/out.jsonl")
    assert after[: len(before)] == before
    assert len({(each["_ng_task_index"], each["_ng_rollout_index"]) for each in after}) == len(after) == 8


def test_ctrl_c_while_servers_start_stops_what_was_started(start: Start, tmp_path: Path) -> None:
    run = start("+head_server.port=0")
    assert run.stderr is not None
    while "Collate samples" not in run.stderr.readline():  # what comes next is the start
        assert run.poll() is None
    deadline = time.monotonic() + 30
    while not psutil.Process(run.pid).children():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    code, _, errors = finish(run)
    assert code == 130, errors
    assert "Traceback" not in errors
    assert not (tmp_path / "results/out.jsonl").exists()


def test_a_server_that_dies_ends_the_run_with_its_name(start: Start, tmp_path: Path, slow_model: None) -> None:
    run = start("+num_samples_in_parallel=1", "+head_server.port=0")
    wait_for_lines(tmp_path / "results/out.jsonl", 1, run)
    for child in psutil.Process(run.pid).children():
        if "host" in " ".join(child.cmdline()):
            child.kill()
    code, _, errors = finish(run)
    assert code == 1, errors
    assert "finished unexpectedly" in errors
    assert "Traceback" not in errors
    assert lines_in(tmp_path / "results/out.jsonl")


OWN_ENVIRONMENT = """
from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer

class Own(SimpleResourcesServer):
    async def verify(self, body: BaseVerifyRequest):
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)

    def compute_metrics(self, tasks):
        return {{"version": {version}}}

if __name__ == "__main__":
    Own.run_webserver()
"""


def test_a_complete_run_shows_changed_metrics_without_starting_a_server(
    start: Start, config: dict[str, Any], tmp_path: Path
) -> None:
    app = tmp_path / "resources_servers" / "own" / "app.py"
    app.parent.mkdir(parents=True)
    (app.parent / "requirements.txt").touch()
    app.write_text(OWN_ENVIRONMENT.format(version=1))
    config["own"] = {"resources_servers": {"own": {"entrypoint": "app.py", "domain": "other"}}}
    config[AGENT]["responses_api_agents"]["simple_agent"]["resources_server"] = {
        "type": "resources_servers",
        "name": "own",
    }
    code, _, errors = finish(start("+head_server.port=0"))
    assert code == 0, errors
    path = tmp_path / "results/out_aggregate_metrics.json"
    assert json.loads(path.read_bytes())[0]["agent_metrics"]["version"] == 1

    app.write_text(OWN_ENVIRONMENT.format(version=2))
    code, _, errors = finish(start("+resume_from_cache=true"))

    assert code == 0, errors
    assert "servers" not in errors.lower()  # none is started, so none is ready
    renewed = path.read_bytes()
    assert json.loads(renewed)[0]["agent_metrics"]["version"] == 2

    app.write_text("import a_package_that_is_not_here")
    code, printed, errors = finish(start("+resume_from_cache=true", "+json=true"))

    assert code == 0, errors
    assert "the metrics on disk are shown as they are" in errors
    assert json.loads(printed)["finished"] == 8
    assert path.read_bytes() == renewed


def test_bad_rows_end_it_before_anything_is_started(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "q"}\n')
    code, printed, errors = finish(start())
    assert code == 2
    assert "train.jsonl, line 1: it has no responses_create_params" in errors
    assert printed == ""
    assert not (tmp_path / "results").exists()


def test_captures_that_would_go_nowhere_end_it_before_anything_is_written(start: Start, tmp_path: Path) -> None:
    code, _, errors = finish(start("+observability_enabled=true", "+model_call_capture_dir=captures"))
    assert code == 2
    assert errors.splitlines()[-1].startswith("Error: model_call_capture_dir must be an absolute path")
    assert not (tmp_path / "results").exists()


def test_a_dry_run_stops_before_collecting(start: Start, tmp_path: Path) -> None:
    code, printed, errors = finish(start("+dry_run=true", "+head_server.port=0"))
    assert code == 0, errors
    assert "Dry run passed" in printed
    assert not (tmp_path / "results/out.jsonl").exists()


def test_a_plan_prepares_nothing_and_starts_nothing(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    merged = OmegaConf.merge(OmegaConf.load(Path(__file__).parents[3] / ENVIRONMENT), config)
    before = sorted(tmp_path.rglob("*"))

    def plan(split: str) -> dict[str, Any]:
        options = {"output_jsonl_fpath": "results/out.jsonl", "split": split, "num_repeats": 3}
        chosen = E2ERolloutCollectionConfig.model_validate(options)
        return plan_end_to_end(chosen, merged).as_json()  # type: ignore[arg-type]

    made = plan("train")
    assert made["agents"] == {AGENT: {"tasks": 4, "rollouts": 24, "owed": 24}}  # each row is there twice
    assert made["first_request"]["note"] == "task 0"
    assert "results/out/preprocessed_datasets" in made["files"]
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        plan("validation")
    assert sorted(tmp_path.rglob("*")) == before


def prepared(config: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    given = {"output_jsonl_fpath": "results/out.jsonl", "split": "train", **options}
    chosen = E2ERolloutCollectionConfig.model_validate(given)
    merged = OmegaConf.merge(OmegaConf.load(Path(__file__).parents[3] / ENVIRONMENT), config)
    return lines_in(prepare_rows(chosen, merged))  # type: ignore[arg-type]


def test_prepared_rows_are_made_anew_unless_told_otherwise(config: dict[str, Any]) -> None:
    assert len(prepared(config)) == 8
    Path("train.jsonl").write_text(json.dumps(row("new")) + "\n")
    assert len(prepared(config, reuse_existing_data_preparation=True)) == 8
    assert len(prepared(config, resume_from_cache=True)) == 8
    with pytest.raises(ConfigError, match="conflicting aggregate metrics"):
        prepared(config)  # beside the data, its metrics tell of other rows
    assert len(prepared(config, overwrite_metrics_conflicts=True)) == 2
    assert not list(Path("results").rglob("*conflict*"))
    assert len(prepared(config, output_jsonl_fpath="results/other.jsonl", reuse_existing_data_preparation=True)) == 2


def test_a_prompt_takes_the_place_of_the_declared_one_and_an_agent_can_be_chosen(config: dict[str, Any]) -> None:
    Path("train.jsonl").write_text('{"note": "seven"}\n')
    Path("p.yaml").write_text("user: 'Say {note}'\n")
    rows = prepared(config, prompt_config="p.yaml", agent_name=AGENT)
    assert rows[0]["responses_create_params"]["input"] == [{"role": "user", "content": "Say seven"}]
    assert not Path("train_metrics.json").exists()
    with pytest.raises(ConfigError, match="declares no data set of the agent 'nobody'"):
        prepared(config, agent_name="nobody")


def test_examples_can_be_rolled_out_too(config: dict[str, Any]) -> None:
    config[AGENT]["responses_api_agents"]["simple_agent"]["datasets"] = [
        {"name": "e", "type": "example", "jsonl_fpath": "train.jsonl"}
    ]
    assert len(prepared(config, split="example")) == 4


def test_rows_that_come_with_the_package_leave_nothing_below_the_current_folder_but_the_output(
    config: dict[str, Any],
) -> None:
    del config[AGENT]
    there = set(Path().rglob("*"))
    assert prepared(config, split="example")
    assert {path.parts[0] for path in set(Path().rglob("*")) - there} == {"results"}


@pytest.mark.parametrize(
    ("output", "folder"),
    [("r/out.jsonl", "r/out"), ("out.v1.jsonl", "out.v1"), ("r/out", "r/out_data")],
)
def test_prepared_rows_have_a_folder_beside_the_output(output: str, folder: str) -> None:
    config = E2ERolloutCollectionConfig.model_validate({"output_jsonl_fpath": output, "split": "train"})
    assert config.prepared_dirpath == Path(folder) / "preprocessed_datasets"


def test_every_option_of_ng_collect_rollouts_is_an_option_here() -> None:
    there = set(RolloutCollectionConfig.model_fields) - {"input_jsonl_fpath"}
    assert there <= set(E2ERolloutCollectionConfig.model_fields)
    options = {
        "output_jsonl_fpath": "results/out.jsonl",
        "split": "train",
        "num_repeats": {"a": 2},
        "limit": 3,
        "json": True,
        "upload_rollouts": False,
        "responses_create_params": {"temperature": 0.5},
        "agent_name": "a",
        "prompt_config": "p.yaml",
    }
    passed_on = E2ERolloutCollectionConfig.model_validate(options).for_rows_in(Path("rows.jsonl"))
    assert passed_on.input_jsonl_fpath == "rows.jsonl"
    assert (passed_on.num_repeats, passed_on.limit, passed_on.json_format) == ({"a": 2}, 3, True)
    assert passed_on.upload_rollouts is False
    assert passed_on.responses_create_params == {"temperature": 0.5}
    assert (passed_on.agent_name, passed_on.prompt_config) == (None, None)  # they are in the rows


def test_a_server_that_refuses_its_block_is_a_users_mistake(start: Start) -> None:
    ended = start("++policy_model.responses_api_models.scripted_model.script=7", "+head_server.port=0")
    _, errors = ended.communicate(timeout=120)
    assert ended.returncode == 2
    last = errors.splitlines()[-1]
    assert last.startswith(
        "Error: Server `policy_model` cannot be started: the config of server 'policy_model' does not"
    )
    assert "script" in last
