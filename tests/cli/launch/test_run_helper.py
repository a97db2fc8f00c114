import json
import os
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import nemo_gym.global_config
from nemo_gym.cli import RunHelper
from nemo_gym.errors import NoServerInstancesError

WriteServer = Callable[..., Path]
StartRun = Callable[..., RunHelper]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def head_url(helper: RunHelper) -> str:
    head = helper._server_client.head_server_config
    return f"http://{head.host}:{head.port}"


def instances(helper: RunHelper) -> dict[str, dict[str, Any]]:
    listed = json.loads(get(f"{head_url(helper)}/server_instances"))
    return {f"{entry['process_name']}/{entry['replica']}": entry for entry in listed}


def test_servers_written_elsewhere_run_in_their_folder_with_their_config(
    write_server: WriteServer, start_run: StartRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_server("one")
    write_server("two")
    helper = start_run("one", "two")

    listed = instances(helper)
    assert set(listed) == {"one/0", "two/0"}
    one = listed["one/0"]
    config = yaml.safe_load(json.loads(get(f"{head_url(helper)}/global_config_dict_yaml")))
    secret = nemo_gym.global_config.get_global_config_dict()["session_secret"]
    assert get(one["url"]) == f"{folder} {config['run_id']} {secret}"
    assert {key: one[key] for key in ("server_type", "name", "config_path", "dir_path", "entrypoint", "isolation")} == {
        "server_type": "resources_servers",
        "name": "one",
        "config_path": "one",
        "dir_path": str(folder),
        "entrypoint": "app.py",
        "isolation": "process",
    }
    assert one["status"] == "success"
    assert os.getpgid(one["pid"]) == one["pid"] != os.getpgid(0)
    helper.poll()
    with pytest.raises(RuntimeError, match="started its servers already"):
        helper.start()
    helper.poll()
    output = capsys.readouterr().out
    assert output.endswith("All 2 / 2 servers ready!\n")
    assert one["url"] in output
    assert head_url(helper) in output


def test_own_modules_shadow_nothing_and_the_folders_root_is_importable(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str]
) -> None:
    write_server(
        "one",
        "import utils, nemo_gym\nfrom resources_servers.one.utils import WHAT\nassert utils.WHAT == WHAT == 'mine'\n"
        "import resources_servers.example_single_tool_call.app\n" + apps["plain"],
        utils="WHAT = 'mine'",
    )
    assert "one/0" in instances(start_run("one"))


def test_hosted_servers_share_one_process_and_replicas_are_listed(
    start_run: StartRun, write_server: WriteServer, capsys: pytest.CaptureFixture[str]
) -> None:
    write_server("alone")
    tool: dict[str, Any] = {
        "resources_servers": {"example_single_tool_call": {"entrypoint": "app.py", "domain": "other"}}
    }
    helper = start_run("alone", tool=tool, other_tool=tool, num_replicas=2)
    listed = instances(helper)
    assert set(listed) == {"tool/0", "other_tool/0", "tool/1", "other_tool/1", "alone/0"}
    assert listed["tool/0"]["pid"] == listed["other_tool/0"]["pid"] != listed["tool/1"]["pid"]
    assert listed["tool/0"]["isolation"] == "hosted"
    assert len({entry["port"] for entry in listed.values()}) == 5
    config = yaml.safe_load(json.loads(get(f"{head_url(helper)}/global_config_dict_yaml")))
    configured = config["tool"]["resources_servers"]["example_single_tool_call"]["port"]
    assert listed["tool/0"]["port"] == configured
    for entry in listed.values():
        assert get(entry["url"])
    output = capsys.readouterr().out
    assert "tool (replica 1)" in output
    assert output.endswith("All 3 / 3 servers ready!\n")


def test_a_server_that_cannot_be_hosted_moves_to_a_process_of_its_own_and_the_log_says_why(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    write_server("one", apps["gym"].replace("if __name__", "class Second(Mine): pass\n\nif __name__"))
    with caplog.at_level("INFO"):
        helper = start_run("one", blocks={"one": {"isolation": "hosted"}}, num_replicas=2)
    assert instances(helper)["one/0"]["isolation"] == "process"
    assert len(instances(helper)) == 1
    assert caplog.text.count("'one' gets a process of its own") == 1
    assert "it defines Mine, Second" in caplog.text


def test_a_gym_server_is_hosted_when_its_block_says_so(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str]
) -> None:
    write_server("one", apps["gym"])
    write_server("two", apps["gym"])
    listed = instances(start_run("one", "two", blocks={"one": {"isolation": "hosted"}}))
    assert listed["one/0"]["isolation"] == "hosted"
    assert listed["two/0"]["isolation"] == "process"
    assert json.loads(get(listed["one/0"]["url"])) == json.loads(get(listed["two/0"]["url"])) == {"status": "ok"}


def test_a_server_in_an_environment_of_its_own_finds_what_it_asked_for_and_nemo_gym(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str], tmp_path: Path
) -> None:
    folder = write_server(
        "one",
        "import sys, nemo_gym.global_config, omegaconf\nassert '/venvs/' in sys.prefix, sys.prefix\n" + apps["plain"],
        requirements="-e nemo-gym[dev] @ ../../\nnumpy\n",
    )
    helper = start_run("one", blocks={"one": {"isolation": "venv"}}, uv_venv_dir=str(tmp_path / "envs"))
    assert instances(helper)["one/0"]["isolation"] == "venv"
    assert get(instances(helper)["one/0"]["url"]).startswith(str(folder))
    assert len([path for path in (tmp_path / "envs" / "venvs").iterdir() if path.is_dir()]) == 1


