"""The page about collecting rollouts names what exists, and nothing else."""

import json
import re
from pathlib import Path

from nemo_gym.collect.summary import RunSummary
from nemo_gym.paths import PARENT_DIR
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutAggregationConfig, RolloutCollectionConfig
from nemo_gym.runs.options.sharding import SlurmConfig
from nemo_gym.runs.record import FailureClass
from nemo_gym.schemas.cli_config import ControlConfig, StatusConfig

PAGE = (PARENT_DIR / "docs" / "collecting-rollouts.md").read_text()
COMMANDS = (
    RolloutCollectionConfig,
    E2ERolloutCollectionConfig,
    RolloutAggregationConfig,
    SlurmConfig,
    ControlConfig,
    StatusConfig,
)
OTHERS = {"set", "config_paths", "head_server", "global_aiohttp_client_request_debug", "json", "num_replicas"}


def test_every_option_on_the_page_exists() -> None:
    named = set(re.findall(r"[^+]\+([a-z_]+)", PAGE))

    assert named - {field for command in COMMANDS for field in command.model_fields} - OTHERS == set()


def test_every_failure_class_is_explained() -> None:
    assert [kind for kind in FailureClass if f"`{kind}`" not in PAGE] == []


def test_every_file_of_a_run_is_listed() -> None:
    paths = RolloutPaths(Path("rollouts.jsonl"))
    files = [*paths.of_one_run, paths.lock, paths.previous]

    assert [path.name for path in files if f"`{path.name}" not in PAGE] == []


def test_the_json_summary_has_what_the_page_promises() -> None:
    summary = json.loads(json.dumps(RunSummary(RolloutPaths(Path("out.jsonl"))).as_json()))
    promised = PAGE.partition("one line of JSON instead:")[2].partition(".\n")[0]

    assert set(re.findall(r"`([a-z_]+)`", promised)) <= set(summary)


def test_the_first_page_of_commands_is_the_readmes() -> None:
    readme = (PARENT_DIR / "README.md").read_text()
    commands = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)

    assert all(line in readme for line in commands[0].splitlines() if line and not line.startswith("#"))
