"""A pace over real replicas: what they send together, what the endpoint sees, and what the run says of it."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_gym.global_config import GlobalConfigDictParserConfig, another_global_config_dict, set_global_config_dict
from nemo_gym.launch.end_to_end import collect_with_servers
from nemo_gym.runs.options import RolloutCollectionConfig
from tests.collection.pace_lab import (
    FREE,
    MATCHING,
    PACED,
    ROW,
    endpoint_allowing,
    model_at,
    most_within,
    pace_lab,
    times_in,
)

PER_MINUTE = 900
ROLLOUTS = 60


def test_replicas_keep_one_pace_together_and_what_they_waited_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pace_lab(tmp_path, 2, PER_MINUTE * 1.5, requests_per_minute=PER_MINUTE) as lab:
        summary = lab.collect(PACED, ROLLOUTS)
        sent, arrived = lab.sent(), lab.arrived()
        lab.collect(FREE, ROLLOUTS)
        refused = sum(status == 429 for _, status in lab.arrived())

    assert summary.exit_code == 0
    assert [status for _, status in arrived] == [200] * ROLLOUTS
    assert len({pid for _, pid in sent}) == 2  # each of them had its part
    assert most_within([at for at, _ in sent], 2.0) <= PER_MINUTE / 30 * 1.1 + 1
    assert sent[-1][0] - sent[0][0] >= (ROLLOUTS - 1) / PER_MINUTE * 60 * 0.95
    assert [line for line in summary.retries.lines() if line.startswith("Pace: http://127.0.0.1:")]
    assert refused > 10  # of an agent whose model server keeps no pace


def test_a_shard_with_servers_of_its_own_keeps_to_its_part_of_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    Path("in.jsonl").write_text("".join(json.dumps({**ROW, "number": number}) + "\n" for number in range(28)))
    options = RolloutCollectionConfig(
        agent_name=PACED, input_jsonl_fpath="in.jsonl", output_jsonl_fpath="out.jsonl", shard="2/4"
    )
    with endpoint_allowing(1e6, tmp_path / "arrived.log") as port, another_global_config_dict():
        given = {"config_paths": [str(MATCHING)], "head_server": {"port": 0}}
        config = OmegaConf.create({**given, "policy_model": model_at(port, requests_per_minute=480)})
        parser = GlobalConfigDictParserConfig(initial_global_config_dict=config, skip_load_from_cli=True)
        summary = collect_with_servers(options, set_global_config_dict(parser))
    arrived = [at for at, _ in times_in(tmp_path / "arrived.log")]

    assert summary is not None
    assert (summary.exit_code, len(arrived)) == (0, 7)
    assert arrived[-1] - arrived[0] >= 2.5  # 6 x 0.5 s, a quarter of eight a second
    assert "The pace of model servers is for all 4 shards: this one keeps to 1/4 of it" in caplog.text
