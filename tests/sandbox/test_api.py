"""Specs, the registry, configs, and the life of a sandbox, with providers as somebody else writes them."""

import asyncio
import importlib.metadata
import logging
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import yaml
from omegaconf import OmegaConf

import nemo_gym.sandbox
from nemo_gym.paths import PARENT_DIR
from nemo_gym.sandbox import (
    AsyncSandbox,
    ExecResult,
    Sandbox,
    SandboxEndpoint,
    SandboxExecResult,
    SandboxHandle,
    SandboxPtySpec,
    SandboxResources,
    SandboxSpec,
    SandboxStatus,
    create_provider,
    get_provider_class,
    list_providers,
    register_provider,
    resolve_provider_config,
    resolve_provider_metadata,
    rewrite_image,
)
from nemo_gym.sandbox.providers import registry


class Notebook:
    """A provider whose sandboxes are dictionaries, with everything that a provider can offer."""

    name = "notebook"

    def __init__(self, pages: int = 3, fails_to_close: bool = False) -> None:
        self.pages = pages
        self.events: list[str] = []
        self._fails_to_close = fails_to_close

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        self.events.append("create")
        return SandboxHandle("n1", self.name, {})

    async def exec(self, handle: SandboxHandle, command: str, **how: Any) -> SandboxExecResult:
        if command == "wait":
            await asyncio.sleep(30)
        return SandboxExecResult(f"{command} in {how['cwd']} as {how['user']}", None, 0)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        handle.raw[target_path] = await asyncio.to_thread(source_path.read_bytes)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        await asyncio.to_thread(target_path.write_bytes, handle.raw[source_path])

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        return SandboxStatus.RUNNING

    async def endpoint(self, handle: SandboxHandle, port: int) -> SandboxEndpoint:
        return SandboxEndpoint(f"https://notebook.example/{port}", {"token": "t"})

    async def close(self, handle: SandboxHandle) -> None:
        self.events.append("close")
        if self._fails_to_close:
            raise RuntimeError("stuck")

    async def aclose(self) -> None:
        self.events.append("aclose")

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str | None = None) -> dict[str, Any]:
        return {"id": handle.sandbox_id, "scope": scope}

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        return SandboxHandle(descriptor["id"], self.name, {})


class Plain(Notebook):
    """One that offers only what it must."""

    endpoint = serialize_handle = connect = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


def test_specs_are_checked_when_they_are_made() -> None:
    spec = SandboxSpec(resources={"cpu": 2, "memory_mib": 512}, ports=["8080", 9000])  # type: ignore[list-item]
    assert spec.resources == SandboxResources(cpu=2, memory_mib=512)
    assert spec.ports == (8080, 9000)
    assert ExecResult is SandboxExecResult
    with pytest.raises(ValueError, match="have no memory; there are cpu, memory_mib"):
        SandboxSpec(resources={"memory": 1})
    for ports in ([True], [0], [65536], [1, "1"], "80", ["x"], [1.5]):
        with pytest.raises(ValueError, match="port"):
            SandboxSpec(ports=ports)  # type: ignore[arg-type]
    for url in ("notebook.example", "/path", "localhost:80"):
        with pytest.raises(ValueError, match="absolute URL"):
            SandboxEndpoint(url)
    with pytest.raises(AttributeError):
        spec.image = "x"  # type: ignore[misc]


