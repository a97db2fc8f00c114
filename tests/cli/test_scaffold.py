import ast
import json
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from nemo_gym.cli.command import command_named
from nemo_gym.cli.scaffolds import create_resources_server
from nemo_gym.collect.environments import Environment, Mode
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.launch.reverify_modes import declared_mode
from nemo_gym.paths import PARENT_DIR

main = command_named("init_resources_server")


def test_a_new_environment_has_every_part(tmp_path: Path) -> None:
    folder = create_resources_server("resources_servers/my_env")
    assert folder == tmp_path / "resources_servers/my_env"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "app.py",
        "configs/my_env.yaml",
        "data/.gitignore",
        "data/example.jsonl",
        "README.md",
        "requirements.txt",
        "tests/test_app.py",
    }
    assert not any("@@" in (folder / file).read_text() for file in files)
    names = {node.name for node in ast.parse((folder / "app.py").read_text()).body if isinstance(node, ast.ClassDef)}
    assert "MyEnvResourcesServer" in names
    assert (folder / "requirements.txt").read_text() == "nemo-gym[dev]\n"
    ignored = (folder / "data/.gitignore").read_text().split()
    assert {"*train.jsonl", "*validation.jsonl", "*example_prepare.jsonl"} <= set(ignored)


def test_its_config_defines_the_server_an_agent_and_data_sets() -> None:
    folder = create_resources_server("resources_servers/my_env")
    assert folder is not None
    model = {"policy_model": {"responses_api_models": {"dummy_model": {"entrypoint": "app.py"}}}}
    config = OmegaConf.create(yaml.safe_load((folder / "configs/my_env.yaml").read_text()) | model)
    parser = GlobalConfigDictParser()
    instances = parser.filter_for_server_instance_configs(parser.parse_no_environment(config))
    names = {instance.name: instance for instance in instances}
    assert set(names) == {"my_env_resources_server", "my_env_simple_agent", "policy_model"}
    datasets = {dataset.type: dataset for dataset in names["my_env_simple_agent"].datasets or ()}
    assert set(datasets) == {"train", "validation", "example"}
    rows = Path(datasets["example"].jsonl_fpath).read_text().splitlines()
    assert len([json.loads(row) for row in rows]) == 5


def test_it_says_that_stored_responses_can_be_scored_again() -> None:
    create_resources_server("resources_servers/my_env")
    config = OmegaConf.load("resources_servers/my_env/configs/my_env.yaml")
    assert isinstance(config, DictConfig)
    assert declared_mode(config, "my_env_resources_server") == Environment("my_env_resources_server", Mode.STATELESS)


def test_a_name_with_capitals_keeps_its_folder() -> None:
    folder = create_resources_server("resources_servers/MyEnv")
    assert folder is not None
    assert (folder / "configs/myenv.yaml").is_file()
    assert "from resources_servers.MyEnv.app import MyEnvResourcesServer" in (folder / "tests/test_app.py").read_text()


def test_inside_the_checkout_it_requires_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.cli.scaffolds.PARENT_DIR", tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    folder = create_resources_server("resources_servers/my_env")
    assert folder is not None
    assert (folder / "requirements.txt").read_text() == "-e nemo-gym[dev] @ ../../\n"
    ours = PARENT_DIR / "resources_servers/example_single_tool_call/requirements.txt"
    assert ours.read_text() == "-e nemo-gym[dev] @ ../../\n"


@pytest.mark.parametrize(
    ("entrypoint", "suggestion"),
    [
        ("my_env", "resources_servers/my_env"),
        ("responses_api_agents/my_agent", "resources_servers/my_agent"),
        ("resources_servers/my-env", "resources_servers/my_env"),
        ("resources_servers/2048", "resources_servers/env_2048"),
        ("resources_servers/class", "name of a Python module"),
    ],
)
def test_another_place_or_an_odd_name_is_refused_with_a_suggestion(
    entrypoint: str, suggestion: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=suggestion):
        create_resources_server(entrypoint)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "resources_servers/my_env").mkdir(parents=True)
    with pytest.raises(SystemExit, match="2"):
        main.run(["+entrypoint=resources_servers/my_env"])
    assert "Folder already exists, and nothing was written" in capsys.readouterr().err
    assert list((tmp_path / "resources_servers/my_env").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "resources_servers").write_text("a file")
    with pytest.raises(ConfigError, match="cannot write"):
        create_resources_server("resources_servers/my_env")
