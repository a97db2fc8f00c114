"""The code of authors, asked about itself in a process of its own, which serves nothing.

`python -m nemo_gym.launch.inspection_process <question>` reads one JSON object from stdin and answers on stdout. An
author's module may take long to import, print, or end the process: whoever asks has a time limit, and takes a missing
answer for one. It runs with the Python that has what the server requires.

`blocks`: does the block of a server fit its class? Asked by a `CheckRequest`, answered by one line (`ClassAnswer`) per
server, as each is known. Of a server from elsewhere only the configuration is read, as its start would: building it may
load weights or open connections. Those of this distribution hold nothing before they serve, so they are built, and
their own checks count.

`cases`: what does the verifier of `{"module": ...}` say to the cases of its fixture? Answered by one object: where the
cases are, and for each the rewards that came, or the error. Whether that is right is for others to say.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ValidationError

from nemo_gym.base_resources_server import VerifierFixture
from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.config.instances import readable_faults
from nemo_gym.config_types import BaseRunServerInstanceConfig, BaseRunServerTypeConfig, BaseServerConfig
from nemo_gym.errors import ConfigError
from nemo_gym.http.client import ServerClient
from nemo_gym.keys import NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME
from nemo_gym.launch.server_checks import CheckRequest, ClassAnswer, ClassRequest
from nemo_gym.paths import search_servers_in_all_roots
from nemo_gym.process_inputs import running_as
from nemo_gym.servers.base import (
    NotOneServerClassError,
    SimpleServer,
    config_class_of,
    misspelt_settings,
    one_server_class,
)
from nemo_gym.servers.json_route import row_faults

_NOBODY_NEEDS_TO_READ = {*BaseRunServerTypeConfig.model_fields, "isolation", "verified", "verified_url"}
_DESCRIBES = {"description", "value", "license"}
_LONGEST_REASON = 300
_LONGEST_ERROR = 500
_FIXTURE = "VERIFIER_FIXTURE"


def check_class(asked: ClassRequest, config: DictConfig) -> ClassAnswer:
    """Look at one server, whatever its author's code does."""
    answer = ClassAnswer(name=asked.name)
    try:
        with running_as(asked.name):
            server_class = _load(asked)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an author's module may raise anything
        if isinstance(error, SyntaxError) and asked.runs_here:
            answer.faults.append((("entrypoint",), f"{error.filename}, line {error.lineno}: {error.msg}"))
        else:
            answer.not_checked = _reason(error)
    else:
        if asked.rows is not None:
            answer.row_faults = row_faults(asked.rows, [getattr(server_class, name) for name in asked.handlers])
            answer.passes_rows_on = issubclass(server_class, SimpleResponsesAPIAgent) and server_class._passes_rows_on()
            return answer
        with running_as(asked.name):
            _check_block(asked, server_class, config, answer)
    return answer


def _load(asked: ClassRequest) -> type[SimpleServer]:
    module = importlib.import_module(asked.module)
    if Path(module.__file__ or "").resolve() != Path(asked.file).resolve():
        raise NotOneServerClassError(f"{module.__name__} was found in {module.__file__}, it should be {asked.file}")
    return one_server_class(module)


def _check_block(
    asked: ClassRequest, server_class: type[SimpleServer], config: DictConfig, answer: ClassAnswer
) -> None:
    config_class = config_class_of(server_class)
    answer.class_name = config_class.__name__
    answer.misspelt = misspelt_settings(asked.block, config_class)
    if asked.is_bundled:
        answer.unread = _unread(asked.block, config_class, answer.misspelt)
    try:
        loaded = config_class.model_validate({**asked.block, "name": asked.name})
        if asked.is_bundled:
            _build(server_class, loaded, config)
    except ValidationError as error:
        answer.faults += [(fault.keys, fault.text) for fault in readable_faults(error)]
    except ConfigError as error:
        answer.faults += [((), text) for text in one_per_line(str(error))]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a validator may raise anything; its start would fail, too
        answer.faults.append(((), _reason(error)))


def _build(server_class: type[SimpleServer], loaded: BaseRunServerInstanceConfig, config: DictConfig) -> None:
    nowhere = BaseServerConfig(host="127.0.0.1", port=1)
    server_class(config=loaded, server_client=ServerClient(head_server_config=nowhere, global_config_dict=config))


