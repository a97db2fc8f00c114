"""PUBLIC: `RunHelper` starts every server of a configuration, watches them, and stops them.

    helper = RunHelper()
    helper.start(GlobalConfigDictParserConfig(...))   # returns when every server answers
    helper.poll()                                     # raises when one has ended
    helper.shutdown()

It may be used from any thread and touches no signal handlers. Modules that load FastAPI, aiohttp or rich
are imported after the servers have been started, so that they load theirs at the same time.
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from nemo_gym.cli.fleet import Fleet
from nemo_gym.cli.launch_errors import HeadServerStoppedError, ServerStartError
from nemo_gym.cli.output import open_log_folder
from nemo_gym.cli.plan import PlannedServer, PlanSettings, plan_servers
from nemo_gym.cli.preflight import check_ports, identify_run, warn_if_open_to_others
from nemo_gym.cli.pythons import Pythons
from nemo_gym.cli.units import Alone, Host, RunContext
from nemo_gym.cli.validation import validate_options
from nemo_gym.cli.warden import Warden
from nemo_gym.config.auth import make_auth_token
from nemo_gym.config.handover import write_config_file
from nemo_gym.config.instances import find_instances
from nemo_gym.errors import NoServerInstancesError
from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict, set_global_config_dict
from nemo_gym.http.addresses import Address, base_url
from nemo_gym.schemas.run_config import RunConfig

if TYPE_CHECKING:
    import uvicorn

    from nemo_gym.http.server_client import ServerClient
    from nemo_gym.servers.head import HeadServer

logger = logging.getLogger(__name__)

POLL_EVERY_S = 0.2
_STEP_S = 0.05
_TELL_EVERY_S = 10.0
_HEAD_STOP_TIMEOUT_S = 5.0


class RunHelper:
    """The servers of one run."""

    _server_client: "ServerClient"
    """Calls the servers of this run; there once `start` has returned."""

    def __init__(self) -> None:
        self._is_stopping = False  # no Event: setting one in a signal handler can deadlock with waiting for it
        self._shutdown_lock = threading.RLock()
        self._grace_s: float | None = None
        self.made_token: str | None = None
        """The token that `start` made because the config says `auth_token: auto`."""
        self._run_id = ""
        self._settings = RunConfig()
        self._fleet: Fleet | None = None
        self._warden: Warden | None = None
        self._config_file: Path | None = None
        self._head: HeadServer | None = None
        self._head_server: uvicorn.Server | None = None
        self._head_thread: threading.Thread | None = None
        self._published_version = -1

    def start(self, global_config_dict_parser_config: GlobalConfigDictParserConfig | None = None) -> None:
        """Start every configured server and return when all of them answer; on any failure everything is stopped.

        Without an argument this process's config is used. With `dry_run` it returns when every server has been
        checked, with nothing left running.

        Raises:
            ConfigError: something the user can fix, such as a missing folder, a busy port or wrong requirements.
            ServerStartError: a server cannot be started or does not answer in time.
            ServerCrashedError: a server ended before it was ready.
        """
        if self._fleet is not None:
            raise ServerStartError("this helper has started its servers already; call shutdown() before start()")
        self._is_stopping = False
        self._grace_s = None
        config = _load_config(global_config_dict_parser_config)
        try:
            self._start(config)
        except BaseException:
            self.shutdown()
            raise

    def display_server_instance_info(self) -> None:
        """Print the head server and every running server as a table."""
        if self._fleet is None or self._head is None:
            return
        from nemo_gym.cli.instance_table import print_instances

        head_url = base_url(Address(self._head.config.host, self._head.config.port))
        print_instances(head_url, self._run_id, self._fleet.instances(), self._fleet.start_seconds())

    def poll(self) -> None:
        """Check that everything runs; with `restart_crashed_servers`, start again what does not.

        Raises:
            RuntimeError: the head server or a process has ended; the message says which, how, and its last lines.
        """
        self._check_head()
        if self._fleet is not None:
            self._fleet.step()
            self._publish()

    def run_forever(self) -> None:
        """Watch the servers until `request_stop`, Ctrl-C or a crash, then stop everything."""
        try:
            while self._fleet is not None and not self._is_stopping:
                self.poll()
                time.sleep(POLL_EVERY_S)
        except KeyboardInterrupt:
            self._is_stopping = True
        finally:
            self.shutdown()

    def request_stop(self, *, at_once: bool = False) -> None:
        """Make `start` give up or `run_forever` end soon, servers killed rather than asked if `at_once`.

        Safe to call from a signal handler.
        """
        self._grace_s = 0.0 if at_once else None
        self._is_stopping = True

    def shutdown(self) -> None:
        """Stop every server and the head server; a second call does nothing."""
        self._is_stopping = True
        with self._shutdown_lock:
            fleet = self._fleet
            try:
                if fleet is not None:
                    grace_s = self._settings.server_stop_timeout_s if self._grace_s is None else self._grace_s
                    fleet.stop(grace_s)
            finally:
                self._fleet = None
                self._stop_head()
                self._clean_up()
        if fleet is not None:
            logger.info("NeMo Gym finished!")

    def _start(self, config: DictConfig) -> None:
        self._settings = settings = validate_options(RunConfig, config, "ng_run")
        planned = _plan(config, settings)
        self._run_id = identify_run(config)
        self.made_token = make_auth_token(config)
        if not settings.dry_run:
            check_ports(config, planned)
            warn_if_open_to_others(config, planned)
        self._warden = warden = Warden()
        pythons = Pythons(config, settings, warden, lambda: self._is_stopping)
        pythons.prepare(planned)
        self._config_file = write_config_file(config)
        warden.remove(self._config_file)
        log_folder = open_log_folder(settings.nemo_gym_log_dir)
        if log_folder is not None:
            logger.info("the output of the servers goes to %s", log_folder)
        context = RunContext(config, self._config_file, settings, warden, log_folder)
        self._fleet = Fleet(context, lambda server: Alone(server, pythons.python_for(server), context))
        self._start_processes(planned, context, pythons)
        if not settings.dry_run:
            self._start_head(config)
        self._wait_until_ready()
        self._tell_the_result(len(planned))

    def _start_processes(self, planned: Sequence[PlannedServer], context: RunContext, pythons: Pythons) -> None:
        assert self._fleet is not None
        hosted = [server for server in planned if server.isolation == "hosted"]
        replicas = 1 if self._settings.dry_run else self._settings.num_replicas
        for replica in range(replicas if hosted else 0):
            name = f"host {replica}" if replica else "host"
            self._fleet.start(Host(name, hosted, replica, context))
        for server in planned:
            if server.isolation != "hosted":
                self._fleet.start(Alone(server, pythons.python_for(server), context))

    def _start_head(self, config: DictConfig) -> None:
        from nemo_gym.http.server_client import ServerClient
        from nemo_gym.servers.head import HeadServer

        self._head_server, self._head_thread, self._head = HeadServer.run_webserver()
        self._server_client = ServerClient(head_server_config=self._head.config, global_config_dict=config)

    def _wait_until_ready(self) -> None:
        assert self._fleet is not None
        tell_at_s = time.monotonic() + _TELL_EVERY_S
        while not self._fleet.is_ready:
            if self._is_stopping:
                raise KeyboardInterrupt
            self._check_head()
            self._fleet.step(_STEP_S)
            if time.monotonic() > tell_at_s:
                logger.info("waiting for %s", ", ".join(self._fleet.not_ready()))
                tell_at_s += _TELL_EVERY_S

    def _tell_the_result(self, servers: int) -> None:
        assert self._fleet is not None
        if self._settings.dry_run:
            if self._fleet.problems:
                raise ServerStartError("\n\n".join(["The dry run failed.", *self._fleet.problems]))
            print(f"Dry run passed: {servers} / {servers} servers can be started.")
            self.shutdown()
            return
        self._publish()
        self._fleet.keep_running()
        self.display_server_instance_info()
        print(f"All {servers} / {servers} servers ready!", flush=True)

    def _publish(self) -> None:
        if self._fleet is None or self._head is None or self._published_version == self._fleet.version:
            return
        self._published_version = self._fleet.version
        self._head.set_server_instances([instance.model_dump(mode="json") for instance in self._fleet.instances()])

    def _check_head(self) -> None:
        if self._head_thread is not None and not self._head_thread.is_alive():
            raise HeadServerStoppedError(
                "Head server finished unexpectedly; the servers of this run are stopped with it"
            )

    def _stop_head(self) -> None:
        if self._head_server is not None and self._head_thread is not None:
            self._head_server.should_exit = True
            self._head_thread.join(_HEAD_STOP_TIMEOUT_S)
        self._head = self._head_server = self._head_thread = None
        self._published_version = -1

    def _clean_up(self) -> None:
        if self._warden is not None:
            self._warden.close()
            self._warden = None
        if self._config_file is not None:
            self._config_file.unlink(missing_ok=True)
            self._config_file = None


def _load_config(parser_config: GlobalConfigDictParserConfig | None) -> DictConfig:
    """The config a program asks for, else the one this process has."""
    return get_global_config_dict() if parser_config is None else set_global_config_dict(parser_config)


def _plan(config: DictConfig, settings: RunConfig) -> list[PlannedServer]:
    instances = find_instances(config)[0]
    if not instances:
        raise NoServerInstancesError(
            "the configuration defines no server, so there is nothing to start; name the config files of an "
            'environment and of a model: "+config_paths=[resources_servers/<name>/configs/<name>.yaml,...]"'
        )
    return plan_servers(
        instances, PlanSettings(settings.python_version, settings.skip_venv_if_present, settings.uv_venv_dir)
    )