def test_an_environment_that_is_present_is_used_when_asked_for(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str]
) -> None:
    folder = write_server("one", apps["plain"], requirements="surely-not-installed\n")
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").touch()
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    root = str(nemo_gym.PARENT_DIR)
    helper = start_run("one", skip_venv_if_present=True, uv_venv_dir=root)
    assert instances(helper)["one/0"]["isolation"] == "venv"


def test_stopping_a_server_with_workers_stops_the_workers(
    write_server: WriteServer,
    start_run: StartRun,
    apps: dict[str, str],
    processes_of: Callable[[int], list[int]],
    is_gone: Callable[[int], bool],
    wait_for: Callable[[Callable[[], object]], None],
) -> None:
    write_server("one", apps["gym"])
    helper = start_run("one", blocks={"one": {"num_workers": 2}})
    entry = instances(helper)["one/0"]
    assert json.loads(get(entry["url"])) == {"status": "ok"}
    workers = processes_of(entry["pid"])
    assert len(workers) >= 2
    helper.shutdown()
    wait_for(lambda: all(map(is_gone, [entry["pid"], *workers])))


def test_logs_go_to_one_file_per_server(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str], tmp_path: Path
) -> None:
    write_server("one")
    write_server("two", "print('importing two')\n" + apps["gym"])
    helper = start_run("one", "two", blocks={"two": {"isolation": "hosted"}}, nemo_gym_log_dir=str(tmp_path / "logs"))
    helper.shutdown()
    assert (tmp_path / "logs" / "one.log").read_text() == "listening\n"
    assert (tmp_path / "logs" / "two.log").read_text() == "importing two\n"


def test_a_helper_works_in_another_thread_and_can_be_used_again(write_server: WriteServer, start_run: StartRun) -> None:
    write_server("one")
    outcome: list[object] = []

    def work() -> None:
        try:
            for _ in range(2):
                helper = start_run("one")
                outcome.append(instances(helper)["one/0"]["status"])
                helper.shutdown()
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert outcome == ["success", "success"]


def test_shutting_down_leaves_nothing_and_may_be_repeated(
    write_server: WriteServer, start_run: StartRun, is_gone: Callable[[int], bool], tmp_path: Path
) -> None:
    write_server("one")
    helper = start_run("one")
    pid = instances(helper)["one/0"]["pid"]
    config_file = helper._config_file
    assert config_file is not None
    assert config_file.stat().st_mode & 0o777 == 0o600
    helper.shutdown()
    helper.shutdown()
    assert is_gone(pid)
    assert not config_file.exists()
    RunHelper().shutdown()


def test_what_the_user_set_about_the_run_is_kept(write_server: WriteServer, start_run: StartRun) -> None:
    folder = write_server("one")
    helper = start_run("one", run_id="my-run", session_secret="my-secret")
    assert get(instances(helper)["one/0"]["url"]) == f"{folder} my-run my-secret"


def test_a_config_without_servers_fails_before_anything_is_started(start_run: StartRun) -> None:
    with pytest.raises(NoServerInstancesError, match="config_paths"):
        start_run()


def test_a_dry_run_checks_every_server_and_leaves_nothing_running(
    write_server: WriteServer, start_run: StartRun, apps: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_server("one")
    write_server("two", apps["gym"])
    helper = start_run("one", "two", blocks={"two": {"isolation": "hosted"}}, dry_run=True)
    assert "Dry run passed: 2 / 2" in capsys.readouterr().out
    helper.poll()
    helper.run_forever()


def test_embedding_programs_can_wait_and_ask_themselves(
    write_server: WriteServer, start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    own_wait = RunHelper.wait_for_spinup

    def wait(helper: RunHelper) -> None:
        waited.append("start")
        own_wait(helper)

    monkeypatch.setattr(RunHelper, "wait_for_spinup", wait)
    write_server("one")
    write_server("two")

    helper = start_run("one", "two")

    assert waited == ["start"]
    own_wait(helper)  # all of them answer: it returns at once
    helper.wait_for_dry_run_spinup()
    assert helper.check_http_server_statuses([]) == [("one", "success"), ("two", "success")]
    assert helper.check_http_server_statuses(["one"]) == [("two", "success")]
    helper.shutdown()
    assert helper.check_http_server_statuses([]) == []


@pytest.mark.parametrize("block", [{"isolation": "hosted"}, {"isolation": "process"}, {"num_workers": 2}])
def test_warnings_that_were_only_counted_are_told_when_their_server_stops(
    write_server: WriteServer, start_run: StartRun, tmp_path: Path, block: dict[str, Any]
) -> None:
    warn = (
        "import logging\nfrom nemo_gym.base_resources_server import BaseVerifyResponse, SimpleResourcesServer\n\n"
        "class Mine(SimpleResourcesServer):\n"
        "    async def verify(self, body): ...\n"
        "    def setup_webserver(self):\n"
        "        app = super().setup_webserver()\n"
        "        @app.get('/warn')\n"
        "        def warn() -> None:\n"
        "            for _ in range(5):\n"
        "                logging.getLogger('nemo_gym.mine').warning('it is odd')\n"
        "        return app\n\n"
        "if __name__ == '__main__':\n    Mine.run_webserver()\n"
    )
    write_server("one", warn)
    helper = start_run("one", blocks={"one": block}, nemo_gym_log_dir=str(tmp_path / "logs"))
    address = helper._server_client.addresses_of("one")[0]
    with urllib.request.urlopen(f"http://{address.host}:{address.port}/warn", timeout=10) as answer:
        assert answer.status == 200
    helper.shutdown()
    told = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.log"))
    assert told.count("it is odd") == 2
    assert "4 more like this: it is odd" in told
