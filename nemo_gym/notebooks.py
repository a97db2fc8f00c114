"""PUBLIC: for notebooks and scripts: servers that run as long as a block lasts, and rollouts as a table.

    with nemo_gym.servers_of(config_paths=["my_environment.yaml", "my_model.yaml"]) as servers:
        summary = servers.collect(RolloutCollectionConfig(...))
    table = nemo_gym.to_dataframe("rollouts.jsonl")

Everything here is plain: nothing has to be awaited, and all of it works where an event loop is running already.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from nemo_gym.errors import ConfigError
from nemo_gym.keys import AGENT_REF_KEY_NAME, CONFIG_PATHS_KEY_NAME, HEAD_SERVER_KEY_NAME, OWN_KEY_PREFIX
from nemo_gym.paths import install_command
from nemo_gym.runs.read import records

if TYPE_CHECKING:
    from nemo_gym.http.client import ServerClient
    from nemo_gym.launch.run_helper import RunHelper
    from nemo_gym.rollout_collection import RolloutCollectionConfig, RunSummary

__all__ = ["RunningServers", "run_sync", "servers_of", "to_dataframe"]

T = TypeVar("T")
_TABLE_LIBRARIES: tuple[Literal["pandas"], Literal["polars"]] = ("pandas", "polars")
_TIMING = "timing"
_LOOK_EVERY_S = 0.2
_STARTS_WITHIN_S = 5.0
_PLAIN = (str, int, float, bool, type(None))


class RunningServers:
    """The servers of `servers_of`, while its block lasts."""

    def __init__(self, helper: "RunHelper") -> None:
        self._helper = helper

    @property
    def client(self) -> "ServerClient":
        """Calls them by name: `await servers.client.post("my_agent", "/run", json=row)`."""
        return self._helper._server_client

    def collect(self, config: "RolloutCollectionConfig") -> "RunSummary":
        """Collect every rollout that `config` asks for into its files, as `ng_collect_rollouts` does.

        The same to be awaited is `await RolloutCollectionHelper().collect(config)`.

        Raises:
            GymError: the rows or the options are not as they should be, or a server has ended.
        """
        from nemo_gym.rollout_collection import RolloutCollectionHelper

        self.poll()
        return run_sync(RolloutCollectionHelper().collect(config))

    def poll(self) -> None:
        """Check that all of them run.

        Raises:
            RuntimeError: one has ended; the message says which, how, and its last lines.
        """
        self._helper.poll()


@contextmanager
def servers_of(config_paths: Iterable[str | Path] = (), **config: Any) -> Iterator[RunningServers]:
    """Start every server of these config files, as `ng_run` does, and stop them when the block ends.

    Further arguments are keys of the config (`policy_model_name="..."`, `num_replicas=2`, a whole server block); they
    count more than the files and `env.yaml`. The head server gets a free port unless `head_server` names one. Inside,
    this process's config is that of these servers, so that whatever collects finds them.

    Raises:
        ConfigError: something is wrong with the configuration; all of it is named.
        GymError: a server cannot be started.
    """
    from nemo_gym.global_config import GlobalConfigDictParserConfig, OmegaConf, another_global_config_dict
    from nemo_gym.launch.run_helper import RunHelper

    if isinstance(config_paths, str | Path):
        raise ConfigError(f"config_paths is a list of files; write config_paths=[{str(config_paths)!r}]")
    given = {HEAD_SERVER_KEY_NAME: {"port": 0}, **config, CONFIG_PATHS_KEY_NAME: [str(path) for path in config_paths]}
    parser = GlobalConfigDictParserConfig(
        initial_global_config_dict=OmegaConf.create(given),
        skip_load_from_cli=True,  # in a notebook it is that of the kernel
    )
    helper = RunHelper()
    with another_global_config_dict():
        helper.start(parser)
        try:
            yield RunningServers(helper)
        finally:
            helper.shutdown()


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns: as `asyncio.run`, but also where an event loop is running already, as in a notebook.

    There it runs in a thread with a loop of its own, and this one stands still meanwhile; Ctrl-C cancels it.
    """
    try:
        caller = asyncio.current_task()
    except RuntimeError:
        return asyncio.run(work)
    beside = _Beside(work)
    try:
        beside.start()
        while not wait([beside.outcome], _LOOK_EVERY_S).done:
            if caller is not None and caller.cancelling():  # what Ctrl-C means to a program in `asyncio.run`
                beside.cancel()
        return beside.outcome.result()
    except KeyboardInterrupt:  # which may come while the thread starts
        beside.cancel()
        wait([beside.outcome], _STARTS_WITHIN_S if beside.ident is None else None)
        raise


