import logging
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.combine.shards import DifferentConfigsError, check_configs
from nemo_gym.runs.manifest import Expected, FileFingerprint, RunManifest

A, B = Path("a.jsonl"), Path("b.jsonl")


def manifest(agent: str = "agent", **changes: Any) -> RunManifest:
    options = {"responses_create_params": {"temperature": 1.0}, "num_repeats": 4, **changes.pop("options", {})}
    return RunManifest(agents={agent: Expected(tasks=1, rollouts=4)}, options=options, **changes)


def prompt(path: str, digit: str) -> FileFingerprint:
    return FileFingerprint(path=path, sha256=digit * 64, size_bytes=9)


def servers(port: int = 1, *, max_steps: int = 3, url: str = "http://a/v1", judge: str = "small") -> dict[str, Any]:
    agent = {
        "host": "h",
        "port": port,
        "max_steps": max_steps,
        "resources_server": {"type": "resources_servers", "name": "env"},
        "model_server": {"type": "responses_api_models", "name": "model"},
        "datasets": [{"jsonl_fpath": f"slice-{port}.jsonl"}],
    }
    pace = {"requests_per_minute": port * 60, "max_concurrent_requests": port}
    return {
        "agent": {"responses_api_agents": {"simple_agent": agent}},
        "env": {"resources_servers": {"env": {"judge_base_url": url, "judge": judge, "port": port + 1}}},
        "model": {"responses_api_models": {"openai_model": pace}},
        "unrelated": {"resources_servers": {"other": {"port": port, "setting": port}}},
    }


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (manifest(), manifest(options={"responses_create_params": {"temperature": 0.5}}), "params.temperature: 1.0 in"),
        (manifest(), manifest(options={"num_repeats": {"_default": 8}}), r"num_repeats: 4 in a\.jsonl, 8 in b\.jsonl"),
        (manifest(), manifest(options={"num_repeats_add_seed": True}), "num_repeats_add_seed: False in"),
        (manifest(models=["m-1"]), manifest(models=["m-2"]), r"models: \['m-1'\] in a\.jsonl, \['m-2'\]"),
        (
            manifest(),
            manifest(prompt=prompt("p.yaml", "f")),
            r"prompt_config: not set in a.jsonl, p\.yaml \(9 bytes\) in b",
        ),
        (
            manifest(prompt=prompt("p.yaml", "0")),
            manifest(prompt=prompt("p.yaml", "f")),
            r"prompt_config: p\.yaml \(9 bytes\) in a\.jsonl, p\.yaml \(9 bytes\) with other content in b\.jsonl",
        ),
        (manifest(config=servers()), manifest(config=servers(max_steps=9)), r"max_steps: 3 in a\.jsonl, 9 in"),
        (manifest(config=servers()), manifest(config=servers(judge="big")), r"env\.judge: 'small' in"),
    ],
)
def test_what_shapes_rollouts_must_be_the_same(one: RunManifest, other: RunManifest, named: str) -> None:
    with pytest.raises(DifferentConfigsError, match=named):
        check_configs({A: one, B: other}, allow_changed=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (manifest(), manifest()),
        (manifest(config=servers(1)), manifest(config=servers(7, url="http://b/v1"))),
        (manifest(options={"input_jsonl_fpath": "1", "limit": 5}), manifest(options={"input_jsonl_fpath": "2"})),
        (manifest(prompt=prompt("p.yaml", "0")), manifest(prompt=prompt("elsewhere/p.yaml", "0"))),
        (manifest("alpha", models=["m-1"]), manifest("beta", models=["m-2"])),
    ],
)
def test_addresses_paces_inputs_and_shards_of_other_agents_may_differ(one: RunManifest, other: RunManifest) -> None:
    assert check_configs({A: one, B: other}, allow_changed=False) == []


def test_differences_can_be_accepted(caplog: pytest.LogCaptureFixture) -> None:
    manifests = {A: manifest(models=["m-1"]), B: manifest(models=["m-2"])}

    with caplog.at_level(logging.WARNING):
        assert len(check_configs(manifests, allow_changed=True)) == 1
    assert "['m-2'] in b.jsonl" in caplog.text
