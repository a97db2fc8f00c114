"""The reference of the HTTP API, from what the servers say about themselves (OpenAPI)."""

from typing import Any

import orjson
from fastapi import FastAPI
from omegaconf import OmegaConf

from docs.site.markdown import code, contents, escaped, page, table
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import HeadServer, ServerClient, SimpleServer
from resources_servers.string_match.app import StringMatchResourcesServer, StringMatchResourcesServerConfig
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig
from responses_api_models.openai_model.app import OpenAIModel, OpenAIModelConfig

FOLDER = "reference/http-api"
_ABOUT = {
    "head": (
        "The head server",
        "It knows the other servers of a run. `ng_run` starts it on port 11000; collectors ask it for the agents.",
    ),
    "agent": (
        "Agents",
        "An agent attempts tasks. The collector sends a row to `/run` and gets the rollout. Shown is `simple_agent`; "
        "every agent has these endpoints.",
    ),
    "resources-server": (
        "Resources servers",
        "A resources server is an environment: tools, sessions and verdicts. Shown is `string_match`; every "
        "environment has these endpoints, with the fields of its own rows, and one more for each of its tools.",
    ),
    "model-server": (
        "Model servers",
        "A model server answers for a model. Shown is `openai_model`; every model server has these endpoints.",
    ),
}
_WITHOUT_WORDS = {
    "POST /run": "Attempt the task of one row and answer with the rollout: the row, `response` and the verdict, as in "
    "[File formats](../file-formats.md#a-rollout). The row may have any fields beyond those of the type.",
    "POST /end_session": "Forget what was kept for the session of the cookie.",
}
"""Endpoints whose functions are defined by whoever writes a server, or have nothing to say."""
_VALIDATION = {"HTTPValidationError", "ValidationError"}


def apps() -> dict[str, FastAPI]:
    """One server of each kind, built but not started."""
    head = BaseServerConfig(host="127.0.0.1", port=11000)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    common = {"name": "shown", "host": "127.0.0.1", "port": 12000, "entrypoint": "app.py"}
    endpoint = {"openai_base_url": "http://127.0.0.1:8000/v1", "openai_api_key": "any", "openai_model": "any"}
    servers: dict[str, SimpleServer] = {
        "agent": SimpleAgent(
            config=SimpleAgentConfig.model_validate(
                {
                    **common,
                    "resources_server": {"type": "resources_servers", "name": "environment"},
                    "model_server": {"type": "responses_api_models", "name": "policy_model"},
                }
            ),
            server_client=client,
        ),
        "resources-server": StringMatchResourcesServer(
            config=StringMatchResourcesServerConfig.model_validate({**common, "domain": "other"}), server_client=client
        ),
        "model-server": OpenAIModel(
            config=OpenAIModelConfig.model_validate({**common, **endpoint}), server_client=client
        ),
    }
    made = {"head": HeadServer(config=head).setup_webserver()}
    return made | {name: server.setup_webserver() for name, server in servers.items()}


def pages() -> dict[str, str]:
    """Path and text of every page, and the OpenAPI descriptions themselves."""
    made: dict[str, str] = {}
    types: dict[str, dict[str, Any]] = {}
    for name, app in apps().items():
        description = app.openapi()
        types |= description.get("components", {}).get("schemas", {})
        made[f"{FOLDER}/{name}.md"] = _server(name, description)
        made[f"{FOLDER}/{name}.json"] = orjson.dumps(description, option=orjson.OPT_INDENT_2).decode()
    made[f"{FOLDER}/types.md"] = _types(types)
    made[f"{FOLDER}/index.md"] = page(
        "# The HTTP API",
        "Every server of a run speaks JSON over HTTP. `ng_status` prints their addresses. Bodies are "
        "`application/json`; with an `auth_token` every call shows it as `Authorization: Bearer <token>` "
        "([Security](../../security.md)). Errors are JSON, too: `detail` says what was wrong.",
        table(("Server", ""), ((f"[{heading}]({name}.md)", about) for name, (heading, about) in _ABOUT.items())),
        "A session belongs to one rollout. `/seed_session` begins it and answers with a cookie; whoever calls tools or "
        "`/verify` of the same rollout sends that cookie along.",
        contents([*_ABOUT, "types"]).replace("\n\n", "\n:hidden:\n\n", 1),
    )
    return made


def _server(name: str, description: dict[str, Any]) -> str:
    heading, about = _ABOUT[name]
    parts = [f"# {heading}", about, f"[This page as OpenAPI]({name}.json)."]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts += [
                f"## {method.upper()} {path}",
                *_operation(operation, _WITHOUT_WORDS.get(f"{method.upper()} {path}", "")),
            ]
    return page(*parts)


def _operation(operation: dict[str, Any], otherwise: str) -> list[str]:
    parts = [escaped(operation["description"]) if operation.get("description") else otherwise]
    parameters = operation.get("parameters", [])
    rows = [(code(each["name"]), each["in"], _type(each["schema"], "types.md")) for each in parameters]
    parts.append(table(("Parameter", "In", "Takes"), rows))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    answer = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
    lines = [f"- Body: {_type(body, 'types.md')}"] if body else []
    lines.append(f"- Answer: {_type(answer, 'types.md') if answer else 'a JSON object'}")
    return [*parts, "\n".join(lines)]


def _types(types: dict[str, dict[str, Any]]) -> str:
    parts = ["# Types", "What the bodies and answers of the [HTTP API](index.md) are made of."]
    for name in sorted(set(types) - _VALIDATION):
        schema = types[name]
        required = schema.get("required", [])
        rows = [
            (code(field), _type(inner), "yes" if field in required else "", escaped(inner.get("description", "")))
            for field, inner in schema.get("properties", {}).items()
        ]
        choices = ", ".join(code(str(choice)) for choice in schema.get("enum", ()))
        parts += [
            f"## {name}",
            escaped(schema.get("description", "")),
            choices and f"One of {choices}.",
            table(("Field", "Type", "Required", "Meaning"), rows),
        ]
    return page(*parts)


def _type(schema: dict[str, Any], on: str = "") -> str:
    """A type in words, with a link to the types that have a name."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return name if name in _VALIDATION else f"[{name}]({on}#{name.lower()})"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_type(member, on) for member in schema[union]))
    if "enum" in schema or "const" in schema:
        return " or ".join(code(str(choice)) for choice in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), on)}"
    inside = schema.get("additionalProperties")
    return f"mapping of {_type(inside, on)}" if kind == "object" and isinstance(inside, dict) else str(kind)
