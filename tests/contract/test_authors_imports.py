"""Authors copy what they see: what is bundled is built from public modules alone."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = "docs/examples/resources_servers"
BUNDLED = (
    "resources_servers",
    "responses_api_agents",
    "responses_api_models",
    "benchmarks",
    "docs/examples/resources_servers",
)
PUBLIC = {
    "nemo_gym",
    *(
        f"nemo_gym.{name}"
        for name in (
            "base_resources_server",
            "base_responses_api_agent",
            "base_responses_api_model",
            "benchmarks",
            "config_types",
            "global_config",
            "judge",
            "openai_utils",
            "prompt",
            "responses_converter",
            "reward_profile",
            "rollout_collection",
            "rollout_correlation",
            "rollout_observability",
            "sandbox",
            "server_status",
            "server_utils",
            "testing",
            "train_data_utils",
            "workers",
        )
    ),
}


def inside_names(text: str) -> list[str]:
    """The modules of nemo_gym that a program imports and that are not public, private names of public ones included."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name not in PUBLIC]
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_public = node.module in PUBLIC
            found += [
                f"{node.module}.{alias.name}"
                for alias in node.names
                if not is_public or alias.name.startswith("_") or (ROOT / _file(node.module, alias.name)).exists()
            ]
    return [name for name in found if name.partition(".")[0] == "nemo_gym" and name not in PUBLIC]


def _file(module: str, name: str) -> Path:
    return Path(*module.split("."), f"{name}.py")


@pytest.mark.parametrize("folder", BUNDLED)
def test_what_is_bundled_imports_only_what_is_public(folder: str) -> None:
    programs = [path for path in sorted((ROOT / folder).rglob("*.py")) if ".venv" not in path.parts]
    inside = {str(path.relative_to(ROOT)): names for path in programs if (names := inside_names(path.read_text()))}

    assert programs
    assert not inside, f"give these a public name first, with a docstring: {inside}"


def test_every_public_module_says_so() -> None:
    untold = []
    for module in sorted(PUBLIC - {"nemo_gym"}):
        path = ROOT / Path(*module.split("."))
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        if not (ast.get_docstring(ast.parse(text)) or "").startswith("PUBLIC:"):
            untold.append(module)

    assert not untold


@pytest.mark.parametrize(
    ("program", "inside"),
    [
        ("import nemo_gym.http.request", ["nemo_gym.http.request"]),
        ("from nemo_gym.servers.json_route import reads_only", ["nemo_gym.servers.json_route.reads_only"]),
        ("from nemo_gym.server_utils import reads_only", []),
        ("from nemo_gym.sandbox import process", ["nemo_gym.sandbox.process"]),
        ("from nemo_gym.global_config import _GLOBAL_CONFIG_DICT", ["nemo_gym.global_config._GLOBAL_CONFIG_DICT"]),
        ("from nemo_gym import judge", []),
    ],
)
def test_names_from_inside_are_found_however_they_are_imported(program: str, inside: list[str]) -> None:
    assert inside_names(program) == inside
