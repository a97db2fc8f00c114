"""What there is to choose from, as a table and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.command import Command, command_named

list_agents = command_named("list_agents")
list_benchmarks = command_named("list_benchmarks")
list_environments = command_named("list_environments")
list_models = command_named("list_models")


SHOP = """
# Buying things; a remark that nobody needs.
shop:
  resources_servers:
    shop:
      entrypoint: app.py
      domain: agent
      description: Buy what a list says
      allow_unsandboxed: false
      token: ${oc.env:SHOP_TOKEN}
      stock: ${stock_url}
      seed: ???
      other: {type: resources_servers, name: elsewhere}

shop_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: shop}
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
        - {name: e, type: example, jsonl_fpath: resources_servers/shop/data/e.jsonl}
        - {name: t, type: train, jsonl_fpath: resources_servers/shop/data/t.jsonl, license: MIT}
"""


@pytest.fixture
def _shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "extra/resources_servers/shop"
    for name, text in {
        "configs/shop.yaml": SHOP,
        "configs/shop_broken.yaml": "a: [",
        "data/e.jsonl": "{}\n{}\n{}\n",
        "requirements.txt": "nemo-gym\ntorch==0.0.1\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path / "extra"))


def as_json(command: Command[Any], capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    command.run(["+json=true", *arguments])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("_shop")
def test_an_environment_is_listed_with_its_tasks_and_its_needs(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = as_json(list_environments, capsys, "+query=shop_agent")
    assert found == {
        "name": "shop",
        "description": "Buy what a list says",
        "domain": "agent",
        "agents": ["shop_agent"],
        "tasks": {"example": 3, "train": None},
        "needs": [
            "stock_url",
            "$SHOP_TOKEN",
            "seed",
            "elsewhere",
            "a sandbox",
            "a GPU",
            "package torch (not installed)",
        ],
        "config_path": "resources_servers/shop/configs/shop.yaml",
        "option": "+environment=shop",
    }
    assert "shop/shop_broken is left out: Malformed YAML" in caplog.text
    list_environments.run(["+query=Buy What"])
    heading, columns, row = capsys.readouterr().out.splitlines()
    assert heading == "Available environments (1); use one with +environment=<name>"
    assert columns.split() == ["Name", "Domain", "Description", "Tasks", "Needs"]
    assert row.startswith(
        "shop  agent   Buy what a list says  3 example, train not there yet  stock_url, $SHOP_TOKEN, "
    )


def test_every_component_of_this_distribution_is_listed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    environments = {each["name"]: each for each in as_json(list_environments, capsys)}
    assert environments["mcqa"]["tasks"] == {"example": 5}
    assert environments["mcqa"]["needs"] == []
    assert environments["code_gen"]["needs"] == ["a sandbox"]
    assert environments["equivalence_llm_judge"]["needs"] == ["a judge model"]
    assert "needs no key" in environments["mcqa/mcqa_scripted"]["description"]
    models = {each["name"]: each for each in as_json(list_models, capsys)}
    assert models["vllm_model"]["needs"] == ["policy_api_key", "policy_base_url", "policy_model_name"]
    assert models["vllm_model"]["option"] == "+model=vllm:<url>#<name>"
    assert models["scripted_model"]["needs"] == []
    agents = {each["name"]: each for each in as_json(list_agents, capsys)}
    assert agents["remote_agent"]["needs"] == ["remote_agent_url", "resources_server.name"]
    assert {"simple_agent", "function_agent"} <= set(agents)
    for each in (*environments.values(), *models.values(), *agents.values()):
        assert each["description"], each
    gsm8k = {each["name"]: each for each in as_json(list_benchmarks, capsys)}["gsm8k"]
    assert set(gsm8k["tasks"]) == {"benchmark"}
    assert (gsm8k["needs"], gsm8k["option"]) == (["package math-verify"], "+benchmark=gsm8k")


def test_tables_and_queries_of_the_other_lists(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_models.run(["+query=openruter"])
    heading, columns, row = capsys.readouterr().out.splitlines()
    assert (heading, columns.split()) == ("Available models (1)", ["Name", "Description", "Needs", "Option"])
    assert row.startswith("inference_provider/openrouter  OpenRouter: ")
    assert row.endswith("+model=openrouter:<name>")
    list_agents.run(["+query=zebra"])
    assert capsys.readouterr().out.startswith("No agents match 'zebra'. There are: function_agent, ")
    monkeypatch.setattr("nemo_gym.paths.PARENT_DIR", tmp_path)
    list_agents.run([])
    assert capsys.readouterr().out == f"No agents found below {tmp_path}\n"
