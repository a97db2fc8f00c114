"""Commands for servers, data sets, authors of environments, configuration, and help."""

from nemo_gym.cli.pages import AUTHORING, CONFIGURATION, DATA, HELP, NO_CONFIG, OFFLINE, SERVERS, CommandInfo, Loading

RUN = CommandInfo(
    "run",
    SERVERS,
    "Start the servers of a configuration",
    "nemo_gym.schemas.cli_config:RunConfig",
    "nemo_gym.cli.commands.servers",
    Loading(starts_servers=True),
    """
    Start the configured servers and a head server, and keep them running until Ctrl-C.

    Servers of this distribution share one process; servers written elsewhere get their own, in an environment
    of their own if they require packages that are not installed here. A server that crashes ends the run, or
    is started again with +restart_crashed_servers=true.

    Examples:
        ng_run +environment=example_single_tool_call +model=scripted
        ng_run "+config_paths=[my_environment.yaml,my_model.yaml]"
        ng_run "+config_paths=[my_environment.yaml,my_model.yaml]" +head_server.port=0 +num_replicas=4
        ng_run "+config_paths=[my_environment.yaml,my_model.yaml]" +dry_run=true
    """,
)
STATUS = CommandInfo(
    "status",
    SERVERS,
    "List the running servers and runs",
    "nemo_gym.schemas.cli_config:StatusConfig",
    "nemo_gym.cli.commands.looking",
    OFFLINE,
    """
    List the servers that `ng_run` has started and whether each of them answers, and the runs that go on here.

    Runs are those of this user on this machine, each as its collector says how it stands.

    Examples:
        ng_status
        ng_status +head_server.port=11500
        ng_status +json=true +runs=true
    """,
)
PREPARE_DATA = CommandInfo(
    "prepare_data",
    DATA,
    "Check, measure and collate data sets",
    "nemo_gym.schemas.data_config:TrainDataProcessorConfig",
    "nemo_gym.cli.commands.data",
    OFFLINE,
    r"""
    Check every row of the data sets that the configured agents declare, and write one file per kind of data.

    Each row gets the name of its agent, benchmarks their prompt, and rows are repeated as their data set says. What
    the rows are like is written to a metrics file beside each data set; one that is there already and says something
    else is a conflict. Rows that cannot be rolled out, because of their parameters or because the environment would
    refuse them, are listed with file and line, and nothing is written.

    Examples:
        ng_prepare_data "+config_paths=[resources_servers/my_env/configs/my_env.yaml]" \
            +mode=example_validation +output_dirpath=results/my_env
        ng_prepare_data "+config_paths=[resources_servers/my_env/configs/my_env.yaml]" \
            +mode=train_preparation +output_dirpath=results/my_env +should_download=true
    """,
)
MATERIALIZE_PROMPTS = CommandInfo(
    "materialize_prompts",
    DATA,
    "Apply a prompt template to a data set",
    "nemo_gym.prompt:MaterializePromptsConfig",
    "nemo_gym.cli.commands.data",
    NO_CONFIG,
    """
    Fill a prompt template with the fields of every row and write the rows with their messages.

    Rows may not bring a `responses_create_params.input` of their own. All rows are checked before anything is
    written.

    Examples:
        ng_materialize_prompts +input_jsonl_fpath=in.jsonl +prompt_config=prompt.yaml +output_jsonl_fpath=out.jsonl
    """,
)
LIST_BENCHMARKS = CommandInfo(
    "list_benchmarks",
    DATA,
    "List the benchmarks there are",
    "nemo_gym.schemas.data_config:ListBenchmarksConfig",
    "nemo_gym.cli.gallery",
    NO_CONFIG,
    """
    List the benchmarks of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    Each is used by name, +benchmark=gsm8k. Rows that are not there yet are made by ng_prepare_benchmark, and by
    ng_e2e_collect_rollouts when it needs them.

    Examples:
        ng_list_benchmarks
        ng_list_benchmarks +query=math
        ng_list_benchmarks +json=true
    """,
)
LIST_ENVIRONMENTS = CommandInfo(
    "list_environments",
    DATA,
    "List the environments there are",
    "nemo_gym.schemas.cli_config:ListConfig",
    "nemo_gym.cli.gallery",
    NO_CONFIG,
    """
    List the environments of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    Tasks are the rows of their data sets; needs are what an environment wants beside a model.

    Examples:
        ng_list_environments
        ng_list_environments +query=math
        ng_list_environments +json=true
    """,
)
LIST_MODELS = CommandInfo(
    "list_models",
    DATA,
    "List the model servers there are",
    "nemo_gym.schemas.cli_config:ListConfig",
    "nemo_gym.cli.gallery",
    NO_CONFIG,
    """
    List the model servers of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    The last column is how one is chosen on the command line; what it needs can also stand in env.yaml.

    Examples:
        ng_list_models
        ng_list_models +query=chat
        ng_list_models +json=true
    """,
)
LIST_AGENTS = CommandInfo(
    "list_agents",
    DATA,
    "List the agents there are",
    "nemo_gym.schemas.cli_config:ListConfig",
    "nemo_gym.cli.gallery",
    NO_CONFIG,
    """
    List the agents of this distribution, of the current folder and of the folders in NEMO_GYM_EXTRA_ROOTS.

    Environments usually bring an agent of their own; these are for those that you put together yourself.

    Examples:
        ng_list_agents
        ng_list_agents +query=tool
        ng_list_agents +json=true
    """,
)
PREPARE_BENCHMARK = CommandInfo(
    "prepare_benchmark",
    DATA,
    "Make the data of benchmarks",
    "nemo_gym.schemas.data_config:PrepareBenchmarkConfig",
    "nemo_gym.cli.commands.data",
    OFFLINE,
    r"""
    Run the prepare script of every benchmark in the configuration, which downloads or generates its rows.

    All scripts are checked before the first is run. Rows go to the path that the benchmark's data set names, below the
    current folder.

    Examples:
        ng_prepare_benchmark "+config_paths=[benchmarks/gsm8k/config.yaml]"
        ng_prepare_benchmark "+config_paths=[benchmarks/gsm8k/config.yaml]" +source=my_download/test.parquet
        ng_prepare_benchmark "+config_paths=[benchmarks/gsm8k/config.yaml,benchmarks/aime24/config.yaml]" \
            +num_prepare_benchmark_processes=2 +use_cached_prepared_benchmarks=true
    """,
)
DOWNLOAD_DATASET_FROM_HF = CommandInfo(
    "download_dataset_from_hf",
    DATA,
    "Fetch a data set from the Hugging Face hub",
    "nemo_gym.schemas.data_config:DownloadJsonlDatasetHuggingFaceConfig",
    "nemo_gym.cli.commands.data",
    OFFLINE,
    """
    Download a data set from the Hugging Face hub as JSON lines, or one of its files as it is.

    Needs the extra `hf`, and for Parquet files the extra `data`. HF_ENDPOINT names another hub.

    Examples:
        ng_download_dataset_from_hf +repo_id=openai/gsm8k +split=test +output_fpath=data/gsm8k_test.jsonl
        ng_download_dataset_from_hf +repo_id=my_org/my_data +output_dirpath=data
        ng_download_dataset_from_hf +repo_id=my_org/my_data +artifact_fpath=train.jsonl +output_fpath=data/train.jsonl
    """,
)
UPLOAD_DATASET_TO_HF = CommandInfo(
    "upload_dataset_to_hf",
    DATA,
    "Publish a data set on the Hugging Face hub",
    "nemo_gym.schemas.data_config:UploadJsonlDatasetHuggingFaceConfig",
    "nemo_gym.cli.commands.data",
    OFFLINE,
    r"""
    Upload a JSONL file as a split of a data set on the Hugging Face hub, and add the data set to a collection.

    The data set is called <hf_organization>/<hf_dataset_prefix>-<domain>-<dataset_name>, where domain, and name if none
    is given, are those of the resources server in resource_config_path. It is made, private, if it does not exist.
    Needs the extra `hf`. HF_ENDPOINT names another hub.

    Examples:
        ng_upload_dataset_to_hf +input_jsonl_fpath=data/train.jsonl +hf_organization=my_org +hf_token=... \
            +resource_config_path=resources_servers/my_env/configs/my_env.yaml \
            "+hf_collection_name=My environments" +hf_collection_slug=6512a0
    """,
)
INIT_RESOURCES_SERVER = CommandInfo(
    "init_resources_server",
    AUTHORING,
    "Write a new environment to begin with",
    "nemo_gym.schemas.cli_config:InitResourcesServerConfig",
    "nemo_gym.cli.scaffolds",
    NO_CONFIG,
    """
    Write a small environment that works: server, config, example rows, tests and a README to make your own.

    Examples:
        ng_init_resources_server +entrypoint=resources_servers/my_env
    """,
)
TEST = CommandInfo(
    "test",
    AUTHORING,
    "Run the tests of one server",
    "nemo_gym.schemas.cli_config:ServerTestsConfig",
    "nemo_gym.cli.commands.testing",
    OFFLINE,
    """
    Run the tests of a server with pytest, in an environment that has what the server requires.

    The exit code is that of pytest. With +should_validate_data=true the example data of a resources server is checked
    as well: five rows, their metrics, five rollouts.

    Examples:
        ng_test +entrypoint=resources_servers/my_env
        ng_test +entrypoint=resources_servers/my_env +should_validate_data=true
    """,
)
TEST_ALL = CommandInfo(
    "test_all",
    AUTHORING,
    "Run the tests of every server",
    "nemo_gym.schemas.cli_config:AllServerTestsConfig",
    "nemo_gym.cli.commands.testing",
    OFFLINE,
    """
    Run the tests of every server below the current folder, or of this distribution when there is none.

    Servers with a README.md are tested, the example data of resources servers is checked. Ends with exit code 1 when
    tests fail or are missing, or example data is not complete.

    Examples:
        ng_test_all
        ng_test_all +num_shards=4 +shard_index=0 +delete_venvs_after_each_test=true
    """,
)
DEV_TEST = CommandInfo(
    "dev_test",
    AUTHORING,
    "Run the tests of nemo-gym itself",
    "nemo_gym.schemas.cli_config:DevTestConfig",
    "nemo_gym.cli.commands.about",
    NO_CONFIG,
    """
    Run every test of a checkout with pytest, measuring coverage; the exit code is that of pytest.

    Examples:
        ng_dev_test
    """,
)
PIP_LIST = CommandInfo(
    "pip_list",
    AUTHORING,
    "List the packages a server runs with",
    "nemo_gym.schemas.cli_config:PipListConfig",
    "nemo_gym.cli.commands.testing",
    OFFLINE,
    """
    List the packages of the environment that a server runs in.

    Examples:
        ng_pip_list +entrypoint=resources_servers/my_env
        ng_pip_list +entrypoint=resources_servers/my_env +format=json +outdated=true
    """,
)
VALIDATE = CommandInfo(
    "validate",
    CONFIGURATION,
    "Check a configuration, list every problem",
    "nemo_gym.schemas.cli_config:ValidateConfig",
    "nemo_gym.cli.config",
    Loading(
        needs_model=False,
        offline=True,
        starts_servers=True,
        takes_over=False,
        further_checks="nemo_gym.launch.server_checks:server_problems",
    ),
    """
    Check a configuration and everything it refers to, without starting or contacting anything.

    Checked is what ng_run checks before it starts servers, what each server checks in its own settings, and whether
    declared data sets are there or can be obtained. Every problem is listed at once, with file and key; exit code 2.
    What can show only at a start is not: free ports, requirements that must be installed first, endpoints. A server
    whose module cannot be imported here is named in a warning. A configuration that names no model of its own is
    checked with a stand-in.

    Examples:
        ng_validate "+config_paths=[my_servers.yaml,my_model.yaml]"
    """,
)
DUMP_CONFIG = CommandInfo(
    "dump_config",
    CONFIGURATION,
    "Print the resolved configuration as YAML",
    "nemo_gym.schemas.cli_config:DumpConfigConfig",
    "nemo_gym.cli.config",
    Loading(),
    """
    Print the complete configuration as YAML: merged, defaults filled in, interpolations resolved, secrets masked.

    What short ways such as +model=openai:gpt-x stand for comes first, as a comment.

    Examples:
        ng_dump_config +benchmark=gsm8k +model=scripted
        ng_dump_config "+config_paths=[my_servers.yaml]"
        ng_dump_config "+config_paths=[my_servers.yaml]" +head_server.port=12000
    """,
)
HELP_COMMAND = CommandInfo(
    "help",
    HELP,
    "List the commands",
    "nemo_gym.schemas.cli_config:HelpConfig",
    "nemo_gym.cli.commands.about",
    NO_CONFIG,
    """
    List the commands of this installation.

    Examples:
        ng_help
    """,
)
VERSION = CommandInfo(
    "version",
    HELP,
    "Print versions and facts about this machine",
    "nemo_gym.schemas.cli_config:VersionConfig",
    "nemo_gym.cli.commands.about",
    NO_CONFIG,
    """
    Print the version of NeMo Gym, of Python and of what it may use, and facts about this machine.

    Examples:
        ng_version
        ng_version +json=true
    """,
)
COMPLETION = CommandInfo(
    "completion",
    HELP,
    "Print a completion script for bash or zsh",
    "nemo_gym.schemas.cli_config:CompletionConfig",
    "nemo_gym.cli.completion",
    NO_CONFIG,
    """
    Print a script that completes the options of every command, and config files in config_paths.

    Examples:
        source <(ng_completion +shell=bash)
        ng_completion +shell=bash >> ~/.bashrc
        ng_completion +shell=zsh >> ~/.zshrc
    """,
)

COMMANDS = (
    RUN,
    STATUS,
    PREPARE_DATA,
    MATERIALIZE_PROMPTS,
    LIST_BENCHMARKS,
    LIST_ENVIRONMENTS,
    LIST_MODELS,
    LIST_AGENTS,
    PREPARE_BENCHMARK,
    DOWNLOAD_DATASET_FROM_HF,
    UPLOAD_DATASET_TO_HF,
    INIT_RESOURCES_SERVER,
    TEST,
    TEST_ALL,
    DEV_TEST,
    PIP_LIST,
    VALIDATE,
    DUMP_CONFIG,
    HELP_COMMAND,
    VERSION,
    COMPLETION,
)
