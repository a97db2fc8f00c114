import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Script = Callable[..., subprocess.CompletedProcess[str]]

AGENT = """
my_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: my_tools}
      model_server: {type: responses_api_models, name: policy_model}
"""
TOOLS = """
my_tools:
  resources_servers:
    string_match: {entrypoint: app.py, domain: other}
"""
MODEL = """
policy_model:
  responses_api_models:
    scripted_model: {entrypoint: app.py}
"""
FAULTY = (
    TOOLS
    + AGENT
    + """
      max_stepz: 3
      quux: 4
      datasets:
        - {name: mine, type: example, jsonl_fpath: nowhere/example.jsonl}
        - {name: elsewhere, type: train, jsonl_fpath: nowhere/train.jsonl, license: MIT,
           source: {type: huggingface, repo_id: some/rows}}
        - {name: bench, type: benchmark, jsonl_fpath: nowhere/bench.jsonl, prepare_script: nowhere/prepare.py}
        - {name: asked, type: benchmark, jsonl_fpath: rows.jsonl, prompt_config: nowhere/prompt.yaml}
idle_agent:
  responses_api_agents:
    simple_agent: {entrypoint: app.py, resources_server: {type: resources_servers, name: my_tools}, max_steps: many}
no_folder:
  resources_servers:
    string_mach: {entrypoint: app.py, domain: other}
no_entrypoint:
  resources_servers:
    string_match: {entrypoint: main.py, domain: other}
slow:
  resources_servers:
    string_match: {entrypoint: app.py, domain: other, pattern_timeout_s: soon}
hoisted:
  resources_servers:
    string_match: {entrypoint: app.py, domain: other, isolation: hoisted}
misnamed:
  resource_servers:
    string_match: {entrypoint: app.py, domain: other}
policy_model:
  responses_api_models:
    scripted_model: {entrypoint: app.py, script: {rules: [{wen: {}, reply: {text: hi}}]}}
lost_script:
  responses_api_models:
    scripted_model: {entrypoint: app.py, script: nowhere/script.yaml}
num_replicas: several
1: {2: 2026-01-01}
"""
)
ELSEWHERE = """
from pathlib import Path
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer

class {name}Config(BaseResourcesServerConfig):
    strength: int = 1

class {name}(SimpleResourcesServer):
    config: {name}Config

    def model_post_init(self, context):
        Path({mark!r}).touch()

    async def verify(self, body):
        raise NotImplementedError
"""


