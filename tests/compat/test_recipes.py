"""The config files that trainers' published recipes name: they are here under those paths, and fit together."""

from pathlib import Path

import pytest

from nemo_gym.paths import PARENT_DIR
from tests.programs import run_program

RECIPE = (
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
    "resources_servers/math_with_judge/configs/math_with_judge.yaml",
    "resources_servers/code_gen/configs/code_gen.yaml",
    "resources_servers/workplace_assistant/configs/workplace_assistant.yaml",
    "resources_servers/mcqa/configs/mcqa.yaml",
    "resources_servers/instruction_following/configs/instruction_following.yaml",
    "resources_servers/structured_outputs/configs/structured_outputs_json.yaml",
)
POLICY = ("+policy_base_url=http://127.0.0.1:1/v1", "+policy_api_key=none", "+policy_model_name=m")


def test_the_environments_of_a_recipe_are_all_here(tmp_path: Path) -> None:
    assert [path for path in RECIPE if not (PARENT_DIR / path).is_file()] == []
    done = run_program("ng_validate", f"+config_paths=[{','.join(RECIPE)}]", *POLICY, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Config is valid." in done.stdout
    for agent in ("workplace_assistant_simple_agent", "structured_outputs_simple_agent", "mcqa_simple_agent"):
        assert agent in done.stdout


def test_an_environment_that_is_elsewhere_is_found_in_the_users_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = "resources_servers/theirs/configs/theirs.yaml"
    missing = run_program("ng_validate", f"+config_paths=[{wanted}]", folder=tmp_path)
    assert missing.returncode == 2
    assert f"'{wanted}'" in missing.stderr
    assert "NEMO_GYM_EXTRA_ROOTS=<checkout>" in missing.stderr

    file = tmp_path / "checkout" / wanted
    file.parent.mkdir(parents=True)
    (file.parents[1] / "app.py").write_text("")
    file.write_text("theirs: {resources_servers: {theirs: {entrypoint: app.py, domain: other}}}\n")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path / "checkout"))
    found = run_program("ng_validate", f"+config_paths=[{wanted}]", folder=tmp_path)
    assert "not found" not in found.stderr
    assert "theirs" in found.stdout + found.stderr
