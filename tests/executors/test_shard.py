"""What a shard's process is told, and what is heard of it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from nemo_gym.collect.progress import ProgressState
from nemo_gym.executors import shard
from nemo_gym.executors.caps import Instruction, Report
from nemo_gym.executors.shard import ShardOrder
from nemo_gym.runs.options.sharding import Shard

NOTING = """
import json, os, pathlib, sys
pathlib.Path("seen.json").write_text(json.dumps([sys.argv[1:], os.environ["NEMO_GYM_SECRET_OPTIONS"]]))
"""
TALKING = """
import json
said = {said!r}
for finished in range(3):
    said["state"]["finished"] = finished
    print(json.dumps(said))
"""


def order_for(program: Path, *arguments: str) -> ShardOrder:
    return ShardOrder(
        shard=Shard(0, 1),
        attempt=1,
        arguments=arguments,
        output=program.with_name("out.jsonl"),
        token=program,
        folder=program.parent,
        environment={"PYTHONPATH": str(program.parent)},
    )


def test_options_with_secrets_travel_apart_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "noting_program.py"
    program.write_text(NOTING)
    monkeypatch.setattr(shard, "_PROGRAM", "noting_program")
    secrets = ["+policy_api_key=hunter22", "++auth_token=s3cret", "+mlflow_tracking_uri=http://me:pass1234@host"]

    end = shard.run_shard(order_for(program, "+limit=3", *secrets), lambda report: Instruction())

    assert end.exit_code == 0, end
    shown, secret = json.loads((tmp_path / "seen.json").read_text())
    assert shown == ["+limit=3"]
    assert json.loads(secret) == secrets


def test_the_last_report_has_the_last_words_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"state": asdict(ProgressState()), "caps": {}, "in_flight": {}, "is_draining": True, "loads": {}}
    said |= {"answers": {}, "spent": {}, "allowance": {}, "is_held": False}
    program = tmp_path / "talking_program.py"
    program.write_text(TALKING.format(said=said))
    monkeypatch.setattr(shard, "_PROGRAM", "talking_program")
    read = shard._Child._read

    def read_late(child: shard._Child) -> None:
        child._process.wait(60)  # as on a machine that has other things to do
        read(child)

    monkeypatch.setattr(shard._Child, "_read", read_late)
    reports: list[Report] = []

    def tell(report: Report) -> Instruction:
        reports.append(report)
        return Instruction()

    end = shard.run_shard(order_for(program), tell)

    assert end.exit_code == 0, end
    assert reports[-1].state is not None
    assert reports[-1].state.finished == 2