def test_the_registry_prefers_what_was_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert list_providers() == ["apptainer", "docker", "local"]
    register_provider("notebook", Notebook)
    assert get_provider_class("notebook") is Notebook
    with pytest.raises(ValueError, match="there is a sandbox provider 'docker' already; pass override=True"):
        register_provider("docker", Notebook)
    register_provider("docker", Notebook, override=True)
    assert get_provider_class("docker") is Notebook

    monkeypatch.setitem(sys.modules, "their_package", SimpleNamespace(Theirs=Plain))
    group = registry.ENTRY_POINT_GROUP
    points = [
        importlib.metadata.EntryPoint(name, value, group)
        for name, value in (("theirs", "their_package:Theirs"), ("twice", "a:A"), ("twice", "b:B"), ("local", "c:C"))
    ]
    points.append(importlib.metadata.EntryPoint("gone", "no_such_package_here:Gone", group))
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert get_provider_class("theirs") is Plain
    assert "theirs" in list_providers()
    with pytest.raises(ValueError, match=r"several packages offer a sandbox provider 'twice' \(a:A, b:B\)"):
        get_provider_class("twice")
    with pytest.raises(ValueError, match=r"'gone' .* cannot be loaded: No module named"):
        get_provider_class("gone")
    with caplog.at_level(logging.WARNING):
        assert get_provider_class("local").__name__ == "LocalProvider"
    assert "the sandbox provider 'local' of c:C is not used" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"podman": {}},
            "no sandbox provider 'podman'; available: apptainer, docker, local. Others come with packages",
        ),
        ({"daytona": {}}, "available: apptainer, docker, local. daytona is not part of this distribution: choose one"),
        ({"docker": {}, "local": {}}, r"given as one name with its settings, .*: \['docker', 'local'\]"),
        ({}, "given as one name"),
        ({"docker": "yes"}, "must be a mapping, not 'yes'"),
        ({"local": {"images": 1}}, "'local' does not take these settings: .*images'; there are folder_mb, memory_mb,"),
    ],
)
def test_what_is_no_provider_gets_one_clear_error(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        create_provider(config)


def test_a_configuration_names_its_provider_by_a_block() -> None:
    merged = OmegaConf.create(
        {
            "sandbox": {"docker": {"create": {"cap_drop": ["ALL"]}}, "default_metadata": {"team": "red"}},
            "fast": {"local": None},
            "a_server": {"resources_servers": {"x": {"entrypoint": "app.py"}}},
            "unset": "???",
        }
    )
    assert resolve_provider_config("sandbox", merged) == {"docker": {"create": {"cap_drop": ["ALL"]}}}
    assert resolve_provider_metadata("sandbox", merged) == {"team": "red"}
    assert resolve_provider_config("fast", merged) == {"local": None}
    assert resolve_provider_metadata("fast", merged) == {}
    assert resolve_provider_config({"local": {}}) == {"local": {}}
    with pytest.raises(ValueError, match=r"no block 'sandbx' .*\(such blocks: fast, sandbox\); add one of the files"):
        resolve_provider_config("sandbx", merged)
    with pytest.raises(ValueError, match="the block `two` must name exactly one provider, and names docker, local"):
        resolve_provider_config("two", {"two": {"docker": {}, "local": {}}})
    with pytest.raises(ValueError, match="default_metadata of the block `x` must be a mapping"):
        resolve_provider_metadata("x", {"x": {"local": {}, "default_metadata": "red"}})


@pytest.mark.parametrize("name", ["apptainer", "docker", "local"])
def test_shipped_configs_bind_the_same_block(name: str) -> None:
    file = PARENT_DIR / f"nemo_gym/sandbox/providers/{name}/configs/{name}.yaml"
    block = resolve_provider_config("sandbox", yaml.safe_load(file.read_text()))
    assert list(block) == [name]
    assert create_provider(block).name == name


def test_images_are_renamed_by_the_first_rule_that_fits() -> None:
    rules = [{"from": "docker.io/", "to": "mirror/"}, {"from": "docker", "to": "x"}]
    assert rewrite_image("docker.io/a/b:1", rules) == "mirror/a/b:1"
    assert rewrite_image("dockerfile", rules) == "xfile"
    assert rewrite_image("other", rules) == "other"
    assert rewrite_image(None, rules) is None
    with pytest.raises(ValueError, match="must have `from` and `to`"):
        rewrite_image("a", [{"from": "a"}])


def test_a_sandbox_is_started_once_and_stopped_for_good(tmp_path: Path) -> None:
    async def use() -> None:
        provider = Notebook()
        async with AsyncSandbox(provider, SandboxSpec(workdir="/w", files={"/a": "text"}, ports=[80])) as sandbox:
            with pytest.raises(RuntimeError, match="Sandbox has not been started"):
                await sandbox.exec("x")
            assert await sandbox.start() is sandbox
            with pytest.raises(RuntimeError, match="started already"):
                await sandbox.start()
            assert (await sandbox.exec("x")).stdout == "x in /w as None"
            assert (await sandbox.exec("x", cwd="/v", user=0)).stdout == "x in /v as 0"
            await sandbox.download("/a", tmp_path / "deep/a")
            assert (tmp_path / "deep/a").read_text() == "text"
            assert (await sandbox.endpoint(80)).headers == {"token": "t"}
            with pytest.raises(ValueError, match="port 81 is not among the `ports`"):
                await sandbox.endpoint(81)
            with pytest.raises(FileNotFoundError, match="is no file"):
                await sandbox.upload(tmp_path, "/b")
            described = await sandbox.serialize(scope="s")
            other = await AsyncSandbox.connect(SimpleNamespace(**described), provider=Notebook())
            assert other.handle.sandbox_id == "n1"
            with pytest.raises(NotImplementedError, match="have no terminals"):
                await sandbox.pty.create()
        assert provider.events == ["create", "close", "aclose"]
        await sandbox.stop()
        assert provider.events == ["create", "close", "aclose"]
        with pytest.raises(RuntimeError, match="cannot be started again"):
            await sandbox.start()

    asyncio.run(use())


def test_the_provider_is_closed_whatever_happens() -> None:
    async def use() -> None:
        provider = Notebook(fails_to_close=True)
        sandbox = await AsyncSandbox(provider).start()
        with pytest.raises(RuntimeError, match="stuck"):
            await sandbox.stop()
        assert provider.events == ["create", "close", "aclose"]
        plain = await AsyncSandbox(Plain(), SandboxSpec(ports=[80])).start()
        with pytest.raises(NotImplementedError, match="cannot be called from outside"):
            await plain.endpoint(80)
        with pytest.raises(NotImplementedError, match="cannot be handed to another process"):
            await plain.serialize()

    asyncio.run(use())


def test_stopping_while_it_starts_leaves_nothing() -> None:
    class Slow(Notebook):
        async def create(self, spec: SandboxSpec) -> SandboxHandle:
            try:
                await asyncio.sleep(0.3 if spec.image == "stubborn" else 30)
            except asyncio.CancelledError:
                self.events.append("removed")
                if spec.image != "stubborn":
                    raise
            return await super().create(spec)

    async def use(image: str) -> list[str]:
        provider = Slow()
        sandbox = AsyncSandbox(provider, SandboxSpec(image=image, files={"/a": "text"}))
        start = asyncio.create_task(sandbox.start())
        await asyncio.sleep(0.05)
        await sandbox.stop()
        with pytest.raises(RuntimeError, match="stopped while it was started"):
            await start
        return provider.events

    assert asyncio.run(use("slow")) == ["removed", "aclose"]
    assert asyncio.run(use("stubborn")) == ["removed", "create", "close", "aclose"]


class Deliberate(Notebook):
    """One that takes its time."""

    async def close(self, handle: SandboxHandle) -> None:
        await asyncio.sleep(0.3)
        await super().close(handle)


@pytest.mark.parametrize("how", ["once", "over and over", "while files are put inside"])
def test_a_stop_whose_caller_is_cancelled_is_finished(how: str) -> None:
    async def use(provider: Deliberate) -> None:
        if how == "once":
            sandbox = await AsyncSandbox(provider).start()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sandbox.stop(), 0.02)
        else:
            files = {} if how == "over and over" else dict.fromkeys(map(str, range(10_000)), "text")
            with anyio.move_on_after(0.2):  # as a server does whose client has gone
                async with AsyncSandbox(provider, SandboxSpec(files=files)) as sandbox:
                    await sandbox.start()
                    await sandbox.exec("wait")
        await sandbox.stop()

    asyncio.run(use(provider := Deliberate()))
    assert provider.events == ["create", "close", "aclose"]


