"""Does the block of a server fit its class? Answered by a process of its own, which serves nothing.

`python -m nemo_gym.launch.server_check_process` reads one JSON object (`CheckRequest`) from stdin and writes one line
of JSON (`ClassAnswer`) per server to stdout, as each is known. Importing an author's module may take long, print, or
end the process: whoever asks has a time limit, and takes a missing line for an answer.

Of a server from elsewhere only the configuration is read, as its start would: building it may load weights or open
connections. Those of this distribution hold nothing before they serve, so they are built, and their own checks count.
"""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ValidationError

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
from nemo_gym.servers.routes import row_faults

_NOBODY_NEEDS_TO_READ = {*BaseRunServerTypeConfig.model_fields, "isolation", "verified", "verified_url"}
_DESCRIBES = {"description", "value", "license"}
_LONGEST_REASON = 300


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


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_REASON]


def main() -> None:
    """Answer what stdin asks; what authors print goes to stderr."""
    request = CheckRequest.model_validate_json(sys.stdin.buffer.read())
    config = OmegaConf.create(request.config)
    os.environ[NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = json.dumps(request.config)  # where modules look for the config
    if request.is_hosted:
        search_servers_in_all_roots()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for asked in request.servers:
            with contextlib.redirect_stdout(sys.stderr):
                answer = check_class(asked, config)
            answers.write(answer.model_dump_json() + "\n")
            answers.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that an import has left running would keep the process


if __name__ == "__main__":
    main()