class _Beside(threading.Thread, Generic[T]):
    """A coroutine in an event loop of its own, in a thread of its own."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        super().__init__(name="nemo_gym")
        self.outcome: Future[T] = Future()
        self._work, self._context = work, copy_context()
        self._is_unwanted = threading.Event()
        self._running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    def run(self) -> None:
        """Run the coroutine to its end."""
        try:
            self.outcome.set_result(self._context.run(asyncio.run, self._main()))
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            self.outcome.set_exception(error)

    def cancel(self) -> None:
        """Cancel it, also before it has begun."""
        self._is_unwanted.set()
        for loop, task in self._running:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(task.cancel)
        self._running.clear()

    async def _main(self) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._running.append((asyncio.get_running_loop(), task))
        if self._is_unwanted.is_set():
            task.cancel()
        return await self._work


def to_dataframe(path: str | Path, library: Literal["pandas", "polars"] | None = None) -> Any:
    """The rollouts of a file, one per row, as a data frame of pandas or, where that is not installed, of polars.

    Columns are what the records say in numbers and texts: `task_index`, `rollout_index`, `agent`, `reward`, what the
    verifier adds, `answer` (the last thing the model said), token counts and `duration_s`. Conversations stay in the
    file. Files of failures and of materialized inputs can be read, too.

    Raises:
        ConfigError: there is no such file, it holds no records, or neither library is installed.
    """
    frames = _table_library(library)
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    rows = [_flat(record) for _, _, record in records(path, "leave", may_lack_key=True)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = {name: [row.get(name) for row in rows] for name in columns}
    return frames.DataFrame(data, strict=False) if frames.__name__ == "polars" else frames.DataFrame(data)


def _table_library(wanted: str | None) -> Any:
    for name in _TABLE_LIBRARIES if wanted is None else (wanted,):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    named = " or ".join(_TABLE_LIBRARIES) if wanted is None else wanted
    raise ConfigError(
        f"to_dataframe needs {named}, which is not installed; this brings pandas: {install_command('dataframe')}"
    )


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a record by the names of their columns; those about the rollout come first."""
    own = {
        name.removeprefix(OWN_KEY_PREFIX): value for name, value in record.items() if name.startswith(OWN_KEY_PREFIX)
    }
    timing = own.pop(_TIMING, None)
    agent_ref = record.get(AGENT_REF_KEY_NAME)
    response = record.get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    flat = own | {"agent": agent_ref.get("name") if isinstance(agent_ref, dict) else None}
    if isinstance(response, dict):
        flat["answer"] = _answer(response)
    if isinstance(usage, dict):
        flat |= usage
    if isinstance(timing, dict):
        flat |= {name: value for name, value in timing.items() if name != "calls"}
    for name, value in record.items():
        if not name.startswith(OWN_KEY_PREFIX):
            flat[f"record.{name}" if name in flat else name] = value
    return {name: value for name, value in flat.items() if isinstance(value, _PLAIN)}


def _answer(response: dict[str, Any]) -> str | None:
    """The text of the last message."""
    output = response.get("output")
    for item in reversed(output if isinstance(output, list) else []):
        if isinstance(item, dict) and item.get("type") == "message" and isinstance(item.get("content"), list):
            parts = (part.get("text") for part in item["content"] if isinstance(part, dict))
            return "".join(part for part in parts if isinstance(part, str))
    return None
