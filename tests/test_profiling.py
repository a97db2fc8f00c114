import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ConfigError
from nemo_gym.profiling import Profiler

GPROF2DOT = """
import sys
target, source = sys.argv[sys.argv.index("-o") + 1], sys.argv[-1]
functions = [line[3:] for line in open(source) if line.startswith("fn=")]
open(target, "w").write("digraph {" + " ".join(functions) + "}")
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What profiles are drawn with, as small as can be."""
    (tmp_path / "gprof2dot.py").write_text(GPROF2DOT)
    dot = tmp_path / "dot"
    dot.write_text('#!/bin/sh\ncp "$2" "$4"\n')
    dot.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def work() -> int:
    return sum(number * number for number in range(1000))


@pytest.mark.usefixtures("programs")
def test_a_profile_is_a_table_a_call_graph_and_a_picture(tmp_path: Path) -> None:
    profiler = Profiler(name="mine", base_profile_dir=tmp_path / "profiles", required_str="test_profiling")

    profiler.start()
    work()
    profiler.stop()

    table = (tmp_path / "profiles/mine.log").read_text().splitlines()
    heading = next(number for number, line in enumerate(table) if "ncalls" in line)
    assert table[heading + 1 :]
    assert all("test_profiling" in line for line in table[heading + 1 :])
    graph = (tmp_path / "profiles/mine.callgrind").read_text()
    assert "fn=work:" in graph
    assert "calls=1 " in graph
    assert "work:" in (tmp_path / "profiles/mine.dot").read_text()
    assert (tmp_path / "profiles/mine.png").read_text() == (tmp_path / "profiles/mine.dot").read_text()


def test_without_the_programs_it_draws_with_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profiler(name="mine", base_profile_dir=tmp_path)
    with pytest.raises(ModuleNotFoundError, match="pip install gprof2dot"):
        profiler.start()
    (tmp_path / "gprof2dot.py").write_text(GPROF2DOT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install Graphviz"):
        profiler.start()


@pytest.mark.usefixtures("programs")
def test_a_server_profiles_itself_while_it_serves(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from nemo_gym.base_resources_server import (
        BaseResourcesServerConfig,
        BaseVerifyRequest,
        BaseVerifyResponse,
        SimpleResourcesServer,
    )
    from nemo_gym.server_utils import ServerClient

    class Mine(SimpleResourcesServer):
        async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
            raise NotImplementedError

    settings = OmegaConf.create({"profiling_enabled": True, "profiling_results_dirpath": str(tmp_path / "profiles")})
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = ServerClient(head_server_config=head, global_config_dict=settings)
    config = BaseResourcesServerConfig(host="127.0.0.1", port=2, entrypoint="app.py", name="mine")
    with TestClient(Mine(config=config, server_client=client).complete_app()) as caller:
        assert caller.get("/stats").json() == {"profile": str(tmp_path / "profiles/mine")}
        (tmp_path / "profiles/mine/mine.png").unlink()

    assert (tmp_path / "profiles/mine/mine.png").exists()
    assert sys.getprofile() is None
