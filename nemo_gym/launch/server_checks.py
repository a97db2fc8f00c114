"""What would keep the servers of a configuration from starting, found without starting one.

The checks are those of a start: the plan (folders, entrypoints, requirements, isolation) is made by the same code, and
whether a block fits its server's class a short-lived process says that has the paths of the server and serves
nothing. What a start alone can show stays open: whether a port is free then, whether requirements can be
installed, whether endpoints answer. Data sets that are declared must be there, or be obtainable.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, Field

from nemo_gym.config.files import ConfigFile
from nemo_gym.config.instances import find_instances
from nemo_gym.config.options import validate_options
from nemo_gym.config.references import plain_tree
from nemo_gym.config.trees import has_path
from nemo_gym.data.declared import datasets_of
from nemo_gym.data.hub import problems_of_missing
from nemo_gym.errors import ConfigError
from nemo_gym.keys import AGENTS_TYPE, SKIP_VERIFICATION_KEY_NAME, STAND_IN
from nemo_gym.launch.plan import PlannedServer, PlanSettings, is_bundled, plan_those_possible
from nemo_gym.launch.server_processes import host_python_path, python_path_of
from nemo_gym.observability.store import ModelCallCaptureConfig
from nemo_gym.process_inputs import inherited_environment
from nemo_gym.schemas.cli_config import RunConfig
from nemo_gym.schemas.run_requests import RowFault, merged_faults
from nemo_gym.schemas.server_config import ServerInstanceConfig, is_server_ref

logger = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 120.0


class ClassRequest(BaseModel):
    """One server that is to be looked at."""

    name: str
    module: str
    file: str
    """Where that module must come from."""
    block: dict[Any, Any]
    """Its settings, resolved."""
    is_bundled: bool
    runs_here: bool
    """Whether the server will run with this Python, too."""
    rows: list[dict[str, Any]] | None = None
    """Rows to hold against the types of `handlers`, instead of looking at the block."""
    handlers: tuple[str, ...] = ()
    """Names of methods."""


class CheckRequest(BaseModel):
    """What stdin holds."""

    servers: list[ClassRequest]
    config: dict[Any, Any]
    """The whole configuration, which servers may look into while they are built."""
    is_hosted: bool
    """Whether they are to be imported like servers that share a process."""


class ClassAnswer(BaseModel):
    """What came of it."""

    name: str
    class_name: str = ""
    faults: list[tuple[tuple[str, ...], str]] = Field(default_factory=list)
    """The keys that lead into the block, and what is wrong there."""
    misspelt: dict[str, str] = Field(default_factory=dict)
    """Keys that are almost a setting, and the setting."""
    unread: list[str] = Field(default_factory=list)
    """Other keys that the class does not know and does not keep."""
    row_faults: list[list[RowFault]] = Field(default_factory=list)
    passes_rows_on: bool = False
    """Whether it is an agent that sends every row as it is to its environment."""
    not_checked: str = ""
    """Why nothing can be said; empty when it was checked."""


def server_problems(
    config: DictConfig, instances: list[ServerInstanceConfig], files: list[ConfigFile]
) -> list[ConfigError]:
    """Everything that is wrong with the servers of `config`, one line each; warnings are logged."""
    instances = [instance for instance in instances if instance.implementation != STAND_IN]
    problems: list[ConfigError] = []
    options = RunConfig()
    try:
        options = validate_options(RunConfig, config, "ng_run")
    except ConfigError as error:
        problems.append(error)
    try:
        ModelCallCaptureConfig.of(config)
    except ConfigError as error:
        problems.append(error)
    blocks = _Blocks(config, instances, files)
    planned, unplannable = plan_those_possible(instances, PlanSettings.of(options))
    problems += [type(error)(f"{blocks.place(name)}: {error}") for name, error in unplannable.items()]
    problems += blocks.problems(planned)
    agents = (instance for instance in instances if instance.SERVER_TYPE == AGENTS_TYPE)
    for dataset, missing in problems_of_missing(list(datasets_of(agents))):
        problems.append(type(missing)(f"{blocks.place(dataset.agent, ('datasets',))}: {missing}"))
    return problems


class OfflineRowCheck:
    """What agents, and the environments behind them, would refuse in rows, said by their classes.

    Called with an agent's name and rows; for each row what is wrong with it, or None if the agent cannot be imported
    here. The same as running servers answer.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._instances = {instance.name: instance for instance in find_instances(config)[0]}

    def __call__(self, agent: str, rows: list[dict[str, Any]]) -> list[list[RowFault]] | None:
        """What is wrong with the rows of an agent."""
        if agent not in self._instances:
            return None
        block = self._instances[agent].get_inner_run_server_config_dict()
        environment = is_server_ref(block.get("resources_server"))
        handlers: dict[str, tuple[str, ...]] = {agent: ("run",)}
        if environment is not None and environment.name in self._instances:
            is_verified = not block.get(SKIP_VERIFICATION_KEY_NAME)
            handlers[environment.name] = ("seed_session", "verify") if is_verified else ("seed_session",)
        answers = self._ask(rows, handlers)
        if agent not in answers:
            return None
        by_environment = [answer.row_faults for name, answer in answers.items() if name != agent]
        theirs = by_environment[0] if by_environment else [[] for _ in rows]
        both = zip(answers[agent].row_faults, theirs, strict=True)
        return [merged_faults(*faults, is_certain=answers[agent].passes_rows_on) for faults in both]

    def _ask(self, rows: list[dict[str, Any]], handlers: Mapping[str, tuple[str, ...]]) -> dict[str, ClassAnswer]:
        """The answers of those among these servers that can be imported here."""
        planned, _ = plan_those_possible([self._instances[name] for name in handlers], PlanSettings())
        answers: dict[str, ClassAnswer] = {}
        for group in _groups(planned):
            requests = [
                _class_request(server, self._instances[server.name], rows=rows, handlers=handlers[server.name])
                for server in group
            ]
            answers |= _ask(group[0], requests, plain_tree(self._config))
        for answer in answers.values():
            if answer.not_checked:
                logger.info("rows are not held against the types of %r: %s", answer.name, answer.not_checked)
        return {name: answer for name, answer in answers.items() if not answer.not_checked}


