"""What a shard is told in secret does not stand on its command line."""

import json
from pathlib import Path

import pytest

from nemo_gym.executors import shard
from nemo_gym.executors.caps import Instruction
from nemo_gym.executors.shard import ShardOrder
from nemo_gym.runs.options.sharding import Shard

PROGRAM = """
import json, os, pathlib, sys
pathlib.Path("seen.json").write_text(json.dumps([sys.argv[1:], os.environ["NEMO_GYM_SECRET_OPTIONS"]]))
"""


def test_options_with_secrets_travel_apart_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noting_program.py").write_text(PROGRAM)
    monkeypatch.setattr(shard, "_PROGRAM", "noting_program")
    secrets = ["+policy_api_key=hunter22", "++auth_token=s3cret", "+mlflow_tracking_uri=http://me:pass1234@host"]
    order = ShardOrder(
        shard=Shard(0, 1),
        attempt=1,
        arguments=["+limit=3", *secrets],
        output=tmp_path / "out.jsonl",
        token=tmp_path / "noting_program.py",
        folder=tmp_path,
        environment={"PYTHONPATH": str(tmp_path)},
    )

    end = shard.run_shard(order, lambda report: Instruction())

    assert end.exit_code == 0, end
    shown, secret = json.loads((tmp_path / "seen.json").read_text())
    assert shown == ["+limit=3"]
    assert json.loads(secret) == secrets
