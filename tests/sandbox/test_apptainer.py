"""Sandboxes that are Apptainer instances, with a stand-in for the command."""

import asyncio
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from nemo_gym.keys import NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME, NEMO_GYM_RUN_ID_ENV_VAR_NAME
from nemo_gym.sandbox import (
    AsyncSandbox,
    SandboxCreateError,
    SandboxSpec,
    SandboxStatus,
    get_provider_class,
    reaper,
)
from nemo_gym.sandbox.providers import programs
from tests.sandbox.stand_ins import StandIn, apptainer
from tests.sandbox.test_docker import alive

__all__ = ["apptainer"]


@pytest.fixture(autouse=True)
def _part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "nemo_gym_config_held_abc.yaml"
    config.write_text("{}")
    monkeypatch.setenv(NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME, str(config))
    monkeypatch.setenv(NEMO_GYM_RUN_ID_ENV_VAR_NAME, "run-7")
    monkeypatch.setattr(programs, "_BOOKS", [])
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))


def spec(folder: Path, **more: object) -> SandboxSpec:
    (folder / "inside").mkdir(exist_ok=True)
    return SandboxSpec(**{"image": "some/image:1", "workdir": str(folder / "inside"), **more})  # type: ignore[arg-type]


def test_a_sandbox_lives_from_start_to_stop(apptainer: StandIn, tmp_path: Path) -> None:
    async def use() -> None:
        wanted = spec(tmp_path, env={"COLOUR": "it's $blue"}, files={"deep/task.txt": "do it"})
        async with AsyncSandbox({"apptainer": None}, wanted) as sandbox:
            await sandbox.start()
            assert await sandbox.status() is SandboxStatus.RUNNING
            done = await sandbox.exec("cat deep/task.txt; echo $COLOUR $SIZE; echo oh >&2; exit 3", env={"SIZE": "5"})
            assert (done.stdout, done.stderr, done.return_code) == ("do itit's $blue 5\n", "oh\n", 3)
            (tmp_path / "here.bin").write_bytes(bytes(range(256)))
            await sandbox.upload(tmp_path / "here.bin", "new/there.bin")
            await sandbox.download("new/there.bin", tmp_path / "back/again.bin")
            assert (tmp_path / "back/again.bin").read_bytes() == bytes(range(256))
            with pytest.raises(RuntimeError, match=r"nothing could not be copied .* No such file"):
                await sandbox.download("nothing", tmp_path / "x")
            assert (await sandbox.exec("echo $STAND_IN_ROOT", user="root")).stdout == "1\n"
            [(name, instance)] = apptainer.containers().items()
            assert name.startswith("nemo-gym-run-7.abc-")
            assert instance["image"] == "docker://some/image:1"
            with pytest.raises(ValueError, match="port 80 is not among"):
                await sandbox.endpoint(80)

    asyncio.run(use())
    assert apptainer.containers() == {}
    assert list((tmp_path / "shared").iterdir()) == []
    assert "it's $blue" not in (apptainer.state / "calls.jsonl").read_text()