class _Blocks:
    """The blocks of servers, held against their classes."""

    def __init__(
        self, config: DictConfig, instances: Iterable[ServerInstanceConfig], files: Sequence[ConfigFile]
    ) -> None:
        self._config = plain_tree(config)
        self._instances = {instance.name: instance for instance in instances}
        self._files = files

    def problems(self, planned: Sequence[PlannedServer]) -> list[ConfigError]:
        """What does not fit, and which keys are misspelt; what cannot be checked is warned of."""
        answers: dict[str, ClassAnswer] = {}
        for group in _groups(planned):
            requests = [_class_request(server, self._instances[server.name]) for server in group]
            answers |= _ask(group[0], requests, self._config)
        problems: list[ConfigError] = []
        for server in planned:
            problems += self._problems_of(answers[server.name])
        return problems

    def _problems_of(self, answer: ClassAnswer) -> Iterator[ConfigError]:
        if answer.not_checked:
            logger.warning("the settings of server %r are not checked, because %s", answer.name, answer.not_checked)
        for keys, text in answer.faults:
            yield ConfigError(f"{self.place(answer.name, keys)}: {text}")
        for key, meant in answer.misspelt.items():
            place = self.place(answer.name, (key,))
            yield ConfigError(f"{place}: {answer.class_name} has no setting {key!r}; did you mean {meant!r}?")
        for key in answer.unread:
            logger.warning("%s: nobody reads this key", self.place(answer.name, (key,)))

    def place(self, name: str, keys: Sequence[str] = ()) -> str:
        """`file: the.whole.path`, with the last file that says something there, or about the server."""
        instance = self._instances[name]
        path = ".".join([name, instance.SERVER_TYPE, instance.implementation, *keys])
        block = (name, instance.SERVER_TYPE, instance.implementation)
        for wanted in ((*block, *keys), block):
            for file in reversed(self._files):
                if has_path(file.tree, wanted):
                    return f"{file.path}: {path}"
        return path


def _class_request(server: PlannedServer, instance: ServerInstanceConfig, **rows: Any) -> ClassRequest:
    block: Any = OmegaConf.to_container(instance.get_inner_run_server_config_dict(), resolve=not rows)
    return ClassRequest(
        name=server.name,
        module=instance.module_name,
        file=str(server.folder / server.entrypoint),
        block={**block, "host": block.get("host") or "127.0.0.1", "port": block.get("port") or -1},
        is_bundled=is_bundled(server.server_type, server.folder),
        runs_here=server.alone == "process",
        **rows,
    )


def _groups(planned: Sequence[PlannedServer]) -> Iterator[list[PlannedServer]]:
    """Those that can be looked at in one process: ours that are hosted together, others each alone."""
    ours = [server for server in planned if _is_hosted_by_us(server)]
    if ours:
        yield ours
    yield from ([server] for server in planned if not _is_hosted_by_us(server))


def _is_hosted_by_us(server: PlannedServer) -> bool:
    return server.isolation == "hosted" and is_bundled(server.server_type, server.folder)


def _ask(server: PlannedServer, requests: Sequence[ClassRequest], config: dict[Any, Any]) -> dict[str, ClassAnswer]:
    """An answer about each of `requests`, from a process that imports modules as `server` would."""
    asked = CheckRequest(servers=list(requests), config=config, is_hosted=server.isolation == "hosted")
    told, ending = _exchange(server, asked.model_dump_json())
    lines = (line for line in told.splitlines(keepends=True) if line.endswith(b"\n"))
    answers = {answer.name: answer for answer in map(ClassAnswer.model_validate_json, lines)}
    for request in requests:
        answers.setdefault(request.name, ClassAnswer(name=request.name, not_checked=ending))
    return answers


def _exchange(server: PlannedServer, request: str) -> tuple[bytes, str]:
    """What the process says, and how it ended, for those about which it said nothing."""
    environment = dict(inherited_environment())
    is_hosted = server.isolation == "hosted"
    path_of = host_python_path if is_hosted else partial(python_path_of, server)
    environment["PYTHONPATH"] = path_of(environment.get("PYTHONPATH"))
    child = subprocess.Popen(
        [str(server.present_python or sys.executable), "-P", "-m", "nemo_gym.launch.inspection_process", "blocks"],
        cwd=None if is_hosted else server.folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        told, printed = child.communicate(request.encode(), IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _kill(child)
        return child.communicate()[0], f"importing its module took longer than {IMPORT_TIMEOUT_S:.0f} s"
    finally:
        _kill(child)
    last = "".join(f": {line}" for line in printed.decode(errors="replace").strip().splitlines()[-1:])
    return told, f"the process that imports its module ended with code {child.returncode}{last}"


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """End the process and whatever its imports have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