def test_a_start_that_is_cancelled_in_the_moment_it_is_done_leaves_nothing() -> None:
    class Punctual(Deliberate):
        async def create(self, spec: SandboxSpec) -> SandboxHandle:
            handle = await super().create(spec)
            asyncio.get_running_loop().call_soon(starts[0].cancel)
            return handle

    async def use() -> None:
        starts.append(asyncio.create_task(AsyncSandbox(provider).start()))
        with pytest.raises(asyncio.CancelledError):
            await starts[0]

    starts: list[asyncio.Task[AsyncSandbox]] = []
    provider = Punctual()
    asyncio.run(use())
    assert provider.events == ["create", "close", "aclose"]


def test_a_sandbox_that_is_forgotten_inside_an_event_loop_is_stopped() -> None:
    async def forget() -> None:
        sandbox = await asyncio.to_thread(Sandbox(provider).start)
        del sandbox

    provider = Deliberate()
    asyncio.run(forget())
    deadline = time.monotonic() + 10
    while "aclose" not in provider.events and time.monotonic() < deadline:
        time.sleep(0.02)
    assert provider.events == ["create", "close", "aclose"]


def test_one_thread_stops_what_another_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careful(Deliberate):
        async def exec(self, handle: SandboxHandle, command: str, **how: Any) -> SandboxExecResult:
            if command == "short":
                await asyncio.sleep(0.2)
            return await super().exec(handle, command, **how)

    monkeypatch.setattr("nemo_gym.sandbox.api.SYNC_LOOP_CLOSE_TIMEOUT_S", 0.5)
    for command, expected in (("short", "short in None as None"), ("wait", "Sandbox has been stopped")):
        provider = Careful()
        sandbox = Sandbox(provider).start()
        said: list[str | None] = []

        def work(sandbox: Sandbox = sandbox, command: str = command, said: list[str | None] = said) -> None:
            try:
                said.append(sandbox.exec(command).stdout)
            except RuntimeError as error:
                said.append(str(error))

        threads = [threading.Thread(target=work, daemon=True), threading.Thread(target=sandbox.stop, daemon=True)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert said == [expected]
        assert provider.events == ["create", "close", "aclose"]


def test_a_stop_that_is_refused_breaks_nothing() -> None:
    async def inside_a_loop() -> None:
        sandbox.stop()

    with Sandbox(Notebook()) as sandbox:
        sandbox.start()
        loop = sandbox._loop
        with pytest.raises(RuntimeError, match="use AsyncSandbox there"):
            asyncio.run(inside_a_loop())
        assert sandbox._loop is loop
        assert sandbox.exec("x").stdout == "x in None as None"


def test_programs_without_an_event_loop_have_sandboxes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    provider = Notebook()
    with Sandbox(provider, SandboxSpec(workdir="/w", ports=[80])) as sandbox:
        assert sandbox.status() is SandboxStatus.UNKNOWN
        sandbox.start()
        assert sandbox.exec("x").stdout == "x in /w as None"
        (tmp_path / "a").write_text("text")
        sandbox.upload(tmp_path / "a", "/a")
        sandbox.download("/a", tmp_path / "b")
        assert (tmp_path / "b").read_text() == "text"
        assert sandbox.endpoint(80).endpoint == "https://notebook.example/80"

        async def inside() -> None:
            with pytest.raises(RuntimeError, match="use AsyncSandbox there"):
                sandbox.exec("x")

        asyncio.run(inside())
        monkeypatch.setattr("nemo_gym.sandbox.api.SYNC_OPERATION_TIMEOUT_S", 0.2)
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.2 s"):
            sandbox.exec("wait")
        monkeypatch.undo()
    assert sandbox.status() is SandboxStatus.STOPPED
    assert provider.events == ["create", "close", "aclose"]
    forgotten = Notebook()
    Sandbox(forgotten).start()
    assert forgotten.events == ["create", "close", "aclose"]
    by_s = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < by_s:
        time.sleep(0.02)
    assert threading.active_count() <= before, threading.enumerate()


class Terminal(Notebook):
    """A provider with terminals: shells of this machine, which echo what is typed."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[SandboxPtySpec] = []

    async def create_pty(self, handle: SandboxHandle, spec: SandboxPtySpec) -> "Session":
        self.opened.append(spec)
        command = ["sh", "-c", spec.command] if spec.command else ["sh"]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=spec.env,
            cwd=spec.cwd,
        )
        return Session(process, echoes=spec.command is None)


class Session:
    mode = None

    def __init__(self, process: asyncio.subprocess.Process, echoes: bool) -> None:
        self.session_id = str(process.pid)
        self.closed = False
        self._process = process
        self._echo = b""
        self._echoes = echoes

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        assert self._process.stdout is not None
        echo, self._echo = self._echo, b""
        return echo or await self._process.stdout.read(7)

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        assert self._process.stderr is not None
        return await self._process.stderr.read(7)

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._echo = data if self._echoes else b""
        self._process.stdin.write(data)

    async def resize(self, rows: int, cols: int) -> None: ...

    async def send_signal(self, signal: str) -> None: ...

    async def wait_exit(self, *, timeout_s: float | None = None) -> int:
        return await self._process.wait()

    async def close(self) -> None:
        self.closed = True
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def test_commands_run_in_terminals_where_a_provider_has_them() -> None:
    async def use() -> None:
        provider = Terminal()
        async with AsyncSandbox(provider) as sandbox:
            await sandbox.start()
            alone = await sandbox.pty.exec("echo out; echo err >&2; exit 4", pty=False)
            assert (alone.stdout, alone.stderr, alone.return_code) == ("out\n", "err\n", 4)
            shell = await sandbox.pty.create()
            assert (await sandbox.pty.exec("cd /usr && VALUE=7")).return_code == 0
            done = await sandbox.pty.exec('pwd; echo "it\'s $VALUE"; (exit 3)')
            assert (done.stdout, done.return_code) == ("/usr\nit's 7\n", 3)
            other = await sandbox.pty.exec("pwd", cwd="/")
            assert other.stdout == "/\n"
            late = await sandbox.pty.exec("sleep 5", session=shell, timeout_s=0.5)
            assert (late.return_code, late.error_type) == (125, "timeout")
            assert [spec.command for spec in provider.opened] == ["echo out; echo err >&2; exit 4", None, "pwd"]
            with pytest.raises(NotImplementedError, match="cannot be found again"):
                await sandbox.pty.attach("1")
        assert shell.closed

    asyncio.run(use())


def test_every_name_is_offered_and_says_where_it_is_from() -> None:
    for name in nemo_gym.sandbox.__all__:
        assert getattr(nemo_gym.sandbox, name) is not None
    assert set(nemo_gym.sandbox.__all__) == set(nemo_gym.sandbox._HOMES)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        nemo_gym.sandbox.nothing  # noqa: B018