def test_programs_import_the_provider_from_its_module_and_patch_names_there(
    apptainer: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_gym.sandbox.providers.apptainer.provider import ApptainerProvider

    module = "nemo_gym.sandbox.providers.apptainer.provider"
    monkeypatch.setattr(f"{module}.secrets.token_hex", lambda size: "c0ffee")

    async def use() -> str:
        provider = ApptainerProvider()
        handle = await provider.create(spec(tmp_path))
        await provider.close(handle)
        return handle.sandbox_id

    assert asyncio.run(use()).endswith("c0ffee")
    assert get_provider_class("apptainer") is ApptainerProvider


def test_what_the_spec_and_the_settings_say_reaches_the_command_line(apptainer: StandIn, tmp_path: Path) -> None:
    async def use(settings: dict[str, object], **more: object) -> None:
        async with AsyncSandbox({"apptainer": settings}, spec(tmp_path, **more)) as sandbox:
            await sandbox.start()

    resources = {"cpu": 2, "memory_mib": 512, "gpu": 1}
    asyncio.run(use({"create": {"binds": ["/a:/b"]}}, image="/images/mine.sif", resources=resources))
    asyncio.run(use({"create": {"fakeroot": True}}, resources=resources, provider_options={"binds": ["/c:/d"]}))
    first, second = (" ".join(call) for call in apptainer.calls("instance", "start"))
    for part in (
        ":/sandbox --bind /a:/b",
        "--cpus 2 --memory 512m",
        "--nv",
        "--no-eval --env-file",
        "/images/mine.sif",
    ):
        assert part in first
    assert "--fakeroot" in second
    assert "--bind /c:/d" in second
    assert "--cpus" not in second


def test_a_command_that_takes_too_long_is_killed_inside(apptainer: StandIn, tmp_path: Path) -> None:
    seconds = f"{96_000 + os.getpid() % 1000}5"

    async def use() -> None:
        async with AsyncSandbox({"apptainer": {}}, spec(tmp_path)) as sandbox:
            await sandbox.start()
            done = await sandbox.exec(f"(setsid sleep {seconds} &); echo begun; sleep {seconds}", timeout_s=3)
            assert (done.stdout, done.return_code, done.error_type) == ("begun\n", 125, "timeout")
            assert not alive(f"sleep {seconds}")
            nowhere = await sandbox.exec("true", cwd="/no/such/folder")
            assert (nowhere.return_code, nowhere.error_type) == (126, None)

    asyncio.run(use())


def test_what_a_command_does_to_its_place_is_no_failure_of_it(apptainer: StandIn, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("a test")

    async def use() -> None:
        async with AsyncSandbox({"apptainer": {}}, spec(tmp_path, workdir=str(tmp_path / "made/by/it"))) as sandbox:
            await sandbox.start()
            assert (await sandbox.exec("pwd; rm -r $PWD")).stdout == f"{tmp_path}/made/by/it\n"
            for command in ("true", "echo a\0b", "echo \ud800", f"echo {'x' * 200_000}"):
                lost = await sandbox.exec(command)
                assert (lost.return_code, lost.error_type) == (126, None)
            await sandbox.upload(tmp_path / "here", "again")
            await sandbox.exec("mkfifo pipe; ln -s /dev/zero zeros")
            for odd in ("pipe", "zeros"):
                with pytest.raises(RuntimeError, match=f"{odd} could not be copied .*: it is no plain file"):
                    await sandbox.download(odd, tmp_path / "here")
            await sandbox.download("again", tmp_path / "back")

    asyncio.run(use())
    assert [(tmp_path / name).read_text() for name in ("here", "back")] == ["a test", "a test"]


def test_a_folder_that_cannot_be_made_is_said_at_the_start(apptainer: StandIn, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sandbox = AsyncSandbox({"apptainer": {}}, spec(tmp_path, workdir=str(tmp_path / "file/x")))
    with pytest.raises(SandboxCreateError, match=r"the folder .*/file/x cannot be made in it: .*Not a directory"):
        asyncio.run(sandbox.start())
    assert apptainer.containers() == {}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"image": "missing/image"}, "image not found"),
        ({"image": None}, "needs an image"),
        ({"ports": [80]}, "cannot be reached from outside"),
        ({"env": {"HOME": "/x"}}, "HOME is Apptainer's own"),
        ({"env": {"a-b": "1"}}, "'a-b' cannot be the name"),
        ({"provider_options": {"volumes": []}}, "have no volumes; there are binds, start_args"),
    ],
)
def test_what_cannot_be_made_is_said_and_removed(
    apptainer: StandIn, tmp_path: Path, more: dict[str, object], words: str
) -> None:
    with pytest.raises(SandboxCreateError, match=words):
        asyncio.run(AsyncSandbox({"apptainer": {}}, spec(tmp_path, **more)).start())
    assert apptainer.containers() == {}
    assert list((tmp_path / "shared").iterdir()) == []


def test_what_has_no_effect_is_said(apptainer: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        async with AsyncSandbox({"apptainer": {}}, spec(tmp_path, ttl_s=5)) as sandbox:
            await sandbox.start()
            refused = await sandbox.exec("true", env={"PWD": "/"})
            assert (refused.return_code, refused.error_type) == (125, "sandbox")

    with caplog.at_level(logging.WARNING):
        asyncio.run(use())
    assert "ttl_s has no effect" in caplog.text


def test_instances_of_the_run_and_their_folders_are_reaped_and_no_others(apptainer: StandIn, tmp_path: Path) -> None:
    asyncio.run(AsyncSandbox({"apptainer": {}}, spec(tmp_path)).start())
    programs._BOOKS.clear()
    os.environ[NEMO_GYM_RUN_ID_ENV_VAR_NAME] = "other"
    asyncio.run(AsyncSandbox({"apptainer": {}}, spec(tmp_path)).start())
    book = Path(reaper.book_beside(os.environ[NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME]))
    first, others = book.read_text().splitlines()
    assert len(apptainer.containers()) == 2

    book.write_text(first + '\n{"runtime": "apptainer", "pro')
    assert reaper.reap(str(book)) == []
    [left] = apptainer.containers()
    assert left.startswith("nemo-gym-other.abc-")
    assert [each.name for each in (tmp_path / "shared").iterdir()] == [left]
    assert not book.exists()

    book.write_text(others)
    assert reaper.reap(str(book)) == []
    assert apptainer.containers() == {}


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="no apptainer here: the stand-in above is all there is")
def test_the_real_apptainer(tmp_path: Path) -> None:
    image = os.environ.get("NEMO_GYM_TEST_SIF")
    if not image:
        pytest.skip("name an image file in NEMO_GYM_TEST_SIF")

    async def use() -> None:
        async with AsyncSandbox({"apptainer": {}}, SandboxSpec(image=image, files={"/tmp/a.txt": "text"})) as sandbox:
            await sandbox.start()
            assert (await sandbox.exec("cat /tmp/a.txt")).stdout == "text"
            assert (await sandbox.exec("sleep 4711", timeout_s=2)).error_type == "timeout"

    asyncio.run(use())