def test_a_sound_config_is_said_to_be_valid_with_its_servers(script: Script, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(AGENT + TOOLS)
    done = script("ng_validate", "+config_paths=[mine.yaml]")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "Config is valid."
    assert sorted(line.split(maxsplit=2) for line in lines[1:]) == [
        ["my_agent", "responses_api_agents/simple_agent"],
        ["my_tools", "resources_servers/string_match"],
        ["policy_model", "responses_api_models/dummy_model", "(stand-in: no model is configured)"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_model_of_ones_own_takes_the_place_of_the_stand_in(script: Script, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(AGENT + TOOLS + MODEL)
    assert "stand-in" not in script("ng_validate", "+config_paths=[mine.yaml]").stdout


def test_whatever_would_keep_a_server_from_starting_is_a_line_with_file_and_key(script: Script, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(FAULTY)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    done = script("ng_validate", "+config_paths=[mine.yaml]")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml", "rows.jsonl"}
    file = tmp_path / "mine.yaml"
    agents, tools, models = "responses_api_agents", "resources_servers", "responses_api_models"
    data = f"{file}: my_agent.{agents}.simple_agent.datasets: the data set"
    expected = [
        f"{file}: misnamed.resource_servers: 'resource_servers' is no type of server; did you mean",
        f"{file}: no_folder.{tools}.string_mach: there is no folder {tools}/string_mach; did you mean 'string_match'?",
        f"{file}: no_entrypoint.{tools}.string_match: `entrypoint: main.py` does not exist in",
        f"{file}: hoisted.{tools}.string_match: `isolation: hoisted` is not one of hosted, process, venv",
        f"{file}: slow.{tools}.string_match.pattern_timeout_s: Input should be a valid number",
        f"{file}: my_agent.{agents}.simple_agent.max_stepz: SimpleAgentConfig has no setting 'max_stepz'; did you mean",
        f"{file}: idle_agent.{agents}.simple_agent.model_server: Field required",
        f"{file}: idle_agent.{agents}.simple_agent.max_steps: Input should be a valid integer",
        f"{file}: policy_model.{models}.scripted_model: the `script` block does not work: rules[0].wen: there is no",
        f"{file}: lost_script.{models}.scripted_model: the script {tmp_path / 'nowhere/script.yaml'} cannot be read",
        f"{data} 'mine' (example) of 'my_agent': nowhere/example.jsonl is not there and nothing says where to get it",
        f"{data} 'bench' (benchmark) of 'my_agent': nowhere/bench.jsonl is missing a valid prepare script: nowhere/",
        f"{data} 'asked' (benchmark) of 'my_agent': rows.jsonl: ",
        "ng_run cannot run like this:",
    ]
    lines = done.stderr.splitlines()
    assert f"Error: {len(expected)} problems in the configuration:" in lines
    for beginning in expected:
        assert [line for line in lines if line.partition(". ")[2].startswith(beginning)], beginning
    assert "num_replicas" in done.stderr
    assert f"Warning: {file}: my_agent.{agents}.simple_agent.quux: nobody reads this key" in lines


def test_servers_from_elsewhere_are_checked_without_building_them_as_far_as_they_can_be_imported(
    script: Script, tmp_path: Path
) -> None:
    sound = ELSEWHERE.format(name="Sound", mark=str(tmp_path / "built"))
    sources = {
        "sound": f"from nemo_gym.global_config import get_global_config_dict as config\nprint(config().sound)\n{sound}",
        "heavy": f"import a_library_that_is_nowhere\n{sound}",
        "leaving": "raise SystemExit(0)",
        "dying": "import os\nos._exit(7)",
        "garbled": "class (",
    }
    config = ""
    for name, source in sources.items():
        folder = tmp_path / "resources_servers" / name
        folder.mkdir(parents=True)
        (folder / "app.py").write_text(source)
        (folder / "requirements.txt").write_text("pydantic\n")
        config += f"{name}:\n  resources_servers:\n    {name}: {{entrypoint: app.py, domain: other, strenght: 2}}\n"
    (tmp_path / "mine.yaml").write_text(config)
    done = script("ng_validate", "+config_paths=[mine.yaml]", "++sound.resources_servers.sound.strength=much")
    assert (done.returncode, done.stdout) == (2, "")
    where = f"{tmp_path / 'mine.yaml'}: "
    assert done.stderr.splitlines() == [
        "Warning: the settings of server 'heavy' are not checked, because ModuleNotFoundError: No module named "
        "'a_library_that_is_nowhere'",
        "Warning: the settings of server 'leaving' are not checked, because SystemExit: 0",
        "Warning: the settings of server 'dying' are not checked, because the process that imports its module ended "
        "with code 7",
        "Error: 2 problems in the configuration:",
        f"1. {where}sound.resources_servers.sound.strength: Input should be a valid integer, unable to parse string as "
        "an integer (it is 'much')",
        f"2. {where}garbled.resources_servers.garbled.entrypoint: "
        f"{tmp_path / 'resources_servers/garbled/app.py'}, line 1: invalid syntax",
    ]
    assert not (tmp_path / "built").exists()


def test_every_problem_is_listed_at_once_and_numbered(script: Script, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(AGENT + TOOLS.replace("my_tools:", "other_tools:"))
    done = script("ng_validate", "+config_paths=[mine.yaml]", "+num_repaets=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: 2 problems in the configuration:\n1. unknown option 'num_repaets'")
    assert "\n2. Could not find 'my_tools'" in done.stderr


def test_captures_that_would_go_nowhere_are_a_problem_before_a_start(script: Script) -> None:
    done = script("ng_validate", "+environment=example_single_tool_call", "+observability_enabled=true")
    assert (done.returncode, done.stdout) == (2, "")
    problem = done.stderr.splitlines()[-1]
    assert problem.startswith("Error: model_call_capture_dir is required when observability_enabled=true")


def test_a_single_problem_stands_alone(script: Script) -> None:
    done = script("ng_validate", "+config_paths=[missing.yaml]")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: config_paths entry 'missing.yaml'")


def test_a_config_without_servers_is_valid_but_nothing_to_start(script: Script, tmp_path: Path) -> None:
    assert script("ng_validate").stdout == (
        "Config is valid.\nIt configures no server, so there is nothing to start.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_it_is_the_named_files_that_are_checked_not_what_a_launcher_handed_over(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", "{}")
    (tmp_path / "mine.yaml").write_text(AGENT)
    assert script("ng_validate", "+config_paths=[mine.yaml]").returncode == 2
