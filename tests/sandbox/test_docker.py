"""Sandboxes that are Docker containers, with a stand-in for the command, and with the real one where there is one."""

import asyncio
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym.keys import NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME, NEMO_GYM_RUN_ID_ENV_VAR_NAME
from nemo_gym.sandbox import (
    AsyncSandbox,
    SandboxCreateError,
    SandboxCreateVerificationError,
    SandboxSpec,
    SandboxStatus,
    create_provider,
    reaper,
)
from nemo_gym.sandbox.providers import programs
from tests.sandbox.stand_ins import StandIn, docker

__all__ = ["docker"]


@pytest.fixture(autouse=True)
def _part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server that a launcher has started."""
    config = tmp_path / "nemo_gym_config_held_abc.yaml"
    config.write_text("{}")
    monkeypatch.setenv(NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME, str(config))
    monkeypatch.setenv(NEMO_GYM_RUN_ID_ENV_VAR_NAME, "my run")
    monkeypatch.setattr(programs, "_BOOKS", [])


def spec(folder: Path, **more: object) -> SandboxSpec:
    return SandboxSpec(**{"image": "some/image:1", "workdir": str(folder / "inside"), **more})  # type: ignore[arg-type]


def alive(marker: str) -> list[str]:
    """The processes whose arguments contain this."""
    listed = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if marker in line and "ps -eo" not in line and " Z" not in line[:14]]


def test_a_sandbox_lives_from_start_to_stop(docker: StandIn, tmp_path: Path) -> None:
    async def use() -> None:
        wanted = spec(tmp_path, env={"COLOUR": "blue"}, files={str(tmp_path / "inside/deep/task.txt"): "do it"})
        async with AsyncSandbox({"docker": None}, wanted) as sandbox:
            assert await sandbox.status() is SandboxStatus.UNKNOWN
            await sandbox.start()
            assert await sandbox.status() is SandboxStatus.RUNNING
            done = await sandbox.exec("cat deep/task.txt; echo $COLOUR $SIZE; echo oh >&2; exit 3", env={"SIZE": "5"})
            assert (done.stdout, done.stderr, done.return_code, done.error_type) == ("do itblue 5\n", "oh\n", 3, None)
            assert (await sandbox.exec("echo $COLOUR", env={"COLOUR": "red"})).stdout == "red\n"
            (tmp_path / "here.bin").write_bytes(bytes(range(256)))
            await sandbox.upload(tmp_path / "here.bin", "new/there.bin")
            assert (await sandbox.exec("wc -c < new/there.bin")).stdout == "256\n"
            await sandbox.download("new/there.bin", tmp_path / "back/again.bin")
            assert (tmp_path / "back/again.bin").read_bytes() == bytes(range(256))
            [container] = docker.containers().values()
            assert container["labels"] == {"nemo-gym.sandbox": "1", "nemo-gym.run": "my-run.abc"}
        assert await sandbox.status() is SandboxStatus.STOPPED

    asyncio.run(use())
    assert docker.containers() == {}


def test_of_a_link_the_file_is_copied_and_a_colon_is_part_of_a_name(
    docker: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("blob").write_text("weights")
    Path("at 12:30").symlink_to("blob")

    async def use() -> None:
        async with AsyncSandbox({"docker": None}, spec(tmp_path)) as sandbox:
            await sandbox.start()
            await sandbox.upload("at 12:30", "there")
            assert (await sandbox.exec("test -L there || cat there")).stdout == "weights"
            await sandbox.exec("echo inside > result; ln -s $PWD/result answer")
            await sandbox.download("answer", "back 12:31")

    asyncio.run(use())
    back = tmp_path / "back 12:31"
    assert (back.is_symlink(), back.read_text()) == (False, "inside\n")


def test_what_a_command_removes_keeps_no_file_from_being_put_there(docker: StandIn, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("a test")

    async def use() -> None:
        async with AsyncSandbox({"docker": None}, spec(tmp_path)) as sandbox:
            await sandbox.start()
            assert (await sandbox.exec("rm -r $PWD")).return_code == 0
            lost = await sandbox.exec("true")
            assert (lost.return_code, lost.error_type) == (126, None)
            assert await sandbox.status() is SandboxStatus.RUNNING
            await sandbox.upload(tmp_path / "here", "again")
            assert (await sandbox.exec("cat again")).stdout == "a test"

    asyncio.run(use())


def test_nothing_but_plain_files_comes_out(docker: StandIn, tmp_path: Path) -> None:
    target = tmp_path / "back"
    target.write_text("what was there")

    async def use() -> None:
        async with AsyncSandbox({"docker": None}, spec(tmp_path)) as sandbox:
            await sandbox.start()
            await sandbox.exec("mkfifo pipe; mkdir folder")
            for odd in ("pipe", "folder"):
                with pytest.raises(RuntimeError, match=f"{odd} cannot be copied out of the sandbox: it is no plain"):
                    await sandbox.download(odd, target)

    asyncio.run(use())
    assert target.read_text() == "what was there"


def test_what_the_spec_and_the_settings_say_reaches_the_command_line(docker: StandIn, tmp_path: Path) -> None:
    settings = {
        "create": {"network": "none", "read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"]},
        "probe": {"command": "test -d .", "stable_count": 3, "interval_s": 0.01},
    }
    settings["create"] |= {"pids_limit": 99, "publish_host": "0.0.0.0", "extra_run_args": ["--init"]}
    wanted = spec(
        tmp_path,
        image="docker://some/image:1",
        resources={"cpu": 1.5, "memory_mib": 512, "gpu": 2},
        ports=["8080"],
        metadata={"team": "red"},
        env={"TOKEN": "very-secret", "PATH": "/somewhere:/usr/bin:/bin"},
        provider_options={"volumes": ["/data:/data:ro"], "run_args": ["-v", "/more:/more"]},
    )

    async def use() -> str:
        async with AsyncSandbox({"docker": settings}, wanted) as sandbox:
            await sandbox.start()
            token = (await sandbox.exec("echo $TOKEN $PATH")).stdout
            assert token == "very-secret /somewhere:/usr/bin:/bin\n"
            await sandbox.exec("true", user="root")
            await sandbox.exec("true", user="agent")
            return (await sandbox.endpoint(8080)).endpoint

    assert asyncio.run(use()) == "http://0.0.0.0:8080"
    [line] = docker.calls("run")
    text = " ".join(line)
    for part in (
        "-d --name nemo-gym-", "--label nemo-gym.sandbox=1", "--label nemo-gym.metadata.team=red", "--cpus 1.5",
        "--memory 512m --memory-swap 512m", "--gpus 2", "--network none", "--read-only", "--cap-drop ALL",
        "--security-opt no-new-privileges", "--pids-limit 99", "--publish 0.0.0.0::8080/tcp", "-v /data:/data:ro",
        "-v /more:/more", "--entrypoint sh some/image:1 -c",
    ):  # fmt: skip
        assert part in text
    assert "very-secret" not in (docker.state / "calls.jsonl").read_text()
    probes = [call for call in docker.calls("exec") if call[-1] == "test -d ."]
    assert len(probes) == 3
    users = [call[call.index("--user") + 1] for call in docker.calls("exec") if "--user" in call]
    assert users == ["0", "agent"]


def test_a_command_that_takes_too_long_is_killed_inside(docker: StandIn, tmp_path: Path) -> None:
    seconds = 98_700 + os.getpid() % 1000
    hiding = f"(setsid sleep {seconds}1 &); env -i sleep {seconds}2 & echo begun; sleep {seconds}3"

    async def use() -> None:
        async with AsyncSandbox({"docker": {}}, spec(tmp_path)) as sandbox:
            await sandbox.start()
            await sandbox.exec(f"sleep {seconds}9 & echo in the background")
            done = await sandbox.exec(hiding, timeout_s=3)
            assert (done.return_code, done.error_type) == (125, "timeout")
            assert done.stdout == "begun\n"
            assert "did not end within 3 s and was killed" in (done.stderr or "")
            assert not [line for line in alive(f"sleep {seconds}") if f"{seconds}9" not in line]
            assert alive(f"sleep {seconds}9"), "what an earlier command left running stays"
            assert (await sandbox.exec("echo usable")).stdout == "usable\n"

    asyncio.run(use())
    assert not alive(f"sleep {seconds}")


def test_a_command_that_is_given_up_is_killed_inside(docker: StandIn, tmp_path: Path) -> None:
    seconds = f"{97_000 + os.getpid() % 1000}7"

    async def use() -> None:
        async with AsyncSandbox({"docker": {}}, spec(tmp_path)) as sandbox:
            await sandbox.start()
            work = asyncio.create_task(sandbox.exec(f"touch begun; sleep {seconds}"))
            await asyncio.to_thread(until, (tmp_path / "inside/begun").exists)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert not alive(f"sleep {seconds}")

    asyncio.run(use())


def test_no_command_passes_for_a_failure_of_docker(docker: StandIn, tmp_path: Path) -> None:
    lie = "echo 'Error response from daemon: container is not running' >&2; exit {}"

    async def use() -> None:
        async with AsyncSandbox({"docker": {}}, spec(tmp_path)) as sandbox:
            await sandbox.start()
            for code in (1, 125, 126):
                done = await sandbox.exec(lie.format(code))
                assert (done.return_code, done.error_type) == (code, None)
            nowhere = await sandbox.exec("true", cwd="/no/such/folder")
            assert (nowhere.return_code, nowhere.error_type) == (126, None)
            assert "chdir to cwd" in (nowhere.stderr or "")
            [name] = docker.containers()
            await asyncio.to_thread(docker.run, "rm", "-f", name)
            gone = await sandbox.exec("true")
            assert (gone.return_code, gone.error_type) == (125, "sandbox")
            assert "No such container" in (gone.stderr or "")
            assert await sandbox.status() is SandboxStatus.STOPPED

    asyncio.run(use())


@pytest.mark.parametrize(
    ("image", "kind", "words"),
    [
        ("missing/image", SandboxCreateError, "pull access denied for missing/image"),
        (
            "broken/image",
            SandboxCreateVerificationError,
            "'true' fails in it: .*is not running; the last it said was: sh: exec",
        ),
        (None, SandboxCreateError, "needs an image: set `image`"),
        ("slow/image", SandboxCreateError, "it takes too long; raise create.start_timeout_s"),
    ],
)
def test_what_cannot_be_made_is_said_and_removed(
    docker: StandIn, tmp_path: Path, image: str | None, kind: type[Exception], words: str
) -> None:
    async def use() -> None:
        async with AsyncSandbox({"docker": {"create": {"start_timeout_s": 5}}}, spec(tmp_path, image=image)) as sandbox:
            with pytest.raises(kind, match=words):
                await sandbox.start()

    asyncio.run(use())
    assert docker.containers() == {}


def test_no_value_of_a_variable_is_in_what_is_said(docker: StandIn, tmp_path: Path) -> None:
    async def use() -> None:
        wanted = spec(tmp_path, image="missing/hunter22", env={"PASSWORD": "hunter22"})
        async with AsyncSandbox({"docker": {}}, wanted) as sandbox:
            with pytest.raises(SandboxCreateError, match=r"pull access denied for missing/\*{4}"):
                await sandbox.start()

    asyncio.run(use())


def test_variables_may_be_numbers_and_are_not_on_command_lines(
    docker: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "sk-1234")
    monkeypatch.setenv("LANGUAGE", "de")

    async def use() -> None:
        env = {"N": 5, "API_KEY": "sk-1234", "LANGUAGE": "fr"}
        async with AsyncSandbox({"docker": {}}, spec(tmp_path, env=env)) as sandbox:
            await sandbox.start()
            said = await sandbox.exec("echo $N $API_KEY $LANGUAGE $M", env={"M": 6})  # type: ignore[dict-item]
            assert said.stdout == "5 sk-1234 fr 6\n"
        async with AsyncSandbox({"docker": {}}, spec(tmp_path, image="missing", env=env)) as sandbox:
            with pytest.raises(SandboxCreateError, match="pull access denied"):
                await sandbox.start()

    asyncio.run(use())
    assert "sk-1234" not in str(docker.calls())
    assert "LANGUAGE=fr" in str(docker.calls("exec"))


def test_a_command_that_cannot_be_started_is_a_result(docker: StandIn, tmp_path: Path) -> None:
    async def use() -> None:
        async with AsyncSandbox({"docker": {}}, spec(tmp_path)) as sandbox:
            await sandbox.start()
            for unfit in ("echo a\0b", "echo \ud800", f"echo {'x' * 200_000}"):
                said = await sandbox.exec(unfit)
                assert (said.return_code, said.error_type) == (126, None)
                assert "the command cannot be started: " in (said.stderr or "")
            assert (await sandbox.exec("echo on")).stdout == "on\n"

    asyncio.run(use())


def test_a_start_that_is_given_up_leaves_no_container(docker: StandIn, tmp_path: Path) -> None:
    async def use() -> None:
        async with AsyncSandbox({"docker": {}}, spec(tmp_path, image="slow")) as sandbox:
            start = asyncio.create_task(sandbox.start())
            await asyncio.to_thread(until, (docker.state / "pulling").exists)
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start

    asyncio.run(use())
    assert docker.containers() == {}
    assert [call[0] for call in docker.calls()][-1] == "rm"


def test_files_that_cannot_be_put_inside_end_the_sandbox(docker: StandIn, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")
    sandbox = AsyncSandbox({"docker": {}}, spec(tmp_path, files={str(tmp_path / "a file/x"): "text"}))
    with pytest.raises(RuntimeError, match="cannot be written in the sandbox"):
        asyncio.run(sandbox.start())
    assert docker.containers() == {}
    with pytest.raises(RuntimeError, match="has been stopped"):
        asyncio.run(sandbox.start())


def test_a_container_ends_when_its_time_is_over(
    docker: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        async with AsyncSandbox({"docker": {}}, spec(tmp_path, ttl_s=2)) as sandbox:
            await sandbox.start()
            deadline = time.monotonic() + 60
            while await sandbox.status() is not SandboxStatus.STOPPED:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)

    asyncio.run(use())
    [call] = docker.calls("run")
    assert call[call.index("--rm") :][:5] == ["--rm", "--entrypoint", "sh", "some/image:1", "-c"]
    assert call[-2:] == ["sh", "2"]

    async def with_entrypoint() -> None:
        async with AsyncSandbox({"docker": {}}, spec(tmp_path, ttl_s=2, entrypoint=["sleep", "3600"])) as sandbox:
            await sandbox.start()

    with caplog.at_level(logging.WARNING):
        asyncio.run(with_entrypoint())
    assert "ttl_s has no effect on a sandbox with an entrypoint" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"create": {"netwrok": "none"}}, "`docker.create` has no netwrok; there are start_timeout_s"),
        ({"exec": {"cpus": 1}}, "`docker.exec` has no cpus"),
        ({"exec": {"concurrency": 0}}, "`exec.concurrency` .* must be at least 1, not 0"),
        ({"create": "fast"}, "`docker.create` must be a mapping, not 'fast'"),
        ({"prob": {}}, "does not take these settings: .*'prob'; there are .*probe"),
    ],
)
def test_settings_that_nothing_reads_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        create_provider({"docker": settings})


def test_without_docker_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxCreateError, match="'docker' is not on the PATH; install it, or choose another"):
        asyncio.run(AsyncSandbox({"docker": {}}, spec(tmp_path)).start())


def test_many_sandboxes_keep_to_the_number_of_commands(docker: StandIn, tmp_path: Path) -> None:
    provider = {"docker": {"exec": {"concurrency": 2}}}

    async def use() -> list[str | None]:
        async with AsyncSandbox(provider, spec(tmp_path)) as sandbox:
            await sandbox.start()
            script = "> running.$$; ls -d running.* | wc -l; sleep 0.3; rm running.$$"
            done = await asyncio.gather(*(sandbox.exec(script) for _ in range(6)))
            return [each.stdout for each in done]

    assert {int(each or 9) for each in asyncio.run(use())} <= {1, 2}


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def test_a_container_that_cannot_be_removed_just_now_keeps_no_other_from_being_reaped(
    docker: StandIn, tmp_path: Path
) -> None:
    for _ in range(3):
        asyncio.run(AsyncSandbox({"docker": {}}, spec(tmp_path)).start())
    book = Path(reaper.book_beside(os.environ[NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME]))
    (docker.state / "stuck").touch()
    freed = threading.Timer(2, (docker.state / "stuck").unlink)
    freed.start()
    assert reaper.reap(str(book)) == []
    freed.join()
    assert docker.containers() == {}
    assert not book.exists()


PROGRAM = """
import asyncio, sys
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

async def main():
    sandbox = AsyncSandbox({{"docker": {{}}}}, SandboxSpec(image="some", workdir={workdir!r}))
    await sandbox.start()
    print("up", flush=True)
    {then}

asyncio.run(main())
"""


@pytest.mark.parametrize("then", ["await asyncio.sleep(600)", "sys.exit(0)"])
def test_a_program_without_a_launcher_leaves_nothing_behind(
    docker: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    import sys

    monkeypatch.delenv(NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME)
    other = asyncio.run(AsyncSandbox({"docker": {}}, spec(tmp_path)).start())
    code = PROGRAM.format(workdir=str(tmp_path / "w"), then=then)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        assert "sleep" not in then or len(docker.containers()) == 2
        program.kill()
    until(lambda: list(docker.containers()) == [other.handle.sandbox_id])
    asyncio.run(other.stop())
    for book in programs._BOOKS:
        if book._watch is not None:
            book._watch.communicate(timeout=60)
