"""Which interpreter each server that is alone in its process runs with.

What builds environments is imported only when one may have to be built.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from nemo_gym.cli.launch_errors import EnvironmentBuildError
from nemo_gym.cli.plan import PlannedServer
from nemo_gym.cli.warden import Warden
from nemo_gym.keys import CACHE_DIR_KEY_NAME, HEAD_SERVER_DEPS_KEY_NAME
from nemo_gym.paths import CACHE_DIR, PARENT_DIR, WORKING_DIR
from nemo_gym.schemas.run_config import RunConfig

if TYPE_CHECKING:
    from concurrent.futures import Future

    from nemo_gym.cli.environment import Workshop

_BUILT_AT_ONCE = 4
_LOOK_EVERY_S = 0.1


class Pythons:
    """Finds interpreters, building environments where there is none yet."""

    def __init__(
        self, config: DictConfig, settings: RunConfig, warden: Warden, should_stop: Callable[[], bool]
    ) -> None:
        self._config = config
        self._settings = settings
        self._warden = warden
        self._should_stop = should_stop
        self._has_failed = threading.Event()

    def prepare(self, servers: Sequence[PlannedServer]) -> None:
        """Build what these servers need, several environments at once.

        Raises:
            EnvironmentBuildError: naming every server whose requirements cannot be installed.
        """
        needy = [server for server in servers if server.isolation == "venv" and server.present_python is None]
        if not needy:
            return
        from concurrent.futures import ThreadPoolExecutor

        from nemo_gym.cli.environment import environment_key

        groups: dict[str, list[PlannedServer]] = {}
        for server in needy:
            groups.setdefault(environment_key(server.requirements, self._workshop), []).append(server)
        with ThreadPoolExecutor(_BUILT_AT_ONCE, "install") as pool:
            try:
                _results([pool.submit(self._build, group) for group in groups.values()])
            except BaseException:
                self._has_failed.set()
                raise

    def python_for(self, server: PlannedServer) -> Path:
        """The interpreter for a server, its environment built if need be."""
        if server.alone == "process":
            return Path(sys.executable)
        return server.present_python or self._build([server])

    @cached_property
    def _workshop(self) -> "Workshop":
        from nemo_gym.cli.environment import Workshop
        from nemo_gym.cli.installer import Installer

        settings = self._settings
        return Workshop(
            folder=environments_folder(self._config, settings),
            installer=Installer.find(settings.python_version, verbose=settings.pip_install_verbose),
            pins=tuple(str(pin) for pin in self._config.get(HEAD_SERVER_DEPS_KEY_NAME) or ()),
            variables={"UV_CACHE_DIR": settings.uv_cache_dir} if settings.uv_cache_dir else {},
            timeout_s=settings.environment_timeout_s,
            warden=self._warden,
            should_stop=lambda: self._should_stop() or self._has_failed.is_set(),
        )

    def _build(self, servers: Sequence[PlannedServer]) -> Path:
        from nemo_gym.cli.environment import prepare_environment

        try:
            return prepare_environment(servers[0].requirements, [server.name for server in servers], self._workshop)
        except BaseException:
            self._has_failed.set()  # the others need not go on
            raise


def environments_folder(config: DictConfig, settings: RunConfig) -> Path:
    """Where environments are kept: below `uv_venv_dir` if that was chosen, else in the cache."""
    chosen = Path(settings.uv_venv_dir).expanduser().absolute() if settings.uv_venv_dir else WORKING_DIR
    if chosen.resolve() in (WORKING_DIR.resolve(), PARENT_DIR.resolve()):
        chosen = Path(config.get(CACHE_DIR_KEY_NAME) or CACHE_DIR)
    return chosen / "venvs"


def _results(futures: "Sequence[Future[Path]]") -> None:
    """Wait for all; the failures as one error."""
    from concurrent.futures import wait

    # In steps: a thread that waits without end never gets to run its signal handlers.
    while wait(futures, _LOOK_EVERY_S).not_done:
        pass
    failures = [error for future in futures if (error := future.exception()) is not None]
    told = [str(error) for error in failures if isinstance(error, EnvironmentBuildError)]
    expected = (EnvironmentBuildError, KeyboardInterrupt)
    unexpected = next((error for error in failures if not isinstance(error, expected)), None)
    if unexpected is not None:
        raise unexpected
    if told:
        raise EnvironmentBuildError("\n".join(told))
    if failures:
        raise KeyboardInterrupt
