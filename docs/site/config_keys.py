"""The reference of configuration keys: those of the top level, of the HTTP client, of servers and of data sets.

What a key means stands at the field that holds it. Some keys have no field, because they steer how the
configuration itself is read; their meanings are here, and the build fails when one is missing or too many.
"""

from docs.site.fields import fields_table
from docs.site.markdown import code, page, table
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig
from nemo_gym.cli.registry import COMMANDS, config_class_of
from nemo_gym.config.options import options_of
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.keys import NEMO_GYM_RESERVED_TOP_LEVEL_KEYS, WELL_KNOWN_KEYS
from nemo_gym.prompt import PromptConfig
from nemo_gym.schemas.data_config import (
    BenchmarkDatasetConfig,
    DatasetConfig,
    GitlabDatasetSource,
    HuggingFaceDatasetSource,
)
from nemo_gym.schemas.server_config import BaseRunServerTypeConfig, Domain, MLFlowConfig, WANDBConfig

FOLDER = "reference"
_WITHOUT_FIELD = {
    "config_paths": "The config files, a list; also inside a config file, which then includes others.",
    "_inherit_from": "In a block: take what stands at this path, and remove it there.",
    "_copy": "In a block: take what stands at this path; it stays there, too.",
    "_delete_key": "In a block made from another: leave out these keys.",
    "allow_unknown_keys": "Accept keys on the command line that nothing reads. false unless set.",
    "error_on_almost_servers": "Whether a block that was meant as a server but is none (an *almost-server*) ends the "
    "command. true unless set; false makes it a warning.",
    "head_server": "`host` and `port` of the head server: `127.0.0.1` and 11000 unless set; port 0 is any free one.",
    "default_host": "Where servers listen that name no `host`: `127.0.0.1` unless set.",
    "use_absolute_ip": "Servers that name no `host` listen on the address of this machine. false unless set.",
    "allowed_hosts": "Further host names by which the servers may be called; see the page on security.",
    "disallowed_ports": "Ports that are given to no server.",
    "port_range_low": "The lowest port that is given to a server which names none.",
    "port_range_high": "The highest such port.",
    "auth_token": "What callers of the head and of every server must show; `auto` makes one. None unless set.",
    "session_secret": "What signs the sessions of a run; made anew for each run unless set.",
    "run_id": "The name of the run; made from time and chance unless set.",
    "policy_base_url": "Address of the model endpoint that the shipped model configs use.",
    "policy_api_key": "Its key.",
    "policy_model_name": "The name of the model there.",
    "policy_model": "The model server that the shipped agents use: a server block, or settings laid over one.",
    "ray_head_node_address": "The Ray cluster that servers which use Ray connect to.",
    "head_server_deps": "Packages that must have the same version in every server's environment.",
    "results_dir": "Where experiment trackers keep their files: `results` unless set.",
    "cache_dir": "Where environments built for servers are kept: `cache` unless set.",
    "component_name": "The name of the component that a command is about; accepted for compatibility.",
    "allow_openai_version_skew": "Accepted for compatibility: the package of OpenAI is not used here.",
    "verbose": "More on stderr. false unless set.",
    "skip_verification": "Collect without verdicts: handed down to every agent. false unless set.",
    "skip_verification_reward": "The reward that such rollouts carry. 0 unless set.",
    "observability_enabled": "Capture the model calls of rollouts, and keep how each one went. false unless set.",
    "model_call_capture_dir": "Where captured model calls go: an absolute path that servers and collector share.",
    "token_id_capture": "Keep the token ids of agents that know none: `enabled`, `all_agents`, `dir` (see Training).",
    "profiling_enabled": "Servers profile themselves. false unless set.",
    "profiling_results_dirpath": "Where these profiles go.",
    "uvicorn_logging_show_200_ok": "Log requests that went well, too. false unless set.",
    "uvicorn_timeout_worker_healthcheck": "Seconds in which a worker process of a server must answer. 30 unless set.",
}
_EXPLAINED_BELOW = {
    name for settings in (GlobalAIOHTTPAsyncClientConfig, WANDBConfig, MLFlowConfig) for name in settings.model_fields
}


def pages() -> dict[str, str]:
    """Path and text of the page."""
    return {f"{FOLDER}/config-keys.md": _page()}


def _page() -> str:
    top = _top_level()
    common = tuple(BaseRunServerTypeConfig.model_fields)
    return page(
        "# Every configuration key",
        "How keys are set, merged and resolved is explained in [Configuration](../configuration.md). The keys of the "
        "servers that come along are in the [gallery](../gallery/index.md), with each of them.",
        "## Top level",
        "Besides these, every option of a command is a key of this level: `+limit=5` on the command line and "
        "`limit: 5` in a file are the same.",
        table(("Key", "Meaning"), top),
        "## The HTTP client",
        "Keys of the top level. They hold for every process of a run.",
        fields_table(GlobalAIOHTTPAsyncClientConfig),
        "## Experiment trackers",
        "Keys of the top level: [Weights & Biases, MLflow](../guides/trackers.md).",
        fields_table(WANDBConfig),
        fields_table(MLFlowConfig),
        "## A server",
        "Keys of the innermost block of a server, `<name>.<server type>.<implementation>`.",
        fields_table(BaseRunServerTypeConfig),
        f"`domain` is required for resources servers: {', '.join(code(domain) for domain in Domain)}.",
        "### A resources server",
        fields_table(BaseResourcesServerConfig, without=(*common, "name")),
        "### An agent",
        fields_table(BaseResponsesAPIAgentConfig, without=(*common, "name")),
        "### A model server",
        fields_table(BaseResponsesAPIModelConfig, without=(*common, "name"))
        or "Nothing beyond the keys of every server.",
        "## A data set",
        "An entry of `datasets` in an agent's block: [Data sets and benchmarks](../data.md).",
        fields_table(DatasetConfig),
        "### A benchmark's data set",
        fields_table(BenchmarkDatasetConfig),
        "### Where a data set comes from",
        "The `source` of a data set.",
        fields_table(HuggingFaceDatasetSource),
        fields_table(GitlabDatasetSource),
        "## A prompt",
        "The content of a file that `prompt_config` names.",
        fields_table(PromptConfig),
    )


def _top_level() -> list[tuple[str, str]]:
    commands = _commands_by_option()
    every = {*NEMO_GYM_RESERVED_TOP_LEVEL_KEYS, *WELL_KNOWN_KEYS} - _EXPLAINED_BELOW
    unexplained = every - set(_WITHOUT_FIELD) - set(commands)
    superfluous = set(_WITHOUT_FIELD) - every
    if unexplained or superfluous:
        raise ValueError(f"docs/site/config_keys.py: explain {sorted(unexplained)}, leave out {sorted(superfluous)}")
    return [
        (code(key), _WITHOUT_FIELD[key] if key in _WITHOUT_FIELD else f"An option of {commands[key]}.")
        for key in sorted(every, key=lambda key: key.lstrip("_"))
    ]


def _commands_by_option() -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for info in COMMANDS:
        config_class = config_class_of(info)
        for option in options_of(config_class) if config_class is not None else ():
            for name in option.names:
                found.setdefault(name, []).append(f"[`ng_{info.name}`](commands/ng_{info.name}.md)")
    return {name: ", ".join(commands) for name, commands in found.items()}
