"""PUBLIC: `RunHelper` starts every server of a configuration, watches them, and stops them.

    helper = RunHelper()
    helper.start(GlobalConfigDictParserConfig(...))   # returns when every server answers
    helper.poll()                                     # raises when one has ended
    helper.shutdown()

It may be used from any thread and touches no signal handlers: that is left to `ng_run`.
Modules that load FastAPI, aiohttp or rich are imported after the servers have been started, so that they load
theirs at the same time.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import DictConfig

from nemo_gym.config.handover import remove_config_file, write_config_file
from nemo_gym.config.hosts import DEFAULT_PORT_RANGE, find_open_port, port_was_chosen
from nemo_gym.config.instances import find_instances
from nemo_gym.config.options import validate_options
from nemo_gym.config.secrets import make_auth_token
from nemo_gym.errors import (
    ConfigError,
    HeadServerStoppedError,
    NoServerInstancesError,
    ServerBlockError,
    ServerStartError,
)
from nemo_gym.global_config import (
    GlobalConfigDictParserConfig,
    get_global_config_dict,
    set_global_config_dict,
)
from nemo_gym.http.addresses import Address, base_url
from nemo_gym.http.pace_books import share_pace
from nemo_gym.keys import (
    DEFAULT_HEAD_SERVER_PORT,
    DISALLOWED_PORTS_KEY_NAME,
    HEAD_SERVER_KEY_NAME,
    PORT_RANGE_HIGH_KEY_NAME,
    PORT_RANGE_LOW_KEY_NAME,
)
from nemo_gym.launch import waiting_host
from nemo_gym.launch.fleet import Fleet
from nemo_gym.launch.plan import (
    PlannedServer,
    PlanSettings,
    Pythons,
    identify_run,
    plan_servers,
    warn_if_open_to_others,
)
from nemo_gym.launch.process import open_log_folder
from nemo_gym.launch.server_processes import Alone, Host, HostCount, RunContext
from nemo_gym.launch.warden import Warden
from nemo_gym.process_inputs import common_book
from nemo_gym.runtime import hold, listen
from nemo_gym.sandbox import reaper
from nemo_gym.schemas.cli_config import RunConfig
from nemo_gym.schemas.server_config import ServerInstanceDisplayConfig
from nemo_gym.terminal import new_table, print_table

if TYPE_CHECKING:
    import uvicorn

    from nemo_gym.http.client import ServerClient
    from nemo_gym.schemas.server_config import ServerStatus
    from nemo_gym.servers.head import HeadServer

logger = logging.getLogger(__name__)

POLL_EVERY_S = 0.2
_STEP_S = 0.05
_TELL_EVERY_S = 10.0
_HEAD_STOP_TIMEOUT_S = 5.0
_PORTS_TRIED = 20
T = TypeVar("T")


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
        self.may_move_head = False
        """Whether the head server listens on another port when another run has the usual one."""
        self._head_port: socket | None = None
        self._held_ports: list[socket] = []
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

        head_url = base_url(Address(self._head.config.host, self._head.config.port))
        print_instances(head_url, self._run_id, self._fleet.instances(), self._fleet.start_seconds())

    def wait_for_spinup(self) -> None:
        """Return when every server answers.

        Raises:
            RuntimeError: one of them, or the head server, has ended, or does not answer in time.
        """
        self._wait_until_ready()

    def wait_for_dry_run_spinup(self) -> None:
        """Return when every server has been checked.

        Raises:
            ServerStartError: servers could not be built; all of them are named. It is a `ServerBlockError`, for the
                user to fix, if all of them refuse their block of the config.
        """
        self._wait_until_ready()
        if self._fleet is not None and self._fleet.problems:
            problems = self._fleet.problems
            kind = ServerBlockError if all(isinstance(one, ConfigError) for one in problems) else ServerStartError
            raise kind("\n\n".join(["The dry run failed.", *map(str, problems)]))

    def check_http_server_statuses(self, successful_servers: list[str]) -> "list[tuple[str, ServerStatus]]":
        """Ask every server that is not among `successful_servers` whether it answers; names and what came of it."""
        if self._fleet is None:
            return []
        names = [name for unit in self._fleet.units for name in unit.servers]
        asked = [name for name in dict.fromkeys(names) if name not in successful_servers]
        return [(name, self._server_client.poll_for_status(name)) for name in asked]

    def share_pace(self, share: float) -> None:
        """Let model servers keep to a part of the pace that they are configured with, until they are told another."""
        if self._config_file is not None:
            share_pace(self._config_file, share)

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
                try:
                    self._reap_sandboxes()
                finally:
                    self._clean_up()
        if fleet is not None:
            logger.info("NeMo Gym finished!")

    def _start(self, config: DictConfig) -> None:
        self._settings = settings = validate_options(RunConfig, config, "ng_run")
        planned = _plan(config, settings)
        self._run_id = identify_run(config)
        self.made_token = make_auth_token(config)
        if not settings.dry_run:
            ports = hold_ports(config, planned, may_move_head=self.may_move_head)
            self._head_port, planned, self._held_ports = ports.head, ports.planned, ports.of_servers
            warn_if_open_to_others(config, planned)
        self._warden = warden = Warden()
        pythons = Pythons(config, settings, warden, lambda: self._is_stopping)
        pythons.prepare(planned)
        self._config_file = write_config_file(config)
        warden.remove(self._config_file)
        warden.remove(common_book(self._config_file))
        warden.reap(Path(reaper.book_beside(str(self._config_file))))
        log_folder = open_log_folder(settings.nemo_gym_log_dir)
        if log_folder is not None:
            logger.info("the output of the servers goes to %s", log_folder)
        hosts = HostCount() if settings.dry_run else HostCount.of(settings.num_replicas)
        context = RunContext(config, self._config_file, settings, warden, log_folder, hosts)
        self._fleet = Fleet(context, lambda server: Alone(server, pythons.python_for(server), context))
        self._start_processes(planned, context, pythons)
        if settings.dry_run:
            self.wait_for_dry_run_spinup()
        else:
            self._start_head(config)
            self._publish_starting()
            self.wait_for_spinup()
        self._tell_the_result(len(planned))

    def _start_processes(self, planned: Sequence[PlannedServer], context: RunContext, pythons: Pythons) -> None:
        assert self._fleet is not None
        hosted = [server for server in planned if server.isolation == "hosted"]
        for replica in range(context.hosts.first if hosted else 0):
            name = f"host {replica}" if replica else "host"
            self._fleet.start(Host(name, hosted, replica, context))
        waiting_host.end()  # nothing is hosted
        for server in planned:
            if server.isolation != "hosted":
                self._fleet.start(Alone(server, pythons.python_for(server), context))

    def _start_head(self, config: DictConfig) -> None:
        from nemo_gym.server_utils import HeadServer, ServerClient

        held, self._head_port = self._head_port, None
        self._head_server, self._head_thread, self._head = HeadServer.run_webserver(held)
        self._server_client = ServerClient(head_server_config=self._head.config, global_config_dict=config)

    def _wait_until_ready(self) -> None:
        if self._fleet is None:
            return
        tell_at_s = time.monotonic() + _TELL_EVERY_S
        while not self._fleet.is_ready:
            if self._is_stopping:
                raise KeyboardInterrupt
            self._check_head()
            self._fleet.step(_STEP_S)
            self._publish_starting()
            if time.monotonic() > tell_at_s:
                logger.info("waiting for %s", ", ".join(self._fleet.not_ready()))
                tell_at_s += _TELL_EVERY_S

    def _tell_the_result(self, servers: int) -> None:
        assert self._fleet is not None
        if self._settings.dry_run:
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
        self._publish_starting()
        self._head.set_server_instances([instance.model_dump(mode="json") for instance in self._fleet.instances()])

    def _publish_starting(self) -> None:
        if self._fleet is not None and self._head is not None:
            self._head.set_starting(self._fleet.not_ready())

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

    def _reap_sandboxes(self) -> None:
        """Remove the containers that servers have not removed themselves; those of other runs are not touched."""
        if self._config_file is not None:
            for problem in reaper.reap(reaper.book_beside(str(self._config_file))):
                logger.warning("sandboxes of this run may be left behind: %s", problem)

    def _clean_up(self) -> None:
        if self._head_port is not None:
            self._head_port.close()
            self._head_port = None
        while self._held_ports:
            self._held_ports.pop().close()
        if self._warden is not None:
            self._warden.close()
            self._warden = None
        if self._config_file is not None:
            remove_config_file(self._config_file)
            self._config_file = None


def _load_config(parser_config: GlobalConfigDictParserConfig | None) -> DictConfig:
    """The config a program asks for, else the one this process has."""
    return get_global_config_dict() if parser_config is None else set_global_config_dict(parser_config)


def _plan(config: DictConfig, settings: RunConfig) -> list[PlannedServer]:
    instances = find_instances(config)[0]
    if not instances:
        raise NoServerInstancesError(
            "the configuration defines no server, so there is nothing to start; name an environment and a model, "
            "+environment=<name> +model=<model>, or their config files: "
            '"+config_paths=[resources_servers/<name>/configs/<name>.yaml,...]" (ng_list_environments lists them)'
        )
    return plan_servers(instances, PlanSettings.of(settings))


@dataclass
class HeldPorts:
    """The ports of a run, which other runs that look for some do not get any more."""

    head: socket
    """It listens already."""
    planned: list[PlannedServer]
    """The servers, each with the port that is held for it."""
    of_servers: list[socket]


def hold_ports(config: DictConfig, planned: Sequence[PlannedServer], *, may_move_head: bool = False) -> HeldPorts:
    """Take all ports before anything is started, or find out that some are taken.

    A server that asked for none gets another one if somebody was quicker, and so does the head server, with
    `may_move_head`, if the usual one is taken; the config then says which.

    Raises:
        ConfigError: ports are taken; all of them are named.
    """
    problems: list[str] = []
    held = _taken(problems, _head_port, config, may_move=may_move_head)
    with_ports = [_taken(problems, _port_of_server, config, server) for server in planned]
    of_servers = [kept for found in with_ports if found is not None and (kept := found[1]) is not None]
    if problems or held is None:
        for kept in filter(None, [held, *of_servers]):
            kept.close()
        raise ConfigError("\n".join(problems))
    return HeldPorts(held, [found[0] for found in with_ports if found is not None], of_servers)


def _taken(problems: list[str], take: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
    try:
        return take(*arguments, **options)
    except ConfigError as error:
        problems.append(str(error))
        return None


def _port_of_server(config: DictConfig, server: PlannedServer) -> tuple[PlannedServer, socket | None]:
    """A server with its port, and what holds that, if this system can."""
    who = f"server {server.name!r}"
    remedy = f"++{server.name}.{server.server_type}.{server.implementation}.port=<port>"
    block = config[server.name][server.server_type][server.implementation]
    if not port_was_chosen(block):
        return server, hold(server.host, server.port, who, remedy, exclusive=False)
    port, kept = _first_free(config, server.port, partial(hold, server.host, who=who, remedy=remedy, exclusive=True))
    block.port = port
    return replace(server, port=port), kept


def _head_port(config: DictConfig, *, may_move: bool) -> socket:
    """The port of the head server, taken."""
    head, who, remedy = config[HEAD_SERVER_KEY_NAME], "the head server", "+head_server.port=<port> (0: any free one)"
    try:
        return listen(head.host, head.port, who, remedy)
    except ConfigError:
        if not may_move or head.port != DEFAULT_HEAD_SERVER_PORT:
            raise
    take = partial(listen, head.host, who=who, remedy=remedy, exclusive=True)
    head.port, held = _first_free(config, DEFAULT_HEAD_SERVER_PORT, take)
    logger.info("Port %d is taken, so the head server listens on %d", DEFAULT_HEAD_SERVER_PORT, head.port)
    return held


def _first_free(config: DictConfig, port: int, take: Callable[[int], T]) -> tuple[int, T]:
    """This port, or else another that can be taken; another run may look for one at the same moment."""
    refused = [int(other) for other in config.get(DISALLOWED_PORTS_KEY_NAME) or ()]
    low = config.get(PORT_RANGE_LOW_KEY_NAME) or DEFAULT_PORT_RANGE[0]
    high = config.get(PORT_RANGE_HIGH_KEY_NAME) or DEFAULT_PORT_RANGE[1]
    for _ in range(_PORTS_TRIED):
        with contextlib.suppress(ConfigError):
            return port, take(port)
        refused.append(port)
        port = find_open_port(refused, low, high)
    return port, take(port)


def print_instances(
    head_url: str,
    run_id: str,
    instances: Sequence[ServerInstanceDisplayConfig],
    took_s: Mapping[tuple[str, int], float],
) -> None:
    """Print the head server and every instance to stdout."""
    table = new_table("server", "kind", "URL", "pid", "isolation", "ready after")
    table.add_row("head server", f"run {run_id}", head_url, str(os.getpid()), "this process", "")
    for instance in instances:
        name, replica = str(instance.process_name), instance.replica or 0
        seconds = took_s.get((name, replica))
        table.add_row(
            f"{name} (replica {replica})" if replica else name,
            f"{instance.server_type}/{instance.name}",
            instance.url,
            str(instance.pid),
            instance.isolation,
            "" if seconds is None else f"{seconds:.2f} s",
        )
    print_table(table)
