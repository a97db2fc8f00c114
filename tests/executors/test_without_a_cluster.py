"""What `+executor=ray` says before there is a cluster, and that nothing else ever touches Ray."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.executors.ray import connected
from nemo_gym.paths import PARENT_DIR
from tests.executors.conftest import AGENT, clean_environment, write_environment

EVERY_MODULE = """
import importlib, pkgutil, nemo_gym
for module in pkgutil.walk_packages(nemo_gym.__path__, "nemo_gym."):
    if "scaffold" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def run(folder: Path, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=folder, env=clean_environment() | environment, text=True, capture_output=True, timeout=180
    )


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def collect_on_ray(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    write_environment(folder)
    given = [f"+agent_name={AGENT}", "+input_jsonl_fpath=train.jsonl", "+output_jsonl_fpath=results/out.jsonl"]
    return run(folder, script("ng_collect_rollouts"), "+executor=ray", *given, *options)


def refused(done: "subprocess.CompletedProcess[str]", folder: Path) -> str:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "results").exists()
    return done.stderr


def test_a_url_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    done = collect_on_ray(
        tmp_path, "+num_shards=2", "+config_paths=[config.yaml]", "+output_jsonl_fpath=s3://bucket/out.jsonl"
    )
    assert "a path on this machine is wanted, no URL" in refused(done, tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["+config_paths=[config.yaml]"], "needs +num_shards"),
        (["+config_paths=[config.yaml]", "+shard=1/2"], "runs all shards of a run"),
        (["+num_shards=2"], "each shard starts its own servers"),
    ],
)
def test_what_a_run_on_ray_needs_is_said_before_anything_starts(tmp_path: Path, options: list[str], says: str) -> None:
    assert says in refused(collect_on_ray(tmp_path, *options), tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    done = collect_on_ray(tmp_path, "+num_shards=2", "+config_paths=[config.yaml]")

    assert f"-e '{PARENT_DIR}[ray]'" in refused(done, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed; `make test-ray` runs it")
def test_a_cluster_that_is_not_there_is_named_with_what_to_do() -> None:
    with (
        pytest.raises(ConfigError, match=r"127\.0\.0\.1:1: no Ray cluster .* `ray start --head`"),
        connected("127.0.0.1:1", {}, {}, {}),
    ):
        pass


def test_neither_importing_everything_nor_a_run_on_one_machine_imports_ray(tmp_path: Path) -> None:
    write_environment(tmp_path)
    decoy = tmp_path / "decoy/ray"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    path = os.pathsep.join([str(decoy.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run(tmp_path, sys.executable, "-c", EVERY_MODULE, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    given = ["+config_paths=[config.yaml]", "+split=train", "+output_jsonl_fpath=out.jsonl", "+head_server.port=0"]
    done = run(tmp_path, script("ng_e2e_collect_rollouts"), *given, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr

    assert not (tmp_path / "imported").exists()
    run(tmp_path, sys.executable, "-c", "import ray", PYTHONPATH=path)
    assert (tmp_path / "imported").exists()  # the decoy works
