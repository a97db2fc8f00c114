r"""PUBLIC: for tests of environments: make rollouts inside the test, with a model that says what you script.

    from nemo_gym.testing import play

    (result,) = play(
        "resources_servers/my_env/configs/my_env.yaml",
        [{"responses_create_params": {"input": "What is 6 times 7?"}, "expected_answer": "42"}],
        script={"rules": [{"reply": {"text": "\\boxed{42}"}}]},
    )
    assert result["reward"] == 1.0

The environment, its agent and the model are the real servers, started from your config file and called
in memory: no port, no process, no key. What a script may say is in
`responses_api_models/scripted_model/README.md`. A rollout that fails becomes a record with
`_ng_failure_class`, as the collector writes it to the failures file.

Tests that build their servers themselves find here what they need for it: a socket (`listen`), calls in memory
(`register_local_app`, `Address`), the handing over of a config (`write_config_file`), settings of the HTTP client
(`use_client_settings`).
"""

import asyncio
import importlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from omegaconf import DictConfig, OmegaConf

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.collect.failures import failure_of, fault_in
from nemo_gym.config.handover import write_config_file
from nemo_gym.config_types import BaseServerConfig, ConfigError, ServerInstanceConfig
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.http.addresses import Address
from nemo_gym.http.in_memory import register_local_app
from nemo_gym.http.session import use_client_settings
from nemo_gym.keys import AGENT_REF_KEY_NAME, AGENTS_TYPE
from nemo_gym.runs.record import Failure, Result, Row, failure_record, stamp, task_order
from nemo_gym.runtime import listen
from nemo_gym.server_utils import ServerClient, get_response_json, raise_for_status
from nemo_gym.servers.base import SimpleServer, one_server_class

__all__ = [
    "EXAMPLES",
    "MALFORMED",
    "Address",
    "Script",
    "build_server",
    "check_examples",
    "listen",
    "play",
    "register_local_app",
    "use_client_settings",
    "write_config_file",
]

EXAMPLES = 5
"""Rows in `data/example.jsonl` of every environment."""

Script: TypeAlias = Mapping[str, Any] | str | None
"""A script for `scripted_model`: its content, the path of its file, or None for its own behaviour."""

MALFORMED: Mapping[str, dict[str, Any]] = {
    "says nothing": {"rules": [{"reply": {}}]},
    "only thinks": {"rules": [{"reply": {"reasoning": "Hm."}}]},
    "says white space": {"rules": [{"reply": {"text": " \n"}}]},
    "is cut off": {"rules": [{"reply": {"text": "The answer is \\boxed{", "incomplete": "max_output_tokens"}}]},
    "opens boxes and regexes": {"rules": [{"reply": {"text": "\\boxed{\\text{ ${}$ [[A= (?P<x> Answer: \\ud800"}}]},
    "calls a tool that is not there": {
        "rules": [
            {"match": {"after_user": True}, "reply": {"tool_call": {"name": "no/such tool", "arguments": {}}}},
            {"reply": {"text": "It did not work."}},
        ]
    },
    "fails": {"faults": [{"kind": "status", "status": 500}]},
    "answers with half a body": {"faults": [{"kind": "malformed"}]},
}
"""Scripts of models that do not play along: whatever the environment, none of them may crash it."""


def check_examples(folder: Path) -> list[Row]:
    """Check the example files in `folder`/data, which every environment brings, and return the example rows.

    Raises:
        AssertionError: there are not exactly five rows and a rollout of each, or the metrics are of other rows.
    """
    data = folder / "data"
    rows = [orjson.loads(line) for line in (data / "example.jsonl").read_bytes().splitlines()]
    rollouts = [orjson.loads(line) for line in (data / "example_rollouts.jsonl").read_bytes().splitlines()]
    metrics = orjson.loads((data / "example_metrics.json").read_bytes())
    assert len(rows) == EXAMPLES, f"{data}/example.jsonl must have {EXAMPLES} rows, it has {len(rows)}"
    assert metrics["Number of examples"] == EXAMPLES, f"{data}/example_metrics.json is not of these rows; prepare anew"
    assert len(rollouts) == EXAMPLES, (
        f"{data}/example_rollouts.jsonl must have {EXAMPLES} lines, it has {len(rollouts)}"
    )
    for row, rollout in zip(rows, sorted(rollouts, key=task_order), strict=True):
        asked = BaseRunRequest.model_validate(row).responses_create_params
        rolled_out = BaseVerifyResponse.model_validate(rollout)
        assert rolled_out.responses_create_params == asked, f"the rollouts in {data} are not of the rows; collect anew"
    return rows


