"""The commands as one tree, `gym <group> <command>`, beside their other spelling `ng_<name>`.

Each line of `TREE` names a command, the `ng_` command that does the work, and its flags; a flag stands for options of
that command, so there is one meaning of everything and two ways to type it. `gym` and `ng` are the same program. What
is not in the table, help and completion included, follows from it. Imported by every help page, so it stays light.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Role = Literal["option", "config", "asset", "entrypoint", "search_dir", "own"]
"""What a flag does: set options, add config files (by path or by name), name a server's folder, add a search root;
`own`: the command looks at it itself."""


@dataclass(frozen=True)
class Flag:
    """One flag of a command."""

    spellings: tuple[str, ...]
    sets: tuple[str, ...] = ()
    """The options it sets, or the kind of thing that it names."""
    role: Role = "option"
    is_switch: bool = False
    choices: tuple[str, ...] = ()
    meaning: str = ""
    """For a flag that no option of the command explains."""
    values: int = 1

    @property
    def name(self) -> str:
        """Its long spelling."""
        return self.spellings[-1]

    @property
    def placeholder(self) -> str:
        """What stands for its value in a usage line."""
        if self.is_switch:
            return ""
        return "|".join(self.choices) or " ".join([self.name.lstrip("-").replace("-", "_").upper()] * self.values)


@dataclass(frozen=True)
class Leaf:
    """One command of the tree."""

    words: tuple[str, ...]
    """How it is typed after `gym`."""
    command: str
    """The name after `ng_` of what does the work, or `module:attribute` of a command that has no other spelling."""
    flags: tuple[Flag, ...] = ()
    positional: str = ""
    """The name of a value that is typed without a flag."""
    summary: str = ""
    """In a list of commands; that of the `ng_` command when empty."""
    always: tuple[str, ...] = ()
    """Options that this spelling sets by itself."""

    @property
    def title(self) -> str:
        """The command as it is typed."""
        return " ".join(("gym", *self.words))


def _value(*spellings: str, sets: str = "", choices: tuple[str, ...] = (), meaning: str = "") -> Flag:
    return Flag(spellings, (sets or spellings[-1].lstrip("-").replace("-", "_"),), choices=choices, meaning=meaning)


def _switch(spelling: str, sets: str = "", meaning: str = "") -> Flag:
    return Flag((spelling,), (sets or spelling.lstrip("-").replace("-", "_"),), is_switch=True, meaning=meaning)


def _own(spelling: str, meaning: str, *, choices: tuple[str, ...] = (), is_switch: bool = False) -> Flag:
    return Flag((spelling,), role="own", choices=choices, is_switch=is_switch, meaning=meaning)


_CONFIG = Flag(("--config",), role="config", meaning="A config file; may be given several times.")
_SEARCH_DIR = Flag(
    ("--search-dir",),
    role="search_dir",
    meaning="A folder to look for components in, before those of NEMO_GYM_EXTRA_ROOTS; may be given several times.",
)
_BENCHMARK = Flag(("--benchmark",), ("benchmark",), "asset", meaning="A benchmark by name, NAME or NAME/FLAVOR.")
_ENVIRONMENT = Flag(("--environment",), ("environment",), "asset", meaning="An environment by name.")
_RESOURCES = Flag(
    ("--resources-server",), ("resources_server",), "asset", meaning="A resources server by name, NAME or NAME/FLAVOR."
)
_MODEL_TYPE = Flag(
    ("--model-type",), ("model_type",), "asset", meaning="A model server by name, such as vllm_model or openai_model."
)
_FOLDER = Flag(("--resources-server",), ("entrypoint",), "entrypoint", meaning="The resources server, by name.")
_ASSETS = (_BENCHMARK, _ENVIRONMENT, _RESOURCES, _MODEL_TYPE, _SEARCH_DIR)
_MODEL = (
    _value("-m", "--model", sets="policy_model_name", meaning="Name of the policy model, as its endpoint calls it."),
    _value("--model-url", sets="policy_base_url", meaning="Base URL of the policy model's endpoint."),
    _value("--model-api-key", sets="policy_api_key", meaning="Its key; a variable or env.yaml hides it better."),
)
_JSON = _switch("--json", meaning="Print JSON.")
_INPUT = _value("-i", "--input", sets="input_jsonl_fpath")
_OUTPUT = _value("-o", "--output", sets="output_jsonl_fpath")
_STORAGE = _own("--storage", "Where data sets are: the Hugging Face hub, unless said.", choices=("hf", "gitlab"))
_NAME = _value("--name", sets="dataset_name", meaning="The data set's name.")
_SPLIT = _value("--split")
_CREATE_PR = _switch("--create-pr")
_KIND = _value("--kind", choices=("environment", "benchmark"), meaning="Which of the two a name is of.")
_REPORT = _switch("--json", meaning="Print the report about the workload as JSON.")
_SCAFFOLD = (
    _value(
        "--profile",
        choices=("custom-gym-verifier", "custom-gym-agent-loop", "external-agent-loop", "external-rollout-driver"),
        meaning="How the workload is played: by simple_agent, by an agent of its own, by a program, by a function.",
    ),
    _value("--reuse-verifier", meaning="A resources server that is there already, in place of a new one."),
    Flag(("--reward-range",), ("reward_range",), meaning="The lowest and the highest reward.", values=2),
    Flag(
        ("--higher-is-better",), ("higher_is_better=true",), is_switch=True, meaning="The highest reward is the best."
    ),
    Flag(("--lower-is-better",), ("higher_is_better=false",), is_switch=True, meaning="The lowest reward is the best."),
)
_CATALOG_KIND = _value("--kind", sets="catalog_kind", choices=("environment", "benchmark"))
_LISTED = (_JSON, _SEARCH_DIR)
_REVISION = Flag(("--revision",), ("revision",), meaning="The version of the data set.")
_CATALOG = "nemo_gym.cli.workloads:list_components"
_WORKLOAD = "nemo_gym.cli.workloads"
_REGISTRY = "nemo_gym.dataset_orchestrator"

LIST_TYPES = ("benchmarks", "environments", "agents", "models", "resources-servers")
TREE: tuple[Leaf, ...] = (
    Leaf(("list", "benchmarks"), _CATALOG, _LISTED, "NAME", "List the benchmarks there are", ("+catalog=benchmarks",)),
    Leaf(
        ("list", "environments"),
        _CATALOG,
        (
            _value("--domain"),
            _CATALOG_KIND,
            _value("--modality"),
            _value("--licensing"),
            _value("--status", choices=("experimental", "no-manifest")),
            _value("--lifecycle", choices=("active", "deprecated")),
            *_LISTED,
        ),
        "NAME",
        "List the environments and benchmarks there are",
        ("+catalog=environments",),
    ),
    Leaf(("list", "agents"), _CATALOG, _LISTED, "NAME", "List the agents there are", ("+catalog=agents",)),
    Leaf(("list", "models"), _CATALOG, _LISTED, "NAME", "List the model servers there are", ("+catalog=models",)),
    Leaf(
        ("list", "resources-servers"),
        _CATALOG,
        _LISTED,
        "NAME",
        "List the resources servers there are",
        ("+catalog=resources-servers",),
    ),
    Leaf(("search",), _CATALOG, _LISTED, "[TYPE] QUERY", "Find components by name, domain or description"),
    Leaf(
        ("dataset", "upload"),
        "upload_dataset_to_hf",
        (_STORAGE, _INPUT, _NAME, _REVISION, _SPLIT, _CREATE_PR),
    ),
    Leaf(
        ("dataset", "download"),
        "download_dataset_from_hf",
        (
            _STORAGE,
            _value("--repo-id"),
            _own("--name", "The data set's name, in GitLab."),
            _own("--revision", "The data set's version, in GitLab."),
            _value("--artifact", sets="artifact_fpath"),
            _value("-o", "--output", sets="output_fpath"),
            _value("--output-dir", sets="output_dirpath"),
            _SPLIT,
        ),
    ),
    Leaf(
        ("dataset", "rm"),
        f"{_REGISTRY}:delete_jsonl_dataset_from_gitlab_cli",
        (_NAME,),
        summary="Delete a data set from a GitLab registry",
    ),
    Leaf(
        ("dataset", "migrate"),
        f"{_REGISTRY}:upload_jsonl_dataset_to_hf_and_delete_gitlab_cli",
        (_INPUT, _NAME, _REVISION, _SPLIT, _CREATE_PR),
        summary="Move a data set from a GitLab registry to the Hugging Face hub",
    ),
    Leaf(
        ("dataset", "render"),
        "materialize_prompts",
        (_INPUT, _value("--prompt-config"), _OUTPUT, _SEARCH_DIR),
    ),
    Leaf(
        ("dataset", "collate"),
        "prepare_data",
        (
            _CONFIG,
            _RESOURCES,
            _MODEL_TYPE,
            _SEARCH_DIR,
            _value("--mode", choices=("train_preparation", "example_validation")),
            _value("--output-dir", sets="output_dirpath"),
            _switch("--download", sets="should_download"),
        ),
    ),
    Leaf(
        ("env", "init"),
        "init_resources_server",
        (
            _FOLDER,
            _own("--environment", "Begin an environment of this name instead, with a manifest."),
            _own("--benchmark", "Begin a benchmark of this name instead, with a manifest."),
            *_SCAFFOLD,
        ),
        summary="Write a new environment to begin with, or a whole workload with its manifest",
    ),
    Leaf(("env", "resolve"), "dump_config", (_CONFIG, *_ASSETS, *_MODEL)),
    Leaf(
        ("env", "validate"),
        "validate",
        (
            _CONFIG,
            *_ASSETS,
            *_MODEL,
            _KIND,
            _value("--manifest", sets="manifest_path", meaning="Check the workload of this manifest.yaml."),
            _switch("--sync", meaning="Write into the manifest what the config says otherwise."),
            _REPORT,
        ),
        "[NAME]",
        "Check a configuration, or the manifest of the workload NAME; list every problem",
    ),
    Leaf(
        ("env", "packages"),
        "pip_list",
        (_FOLDER, _SEARCH_DIR, _switch("--outdated"), Flag(("--json",), ("format=json",), is_switch=True)),
    ),
    Leaf(
        ("env", "test"),
        "test",
        (
            _FOLDER,
            _SEARCH_DIR,
            _KIND,
            _switch("--update-expected", meaning="Write what the verifier of NAME says now as what is expected."),
            _REPORT,
        ),
        "[NAME]",
        "Run the tests of one server, or of all; or try the verifier of the workload NAME",
    ),
    Leaf(
        ("env", "publish"),
        f"{_WORKLOAD}:publish_workload",
        (_KIND, _REPORT, _SEARCH_DIR),
        "NAME",
        "Make sure that a workload with a manifest is fit for others; nothing is uploaded",
    ),
    Leaf(("env", "start"), "run", (_CONFIG, *_ASSETS, *_MODEL)),
    Leaf(
        ("env", "prefetch"),
        f"{_WORKLOAD}:prefetch",
        (_CONFIG, *_ASSETS),
        summary="Build the environments that servers need, and start nothing",
    ),
    Leaf(("env", "status"), "status", (_JSON,)),
    Leaf(("eval", "prepare"), "prepare_benchmark", (_CONFIG, _BENCHMARK, _SEARCH_DIR)),
    Leaf(
        ("eval", "run"),
        "e2e_collect_rollouts",
        (
            _CONFIG,
            *_ASSETS,
            *_MODEL,
            _own("--no-serve", "Ask servers that run already: the same as ng_collect_rollouts.", is_switch=True),
            _switch("--resume", sets="resume_from_cache"),
            _value("-a", "--agent", sets="agent_name"),
            _value("-i", "--input", sets="input_jsonl_fpath", meaning="Rows to roll out instead of data sets."),
            _OUTPUT,
            _value("--limit"),
            _value("--num-repeats"),
            _value("--prompt-config"),
            _value("--concurrency", sets="num_samples_in_parallel"),
            _SPLIT,
            _value("--temperature", sets="responses_create_params.temperature", meaning="Of every request."),
            _value("--top-p", sets="responses_create_params.top_p", meaning="Of every request."),
            _value(
                "--max-output-tokens", sets="responses_create_params.max_output_tokens", meaning="Of every request."
            ),
            _switch("--disable-aggregation"),
            _JSON,
        ),
        summary="Prepare data, start servers, collect rollouts, stop; with --no-serve only collect",
    ),
    Leaf(
        ("eval", "aggregate"),
        "aggregate_rollouts",
        (_CONFIG, _value("-i", "--input-glob", sets="input_glob"), _OUTPUT),
    ),
    Leaf(
        ("eval", "reverify"),
        "reverify",
        (
            _CONFIG,
            *_ASSETS,
            _value("--inputs", sets="materialized_inputs_jsonl_fpath"),
            _value("--rollouts", sets="rollouts_jsonl_fpath"),
            _OUTPUT,
            _value("--concurrency", sets="num_samples_in_parallel"),
            _value("--limit"),
            _switch("--force"),
            _switch("--overwrite"),
            _switch("--resume", sets="resume_from_cache"),
            _switch("--disable-aggregation"),
            _switch("--judge-failed-only"),
            _switch("--append"),
        ),
    ),
    Leaf(
        ("eval", "profile"),
        "reward_profile",
        (
            _value("--inputs", sets="materialized_inputs_jsonl_fpath"),
            _value("--rollouts", sets="rollouts_jsonl_fpath"),
        ),
    ),
    Leaf(
        ("eval", "submit"),
        f"{_WORKLOAD}:submit",
        (
            Flag(("-c", "--config"), role="own", meaning="The file: compute, services and benchmarks."),
            _own("--dry-run", "Only print the job.", is_switch=True),
        ),
        summary="Hand in one Slurm job that starts services and runs benchmarks against them",
    ),
    Leaf(("eval", "slurm"), "slurm", (_CONFIG, *_ASSETS, *_MODEL, _value("--num-shards"))),
    Leaf(("eval", "control"), "control", (_JSON,)),
    Leaf(("eval", "attach"), "attach"),
    Leaf(("eval", "check"), "check_rollouts", (_value("-i", "--input", sets="input"), _JSON)),
    Leaf(("eval", "view"), "view", (_JSON,)),
    Leaf(("eval", "compare"), "compare", (_JSON,)),
    Leaf(
        ("eval", "export"),
        "export",
        (
            _value("--rollouts", sets="rollouts_jsonl_fpath"),
            _value("-o", "--output", sets="output_fpath"),
            _value("--format", choices=("sft", "dpo", "messages", "dataset")),
            _switch("--overwrite"),
            _JSON,
        ),
    ),
    Leaf(("eval", "recordings"), "recordings", (_JSON,)),
    Leaf(("dev", "test"), "dev_test"),
    Leaf(("completion",), "completion", (_value("--shell", choices=("bash", "zsh")),)),
)

GROUPS = {
    "list": "Components",
    "search": "Components, by words",
    "dataset": "Data sets",
    "env": "Environments and their servers",
    "eval": "Rollouts",
    "dev": "This package",
    "completion": "Shells",
}
"""The first words, in the order of the help page, and what their commands are about."""

_OTHERS = {
    "e2e_collect_rollouts": ("eval", "run"),
    "collect_rollouts": ("eval", "run", "--no-serve"),
    "list_benchmarks": ("list", "benchmarks"),
    "list_environments": ("list", "environments"),
    "list_agents": ("list", "agents"),
    "list_models": ("list", "models"),
    "test": ("env", "test", "--resources-server", "NAME"),
    "test_all": ("env", "test"),
    "help": ("--help",),
    "version": ("--version",),
}


def spelled_as_gym(name: str) -> str:
    """The other spelling of `ng_<name>`; empty if there is none."""
    words = _OTHERS.get(name) or next((leaf.words for leaf in TREE if leaf.command == name), ())
    return " ".join(("gym", *words)) if words else ""


def spelled_with_prefix(leaf: Leaf) -> str:
    """The `ng_` spelling of a command of the tree; empty if there is none."""
    if ":" not in leaf.command:
        return f"ng_{leaf.command}"
    return next((f"ng_{name}" for name, words in _OTHERS.items() if words == leaf.words), "")


def leaves_below(words: tuple[str, ...]) -> Iterator[Leaf]:
    """The commands that begin with these words."""
    return (leaf for leaf in TREE if leaf.words[: len(words)] == words)