def one_per_line(text: str) -> list[str]:
    """A message with a list below it as one message for each item."""
    head, *items = text.split("\n  - ")
    return [f"{head} {item}" for item in items] or [head]


def _unread(block: dict[Any, Any], config_class: type[BaseModel], misspelt: dict[str, str]) -> list[str]:
    if config_class.model_config.get("extra") == "allow":
        return []
    aliases = {str(field.alias) for field in config_class.model_fields.values() if field.alias}
    known = {*config_class.model_fields, *aliases, *_NOBODY_NEEDS_TO_READ, *_DESCRIBES, *misspelt}
    return [str(key) for key in block if str(key) not in known]


def _reason(error: BaseException, longest: int = _LONGEST_REASON) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:longest]


def observe(module_name: str) -> dict[str, Any]:
    """What the verifier of a module says to its cases; `error` instead if it cannot be asked."""
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an author's module may raise anything
        return {"error": f"{module_name} cannot be imported: {_reason(error, _LONGEST_ERROR)}"}
    fixture = getattr(module, _FIXTURE, None)
    if not isinstance(fixture, VerifierFixture):
        return {"error": f"{module.__file__} has no {_FIXTURE} = VerifierFixture(...)"}
    path = Path(module.__file__ or "").parent / fixture.cases_path
    try:
        cases = list(_cases(path))
        server = fixture.server_factory()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the same
        return {"error": f"{_FIXTURE} of {module.__file__}: {_reason(error, _LONGEST_ERROR)}"}
    return {"fixture_path": str(path), "cases": [_observed(fixture, server, case) for case in cases]}


def _cases(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        case = json.loads(line)
        if not isinstance(case, dict) or not {"name", "kind", "request"} <= case.keys():
            raise ValueError(f"{path}, line {number}: a case is an object with name, kind and request")
        yield case


def _observed(fixture: VerifierFixture, server: Any, case: dict[str, Any]) -> dict[str, Any]:
    rewards: list[float] = []
    try:
        for _ in range(2 if case["kind"] == "determinism" else 1):
            if fixture.reseed is not None and case["kind"] == "determinism":
                takes_server = bool(inspect.signature(fixture.reseed).parameters)
                asyncio.run(_awaited(fixture.reseed(server) if takes_server else fixture.reseed()))
            request = fixture.request_model.model_validate(case["request"])
            rewards.append(_reward(asyncio.run(_verdict(fixture, server, request))))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a verifier may raise anything; that is what is looked at
        return {
            **case,
            "observed_rewards": rewards,
            "observed_error": type(error).__name__,
            "words": _reason(error, _LONGEST_ERROR),
        }
    return {**case, "observed_rewards": rewards, "observed_error": None}


async def _verdict(fixture: VerifierFixture, server: Any, request: Any) -> Any:
    if fixture.invoke is not None:
        return await _awaited(fixture.invoke(server, request))
    parameters = inspect.signature(server.verify).parameters
    given = {name: None if name == "request" and len(parameters) > 1 else request for name in parameters}
    return await _awaited(server.verify(**given))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _reward(verdict: Any) -> float:
    reward = verdict.get("reward") if isinstance(verdict, dict) else getattr(verdict, "reward", None)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise TypeError(f"the verdict has the reward {reward!r}, which is no number")
    return float(reward)


def _answer_about_blocks(question: bytes, answers: TextIO) -> None:
    request = CheckRequest.model_validate_json(question)
    config = OmegaConf.create(request.config)
    os.environ[NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = json.dumps(request.config)  # where modules look for the config
    if request.is_hosted:
        search_servers_in_all_roots()
    for asked in request.servers:
        answers.write(check_class(asked, config).model_dump_json() + "\n")
        answers.flush()


def _answer_about_cases(question: bytes, answers: TextIO) -> None:
    answers.write(json.dumps(observe(json.loads(question)["module"])))


def main() -> None:
    """Answer what stdin asks; what authors print goes to stderr."""
    answer = {"blocks": _answer_about_blocks, "cases": _answer_about_cases}[sys.argv[1]]
    question = sys.stdin.buffer.read()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.redirect_stdout(sys.stderr):
            answer(question, answers)
    sys.stderr.flush()
    os._exit(0)  # threads that an import has left running would keep the process


if __name__ == "__main__":
    main()
