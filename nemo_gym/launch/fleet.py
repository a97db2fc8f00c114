"""All processes of a run, watched together: which servers are ready, which ended, which are started again or added.

`step` does whatever is due and never blocks for long, so that starting, polling and running on are the
same loop: many processes are waited for at once, and one that ends is noticed whatever the others do.

Hosts are added (`num_replicas: auto`) when each of those that run says that it has had all it can do for two seconds,
and nothing speaks against it: whatever is in a host, and every environment of the run, must declare that it keeps
nothing beyond a rollout. So a run begins with one process, and comes to use as many cores as it has work for.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Empty

from nemo_gym.errors import GymError, ServerBlockError, ServerCrashedError, ServerStartError
from nemo_gym.http.addresses import base_url
from nemo_gym.http.pace_books import share_caps
from nemo_gym.keys import RESOURCES_TYPE
from nemo_gym.launch.plan import PlannedServer
from nemo_gym.launch.process import (
    ChildProcess,
    describe_exit,
    missing_import_remedy,
    missing_module,
    package_of,
    stop_all,
    with_output,
)
from nemo_gym.launch.requirements import canonical, with_compat
from nemo_gym.launch.server_processes import Alone, Event, Host, RunContext, Spawner, Unit
from nemo_gym.retry import Backoff
from nemo_gym.schemas.server_config import ServerInstanceDisplayConfig

logger = logging.getLogger(__name__)


@dataclass
class RestartBudget:
    """How often, and after which pauses, one process is started again."""

    max_restarts: int = 5
    within_s: float = 600.0
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0
    _restarts_s: list[float] = field(default_factory=list)

    def next_pause(self, now_s: float) -> float | None:
        """Seconds to wait before the next start, each time twice as long; None when the budget is spent."""
        self._restarts_s = [at for at in self._restarts_s if now_s - at < self.within_s]
        if len(self._restarts_s) >= self.max_restarts:
            return None
        self._restarts_s.append(now_s)
        return Backoff(self.first_pause_s, self.max_pause_s).after(len(self._restarts_s))


class Growth:
    """Decides when hosts are added to those that run, and has them started."""

    def __init__(self, fleet: "Fleet", context: RunContext) -> None:
        self._fleet = fleet
        self._context = context
        self._most = context.hosts.most
        self._spawner: Spawner | None = None
        self._has_told = False

    def step(self) -> None:
        """Add hosts if all that run are busy, half as many again; the first time only the process that forks them."""
        hosts = self._fleet.hosts
        if len(hosts) >= self._most or not all(host.is_ready and host.is_busy for host in hosts):
            return
        if undeclared := self._undeclared():
            self.stop(
                "{}, which {} `replicable = True`".format(
                    ", ".join(map(repr, undeclared)), "does not declare" if len(undeclared) == 1 else "do not declare"
                )
            )
        elif self._can_start(hosts[0]):
            added = min(self._most - len(hosts), max(1, len(hosts) // 2))
            share_caps(self._context.config_file, len(hosts) + added)
            for replica in range(len(hosts), len(hosts) + added):
                host = Host(f"host {replica}", list(hosts[0].servers.values()), replica, self._context)
                host.is_spare, host.spawner = True, self._spawner
                self._fleet.start(host)

    def stop(self, reason: str) -> None:
        """Add no more."""
        self._most = 0
        count = len(self._fleet.hosts)
        logger.info("the run stays with %d host process%s: %s", count, "" if count == 1 else "es", reason)

    def close(self) -> None:
        """End the process that forks hosts."""
        if self._spawner is not None:
            self._spawner.close()

    def _undeclared(self) -> list[str]:
        return [
            name
            for unit in self._fleet.units
            for name, server in unit.servers.items()
            if (isinstance(unit, Host) or server.server_type == RESOURCES_TYPE)
            and not (name in unit.ready and unit.ready[name].is_replicable)
        ]

    def _can_start(self, like: Host) -> bool:
        """Whether hosts can be started now: forked, as soon as the process for that is there, else each anew."""
        if not Spawner.is_possible():
            return True
        if self._spawner is None:
            self._spawner = Spawner(like, self._context)
            return False
        if self._spawner.is_usable:
            return True
        if self._spawner.refusal is not None and not self._has_told:
            self._has_told = True
            logger.info("hosts are started anew rather than forked: %s", self._spawner.refusal)
        is_late = time.monotonic() - self._spawner.started_s > self._context.settings.server_start_timeout_s
        return self._has_told or is_late


class Fleet:
    """The processes of one run."""

    def __init__(self, context: RunContext, run_alone: Callable[[PlannedServer], Alone]) -> None:
        self.units: list[Unit] = []
        self.version = 0
        """Grows whenever the list of running servers changes."""
        self.problems: list[GymError] = []
        """What went wrong in a dry run, which looks at every server before it ends."""
        self._context = context
        self._settings = context.settings
        self._run_alone = run_alone
        self._restarts_crashed = False
        self._budgets: dict[Unit, RestartBudget] = {}
        self._due_s: dict[Unit, float] = {}
        self._growth: Growth | None = None

    @property
    def hosts(self) -> list[Host]:
        """The processes that have several servers each."""
        return [unit for unit in self.units if isinstance(unit, Host)]

    @property
    def is_ready(self) -> bool:
        """Whether every server is ready; in a dry run, whether every process has finished."""
        if self._settings.dry_run:
            return not self.units
        return all(unit.is_ready for unit in self.units)

    def not_ready(self) -> list[str]:
        """The servers that are waited for; in a dry run all whose process has not finished."""
        is_dry = self._settings.dry_run
        return [name for unit in self.units for name in unit.servers if is_dry or name not in unit.ready]

    def start(self, unit: Unit) -> None:
        """Start a process and watch it from now on."""
        self.units.append(unit)
        unit.start()

    def keep_running(self) -> None:
        """From now on a crashed process is started again, and hosts are added, if the settings say so."""
        self._restarts_crashed = self._settings.restart_crashed_servers
        if self._context.hosts.may_grow and self.hosts:
            self._growth = Growth(self, self._context)

    def step(self, wait_s: float = 0.0) -> None:
        """Do whatever is due; wait that long for news if there is none.

        Raises:
            ServerBlockError: a server refuses its block of the config.
            ServerStartError: a server cannot be started or is not ready in time.
            ServerCrashedError: a process has ended and is not started again.
        """
        self._take_events(wait_s)
        ended = [(unit, code) for unit in self.units if (code := unit.exit_code()) is not None]
        if ended:
            self._take_events(0.0)
        for unit, code in ended:
            if unit not in self._due_s:
                self._handle_end(unit, code)
        if ended:
            self._take_events(0.0)  # building an environment for one of them may have taken minutes
        self._check_deadlines()
        self._start_again_what_is_due()
        if self._growth is not None:
            self._growth.step()

    def instances(self) -> list[ServerInstanceDisplayConfig]:
        """Every server that is ready, in the order of the processes."""
        most = self._context.hosts.most if self._context.hosts.may_grow else None
        return [
            ServerInstanceDisplayConfig(
                config_path=name,
                dir_path=str(server.folder),
                entrypoint=server.entrypoint,
                host=ready.address.host,
                name=server.implementation,
                pid=ready.pid,
                port=ready.address.port,
                process_name=name,
                server_type=server.server_type,
                start_time=ready.start_time,
                status="success",
                url=base_url(ready.address),
                isolation="hosted" if isinstance(unit, Host) else server.alone,
                replica=unit.replica,
                most_replicas=most if isinstance(unit, Host) else None,
            )
            for unit in self.units
            for name, server in unit.servers.items()
            if (ready := unit.ready.get(name)) is not None
        ]

    def start_seconds(self) -> dict[tuple[str, int], float]:
        """How long each server took to become ready, by name and replica."""
        return {(name, unit.replica): ready.took_s for unit in self.units for name, ready in unit.ready.items()}

    def stop(self, grace_s: float) -> None:
        """Stop every process, kindly first if `grace_s` leaves the time; a Ctrl-C meanwhile kills what is left."""
        try:
            killed = stop_all(self._children(), grace_s)
        except KeyboardInterrupt:
            stop_all(self._children(), 0.0)
            raise
        finally:
            for unit in self.units:
                unit.close()
            if self._growth is not None:
                self._growth.close()
        if grace_s:
            for unit in self.units:
                if unit.child in killed:
                    logger.warning("process %r did not stop within %g s and was killed", unit.name, grace_s)

    def _children(self) -> list[ChildProcess]:
        return [unit.child for unit in self.units if unit.child is not None]

    def _take_events(self, wait_s: float) -> None:
        events = self._context.events
        with contextlib.suppress(Empty):
            self._take(events.get(timeout=wait_s) if wait_s else events.get_nowait())
            while True:
                self._take(events.get_nowait())

    def _take(self, event: Event) -> None:
        unit = next((unit for unit in self.units if unit.child is event.child), None)
        if unit is None:
            return
        server = unit.servers.get(event.server)
        unit.take(event)
        if event.kind == "busy":
            return
        self.version += 1
        if isinstance(unit, Host) and unit.is_spare:
            self._take_of_spare(unit, event)
            return
        if server is None or event.kind == "ready":
            return
        if event.kind == "declined":
            self._move_out(server, str(event.details.get("reason")))
        elif event.kind == "refused":
            self._fail(ServerBlockError(_refusal(server.name, str(event.details.get("reason")))))
        else:
            problem = f"Server `{server.name}` cannot be started: {event.details.get('reason')}"
            self._fail(ServerStartError(self._with_output(problem, unit, server)))

    def _take_of_spare(self, unit: Host, event: Event) -> None:
        """Of a host that is being added: with it the run has one more, without it it goes on."""
        if event.kind != "ready":
            self._do_without(unit, f"{unit.name} does not have `{event.server}`: {event.details.get('reason')}")
        elif unit.is_ready:
            unit.is_spare = False
            logger.info("all hosts were busy, so there is one more: %d now, at most %d", *self._host_counts())

    def _host_counts(self) -> tuple[int, int]:
        return sum(host.is_ready for host in self.hosts), self._context.hosts.most

    def _do_without(self, unit: Host, reason: str) -> None:
        if unit.child is not None:
            unit.child.kill()
        self._drop(unit)
        logger.warning("%s", reason)
        if self._growth is not None:
            self._growth.stop("one more could not be started")

    def _move_out(self, server: PlannedServer, reason: str) -> None:
        """Give a server a process of its own; every replica of the host declines, one process is enough."""
        if any(isinstance(unit, Alone) and unit.name == server.name for unit in self.units):
            return
        logger.info("server %r gets a process of its own: %s", server.name, reason)
        self.start(self._run_alone(server))

    def _handle_end(self, unit: Unit, code: int) -> None:
        if not unit.servers:
            logger.debug("process %r has nothing to serve and has ended", unit.name)
            self._drop(unit)
            return
        if isinstance(unit, Host) and unit.is_spare:
            self._do_without(unit, self._end_report(unit, code))
            return
        if code != 0 and not unit.is_ready and isinstance(unit, Alone) and self._moved_to_expected_packages(unit):
            return
        if self._settings.dry_run:
            self._drop(unit)
            if code == 0:
                return
        if isinstance(unit, Alone) and not unit.is_ready and (reason := unit.refusal(code)) is not None:
            self._fail(ServerBlockError(_refusal(unit.name, reason)))
            return
        problem = self._end_report(unit, code)
        pause_s = None
        if self._restarts_crashed:
            pause_s = self._budgets.setdefault(unit, RestartBudget()).next_pause(time.monotonic())
        if pause_s is None:
            self._fail(ServerCrashedError(problem + self._spent_budget()))
            return
        logger.warning("%s\nStarting `%s` again in %g s.", problem, unit.name, pause_s)
        unit.ready.clear()
        self.version += 1
        self._due_s[unit] = time.monotonic() + pause_s

    def _moved_to_expected_packages(self, unit: Alone) -> bool:
        """Start a server where it finds a package it expects and does not list, if that is why it ended."""
        module = missing_module(unit.output.last_lines)
        if module is None or not unit.server.expects_compat or unit.server.alone != "process":
            return False
        file = unit.server.requirements.file
        requirements = with_compat(replace(unit.server.requirements, lines=()))
        if canonical(package_of(module)) not in requirements.expected:
            return False
        logger.warning(
            "server %r uses %s, which is not installed here and not listed in %s: it gets an environment that has it",
            unit.name,
            module,
            file,
        )
        self._drop(unit)
        self.start(self._run_alone(replace(unit.server, isolation="venv", alone="venv", requirements=requirements)))
        return True

    def _spent_budget(self) -> str:
        if not self._restarts_crashed:
            return ""
        budget = RestartBudget()
        return f"\nIt was started again {budget.max_restarts} times within {budget.within_s / 60:g} minutes already."

    def _start_again_what_is_due(self) -> None:
        now_s = time.monotonic()
        for unit in [unit for unit, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[unit]
            unit.start()

    def _check_deadlines(self) -> None:
        limit_s = self._settings.server_start_timeout_s
        now_s = time.monotonic()
        for unit in list(self.units):
            is_waited_for = not unit.is_ready or self._settings.dry_run
            if unit in self._due_s or not is_waited_for or now_s - unit.started_s < limit_s:
                continue
            late = [server for name, server in unit.servers.items() if name not in unit.ready]
            what = "finish the dry run" if self._settings.dry_run else "become ready"
            names = ", ".join(f"`{server.name}`" for server in late) or f"`{unit.name}`"
            problem = (
                f"{names} did not {what} within {limit_s:g} s"
                + "".join(f"; nothing answers at http://{server.host}:{server.port}" for server in late)
                + "; if it needs longer, raise +server_start_timeout_s"
            )
            if isinstance(unit, Host) and unit.is_spare:
                self._do_without(unit, problem)
                continue
            if unit.child is not None:
                unit.child.kill()
            if self._settings.dry_run:
                self._drop(unit)
            self._fail(ServerStartError(self._with_output(problem, unit)))

    def _fail(self, error: GymError) -> None:
        if not self._settings.dry_run:
            raise error
        self.problems.append(error)

    def _drop(self, unit: Unit) -> None:
        self.units.remove(unit)
        unit.close()
        self.version += 1

    def _end_report(self, unit: Unit, code: int) -> str:
        when = "" if unit.is_ready else " before it was ready"
        problem = f"Process `{unit.name}` finished unexpectedly ({describe_exit(code)}){when}."
        if isinstance(unit, Host):
            problem += f" It served {', '.join(f'`{name}`' for name in unit.servers)}."
        else:
            server = next(iter(unit.servers.values()))
            problem += f" It is {server.server_type}/{server.implementation} in {server.folder}."
        return self._with_output(problem, unit, next(iter(unit.servers.values())))

    def _with_output(self, problem: str, unit: Unit, server: PlannedServer | None = None) -> str:
        lines = unit.output.last_lines
        remedy = missing_import_remedy(lines, server.requirements.file) if server is not None else None
        return with_output(problem, lines, unit.log_files, remedy)


def _refusal(name: str, reason: str) -> str:
    return f"Server `{name}` cannot be started: {reason}"