def play(
    config: str | Path | Iterable[str | Path],
    rows: Sequence[Row],
    *,
    script: Script = None,
    models: Mapping[str, Script] | None = None,
    settings: Mapping[str, Any] | None = None,
    agent: str | None = None,
) -> list[Result]:
    """Make one rollout of every row and return the results in the order of the rows.

    Args:
        config: The environment's config file, or several.
        rows: As they stand in a data file.
        script: What `policy_model` says.
        models: Further scripted models by instance name, such as a judge.
        settings: Merged over the config, as command-line options would be.
        agent: The agent to send rows to that name none; may be left out when there is only one.
    """
    scripts = {"policy_model": script, **(models or {})}
    paths = [config] if isinstance(config, str | Path) else list(config)
    given = OmegaConf.merge(
        {"config_paths": [str(path) for path in paths]},
        {name: {"responses_api_models": {"scripted_model": {"entrypoint": "app.py"}}} for name in scripts},
        dict(settings or {}),
    )
    assert isinstance(given, DictConfig)
    return asyncio.run(_play(GlobalConfigDictParser().parse_no_environment(given), scripts, rows, agent))


async def _play(
    config: DictConfig, scripts: Mapping[str, Script], rows: Sequence[Row], agent: str | None
) -> list[Result]:
    instances = GlobalConfigDictParser().filter_for_server_instance_configs(config)
    client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config)
    agents = [instance.name for instance in instances if instance.SERVER_TYPE == AGENTS_TYPE]
    async with AsyncExitStack() as running:
        for instance in instances:
            # Not through the config: there, `${` in a text would be an interpolation.
            script = {"script": scripts[instance.name]} if instance.name in scripts else {}
            server = build_server(instance, client, script)
            app = server.complete_app()
            await running.enter_async_context(app.router.lifespan_context(app))
            address = Address(server.config.host, server.config.port)
            register_local_app(instance.name, app, [address], cancellable_paths=server.CANCELLABLE_PATHS)
        return list(await asyncio.gather(*(_rollout(client, row, agent, agents) for row in rows)))


def build_server(instance: ServerInstanceConfig, client: ServerClient, settings: Mapping[str, Any]) -> SimpleServer:
    """The server of an instance, with `settings` over those of its config."""
    server_class = one_server_class(importlib.import_module(instance.module_name))
    config_class: Any = server_class.model_fields["config"].annotation
    block: Any = OmegaConf.to_container(
        client.global_config_dict[instance.name][instance.SERVER_TYPE][instance.implementation], resolve=True
    )
    return server_class(config=config_class(**{**block, **settings, "name": instance.name}), server_client=client)


async def _rollout(client: ServerClient, row: Row, default_agent: str | None, agents: list[str]) -> Result:
    name = (row.get(AGENT_REF_KEY_NAME) or {}).get("name") or default_agent
    if name is None:
        if len(agents) != 1:
            raise ConfigError(f"the config has the agents {', '.join(agents)}: name one with play(..., agent=...)")
        name = agents[0]
    started_at = datetime.now(UTC)
    try:
        answer = await client.post(server_name=name, url_path="/run", json=row)
        await raise_for_status(answer)
        result = await get_response_json(answer)
        failure: Failure | None = fault_in(result, name)
    except Exception as error:  # noqa: BLE001 - as in the collector, a failed rollout is a record
        failure = failure_of(error, name)
    if failure is not None:
        return failure_record(row, failure, started_at, datetime.now(UTC))
    return stamp(row, result)
