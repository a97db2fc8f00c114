"""How one input row becomes a row that can be sent: prompt, agent, parameters.

The rules are resolved once per run. They are applied twice to every row, by the pass that checks the
whole file and by the pass that writes it, so what the second pass does has been checked by the first.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from nemo_gym import prompt as prompts
from nemo_gym.data.chat_rows import ChatRowError, params_from_chat
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.jsonl import json_type
from nemo_gym.keys import AGENT_REF_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.paths import candidates, resolve_for_reading
from nemo_gym.rollouts.config import RolloutCollectionConfig, repeats_of
from nemo_gym.rollouts.masked import masked_options
from nemo_gym.rollouts.record import Row
from nemo_gym.rollouts.sharding import Shard

logger = logging.getLogger(__name__)

ROWS = "{rows}"
"""Stands for the numbers of the lines that have a problem."""
NO_AGENT = (
    f"No agent specified for rows {ROWS}: pass +agent_name=<agent>, or give each row an agent_ref with the agent's name"
)
BAD_AGENT = f'rows {ROWS}: agent_ref must be an object with the agent\'s name, such as {{"name": "my_agent"}}'
NO_PARAMS = (
    f"rows {ROWS} have no {RESPONSES_CREATE_PARAMS_KEY_NAME}: add it, with the messages as its `input`; or give them "
    "`messages` or a `prompt`; or have it made from other fields by +prompt_config=<file>"
)
BAD_PARAMS = f"rows {ROWS}: {RESPONSES_CREATE_PARAMS_KEY_NAME} must be an object"
BAD_TASK_INDEX = f"rows {ROWS}: {TASK_INDEX_KEY_NAME} must be a number"
BAD_METADATA = f"rows {ROWS}: a seed cannot be added, metadata must be an object"
BAD_EXTRA_BODY = f"rows {ROWS}: a seed cannot be added, metadata.extra_body must be text that holds a JSON object"
OWN_INPUT = "own input"


@dataclass(frozen=True)
class RowRules:
    """The options of a run that shape its rows."""

    path: Path
    limit: int | None
    agent_name: str | None
    overrides: Row
    prompt: prompts.PromptConfig | None
    num_repeats: int | Mapping[str, int]
    add_seed: bool
    shard: Shard | None = None
    """The part of the rows that this run has; the others are checked and numbered all the same."""

    @classmethod
    def of(cls, config: RolloutCollectionConfig) -> "RowRules":
        """The rules for `config`: overrides resolved, prompt loaded, input file found."""
        return cls(
            overrides=resolve_overrides(config.responses_create_params),
            prompt=prompts.load_prompt_or_explain(config.prompt_config) if config.prompt_config else None,
            path=locate_input(config.input_jsonl_fpath),
            limit=config.limit,
            agent_name=config.agent_name or None,
            num_repeats=config.num_repeats,
            add_seed=config.num_repeats_add_seed,
            shard=config.chosen_shard,
        )

    def repeats_of(self, agent: str) -> int | None:
        """How often a row of `agent` is rolled out; None when that is not said."""
        return repeats_of(self.num_repeats, agent)

    def complete(self, row: Row, problems: list[str]) -> str:
        """Give `row` everything but its indices, in place, and return its agent.

        What stands in the way is added to `problems`; the row is then of no use.
        """
        if self.prompt is not None:
            self._fill_prompt(row, self.prompt, problems)
        agent = self._fill_agent(row, problems)
        params = row.get(RESPONSES_CREATE_PARAMS_KEY_NAME)
        if params is None and self.prompt is None:
            params = _params_from_chat(row, problems)
        if isinstance(params, dict):
            params.update(self.overrides)
            if self.add_seed:
                _check_seedable(params, problems)
        elif params is None:
            problems.append(NO_PARAMS)
        else:
            problems.append(BAD_PARAMS)
        if isinstance(row.get(TASK_INDEX_KEY_NAME), list | dict):
            problems.append(BAD_TASK_INDEX)
        return agent

    def _fill_prompt(self, row: Row, prompt: prompts.PromptConfig, problems: list[str]) -> None:
        if prompts.has_own_input(row):
            problems.append(OWN_INPUT)
            return
        try:
            row.update(prompts.apply_prompt_to_row(row, prompt))
        except (prompts.PromptFieldError, prompts.PromptAttributeError, prompts.PromptTemplateError) as error:
            problems.append(f"rows {ROWS}: {error}")
            row.setdefault(RESPONSES_CREATE_PARAMS_KEY_NAME, {})

    def _fill_agent(self, row: Row, problems: list[str]) -> str:
        reference = row.get(AGENT_REF_KEY_NAME)
        if isinstance(reference, dict):
            name = reference.get("name")
            if isinstance(name, str) and name:
                return name
        if reference is not None and (not isinstance(reference, dict) or name not in (None, "")):
            problems.append(BAD_AGENT)
        elif self.agent_name is None:
            problems.append(NO_AGENT)
        else:
            row[AGENT_REF_KEY_NAME] = {**(reference or {}), "name": self.agent_name}
            return self.agent_name
        return ""


def _params_from_chat(row: Row, problems: list[str]) -> Row | None:
    """Give a row that brings `messages` or a `prompt` its parameters, and return them."""
    try:
        params = params_from_chat(row)
    except ChatRowError as error:
        problems.append(f"rows {ROWS}: {error}")
        return {}
    if params is not None:
        row[RESPONSES_CREATE_PARAMS_KEY_NAME] = params
    return params


def announce(config: RolloutCollectionConfig) -> None:
    """Say which options shape the rows of this run."""
    if config.limit is not None:
        logger.info("Using only the first %d rows", config.limit)
    if config.chosen_shard is not None:
        logger.info("Shard %s of the run: %s", config.chosen_shard, config.paths.rollouts)
    if config.num_repeats_add_seed:
        logger.info("Adding a seed to every rollout through metadata.extra_body (openai_model does not honour it)")
    if config.agent_name:
        logger.info("Rows that name no agent go to %r", config.agent_name)
    if config.responses_create_params:
        shown = masked_options(config.responses_create_params)
        logger.info("Laying over every row's %s: %s", RESPONSES_CREATE_PARAMS_KEY_NAME, shown)
    if isinstance(config.num_repeats, dict):
        logger.info("Rollouts per row, by agent: %s", config.num_repeats)
    else:
        logger.info("Rollouts per row: %d (2 would turn abc into aabbcc)", config.num_repeats)
    if config.prompt_config:
        logger.info("Filling the prompt %s", config.prompt_config)


def resolve_overrides(overrides: Mapping[str, Any]) -> Row:
    """The overrides as plain JSON data, `${...}` resolved within the block itself."""
    if not overrides:
        return {}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(OmegaConf.create(dict(overrides)), resolve=True)
        plain: Row = orjson.loads(orjson.dumps(resolved, option=orjson.OPT_NON_STR_KEYS))
    except (OmegaConfBaseException, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"+{RESPONSES_CREATE_PARAMS_KEY_NAME}={overrides!r} cannot be used: {reason}") from error
    return plain


def locate_input(given: str) -> Path:
    """The input file that `given` means."""
    path = resolve_for_reading(given)
    if not path.exists():
        looked = ", ".join(map(str, candidates(given)))
        raise ConfigPathNotFoundError(
            f"input file {given!r} not found (looked for {looked}); "
            "correct +input_jsonl_fpath (`--input` elsewhere) or create the file"
        )
    if not path.is_file():
        raise ConfigError(f"+input_jsonl_fpath={given}: it is read twice, so it must be a regular file")
    return path


def with_seed(params: Row, seed: int) -> Row:
    """New parameters whose `metadata.extra_body`, a JSON text, carries `seed`."""
    metadata = params.get("metadata") or {}
    extra_body = json.dumps({**_extra_body(metadata), "seed": seed})
    return {**params, "metadata": {**metadata, "extra_body": extra_body}}


def _extra_body(metadata: Row) -> Row:
    """What `extra_body` holds, as an object; ValueError when it is something else."""
    found = metadata.get("extra_body")
    value = json.loads(found) if isinstance(found, str) and found else found
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"extra_body is {json_type(value)}")
    return value


def _check_seedable(params: Row, problems: list[str]) -> None:
    metadata = params.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        problems.append(BAD_METADATA)
        return
    try:
        _extra_body(metadata or {})
    except ValueError:
        problems.append(BAD_EXTRA_BODY)
