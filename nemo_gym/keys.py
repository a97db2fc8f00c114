"""Names that appear in configs, rows and results, each spelled exactly once.

They are contract: config files, data sets and rollout files of other programs use them.
"""

# Environment variables
NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME = "NEMO_GYM_CONFIG_DICT"
NEMO_GYM_CONFIG_FILE_ENV_VAR_NAME = "NEMO_GYM_CONFIG_FILE"
NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME = "NEMO_GYM_CONFIG_PATH"
NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME = "NEMO_GYM_EXTRA_ROOTS"
NEMO_GYM_DEBUG_ENV_VAR_NAME = "NEMO_GYM_DEBUG"
NEMO_GYM_PARENT_PID_ENV_VAR_NAME = "NEMO_GYM_PARENT_PID"
"""Set by a launcher: the server ends when this process is no longer its parent."""
NEMO_GYM_RUN_ID_ENV_VAR_NAME = "NEMO_GYM_RUN_ID"
"""Set by a launcher: the name of the run, which containers are labelled with."""
NEMO_GYM_NUM_REPLICAS_ENV_VAR_NAME = "NEMO_GYM_NUM_REPLICAS"
NUM_WORKERS_ENV_VAR_NAME = "NEMO_GYM_FASTAPI_NUM_WORKERS"
MAX_ROLLOUT_ATTEMPTS_ENV_VAR_NAME = "NEMO_GYM_MAX_ROLLOUT_ATTEMPTS"
NEMO_GYM_SECRET_OPTIONS_ENV_VAR_NAME = "NEMO_GYM_SECRET_OPTIONS"
"""Options for a shard that must not stand on a command line, which everybody can read, as JSON."""

# Server types, in the order they are listed to people
MODELS_TYPE = "responses_api_models"
RESOURCES_TYPE = "resources_servers"
AGENTS_TYPE = "responses_api_agents"
SERVER_TYPES = (MODELS_TYPE, RESOURCES_TYPE, AGENTS_TYPE)

# Reserved top-level config keys: never server instances
CONFIG_PATHS_KEY_NAME = "config_paths"
ENTRYPOINT_KEY_NAME = "entrypoint"
DEFAULT_HOST_KEY_NAME = "default_host"
HEAD_SERVER_KEY_NAME = "head_server"
DISALLOWED_PORTS_KEY_NAME = "disallowed_ports"
HEAD_SERVER_DEPS_KEY_NAME = "head_server_deps"
PYTHON_VERSION_KEY_NAME = "python_version"
PIP_INSTALL_VERBOSE_KEY_NAME = "pip_install_verbose"
USE_ABSOLUTE_IP_KEY_NAME = "use_absolute_ip"
UV_PIP_SET_PYTHON_KEY_NAME = "uv_pip_set_python"
SKIP_VENV_IF_PRESENT_KEY_NAME = "skip_venv_if_present"
HF_TOKEN_KEY_NAME = "hf_token"
RAY_HEAD_NODE_ADDRESS_KEY_NAME = "ray_head_node_address"
PORT_RANGE_LOW_KEY_NAME = "port_range_low"
PORT_RANGE_HIGH_KEY_NAME = "port_range_high"
DRY_RUN_KEY_NAME = "dry_run"
UV_CACHE_DIR_KEY_NAME = "uv_cache_dir"
UV_VENV_DIR_KEY_NAME = "uv_venv_dir"
INHERIT_FROM_KEY_NAME = "_inherit_from"
COPY_KEY_NAME = "_copy"
DELETE_KEY_KEY_NAME = "_delete_key"
NEMO_GYM_LOG_DIR_KEY_NAME = "nemo_gym_log_dir"
SESSION_SECRET_KEY_NAME = "session_secret"
AUTH_TOKEN_KEY_NAME = "auth_token"
ALLOWED_HOSTS_KEY_NAME = "allowed_hosts"
NUM_REPLICAS_KEY_NAME = "num_replicas"
RUN_ID_KEY_NAME = "run_id"
ALLOW_UNKNOWN_KEYS_KEY_NAME = "allow_unknown_keys"
ERROR_ON_ALMOST_SERVERS_KEY_NAME = "error_on_almost_servers"
MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME = "model_endpoint_readiness_timeout_seconds"
ALLOW_OPENAI_VERSION_SKEW_KEY_NAME = "allow_openai_version_skew"
RESULTS_DIR_KEY_NAME = "results_dir"
CACHE_DIR_KEY_NAME = "cache_dir"
VERBOSE_KEY_NAME = "verbose"
JSON_OUTPUT_KEY_NAME = "json"
QUERY_KEY_NAME = "query"
OBSERVABILITY_ENABLED_KEY_NAME = "observability_enabled"
MODEL_CALL_CAPTURE_DIR_KEY_NAME = "model_call_capture_dir"
TOKEN_ID_CAPTURE_BLOCK = "token_id_capture"
COMPONENT_NAME_KEY_NAME = "component_name"
SKIP_VERIFICATION_KEY_NAME = "skip_verification"
SKIP_VERIFICATION_REWARD_KEY_NAME = "skip_verification_reward"
RECORDING_FOLDER_KEY_NAME = "recording_folder"
RECORDING_MODE_KEY_NAME = "recording_mode"
RECORDING_MAX_BYTES_KEY_NAME = "recording_max_bytes"

NEMO_GYM_RESERVED_TOP_LEVEL_KEYS: tuple[str, ...] = (
    CONFIG_PATHS_KEY_NAME,
    ENTRYPOINT_KEY_NAME,
    DEFAULT_HOST_KEY_NAME,
    HEAD_SERVER_KEY_NAME,
    DISALLOWED_PORTS_KEY_NAME,
    HEAD_SERVER_DEPS_KEY_NAME,
    PYTHON_VERSION_KEY_NAME,
    PIP_INSTALL_VERBOSE_KEY_NAME,
    USE_ABSOLUTE_IP_KEY_NAME,
    UV_PIP_SET_PYTHON_KEY_NAME,
    SKIP_VENV_IF_PRESENT_KEY_NAME,
    HF_TOKEN_KEY_NAME,
    RAY_HEAD_NODE_ADDRESS_KEY_NAME,
    PORT_RANGE_LOW_KEY_NAME,
    PORT_RANGE_HIGH_KEY_NAME,
    DRY_RUN_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
    UV_VENV_DIR_KEY_NAME,
    INHERIT_FROM_KEY_NAME,
    COPY_KEY_NAME,
    DELETE_KEY_KEY_NAME,
    NEMO_GYM_LOG_DIR_KEY_NAME,
    MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME,
    ALLOW_OPENAI_VERSION_SKEW_KEY_NAME,
    RESULTS_DIR_KEY_NAME,
    CACHE_DIR_KEY_NAME,
    VERBOSE_KEY_NAME,
    JSON_OUTPUT_KEY_NAME,
    QUERY_KEY_NAME,
    OBSERVABILITY_ENABLED_KEY_NAME,
    MODEL_CALL_CAPTURE_DIR_KEY_NAME,
    TOKEN_ID_CAPTURE_BLOCK,
    COMPONENT_NAME_KEY_NAME,
    SKIP_VERIFICATION_KEY_NAME,
    SKIP_VERIFICATION_REWARD_KEY_NAME,
    RECORDING_FOLDER_KEY_NAME,
    RECORDING_MODE_KEY_NAME,
    RECORDING_MAX_BYTES_KEY_NAME,
    SESSION_SECRET_KEY_NAME,
    AUTH_TOKEN_KEY_NAME,
    ALLOWED_HOSTS_KEY_NAME,
    NUM_REPLICAS_KEY_NAME,
    RUN_ID_KEY_NAME,
    ALLOW_UNKNOWN_KEYS_KEY_NAME,
)

PATH_KEYS = (
    NEMO_GYM_LOG_DIR_KEY_NAME,
    UV_CACHE_DIR_KEY_NAME,
    UV_VENV_DIR_KEY_NAME,
    RESULTS_DIR_KEY_NAME,
    CACHE_DIR_KEY_NAME,
    MODEL_CALL_CAPTURE_DIR_KEY_NAME,
    RECORDING_FOLDER_KEY_NAME,
)
"""Top-level keys that hold a path on this machine."""

# Paths that servers and those who wait for them agree on
CAPTURE_KEY = "ng_model_call_capture"
OBSERVATIONS_KEY = "ng_agent_observations"
TRAJECTORY_KEY = "ng_trajectory"
OBSERVED_KEYS = frozenset({CAPTURE_KEY, OBSERVATIONS_KEY, TRAJECTORY_KEY})
"""What a record may hold of how its rollout went; too large for metrics, tables and trackers."""
MODEL_ENDPOINTS_PATH = "/model_endpoints"
MODEL_PATHS = {"/v1/responses": "responses", "/v1/chat/completions": "chat", "/v1/messages": "messages"}
"""The paths by which models answer, and the dialect of each."""
MODEL_NAME_KEYS = ("openai_model", "model")
"""The settings of model servers that name the model."""
SERVER_STATES_PATH = "/server_states"
REPLICABLE_PATH = "/ng_replicable"
"""An environment says here whether it may run in several processes."""

# Keys of rows and results
OWN_KEY_PREFIX = "_ng_"
"""How keys begin that are about a rollout and no part of its result."""
TASK_INDEX_KEY_NAME = "_ng_task_index"
ROLLOUT_INDEX_KEY_NAME = "_ng_rollout_index"
ATTEMPT_INDEX_KEY_NAME = "_ng_attempt_index"
ROLLOUT_ID_KEY_NAME = "_ng_rollout_id"
TIMING_KEY_NAME = "_ng_timing"
USAGE_KEY_NAME = "_ng_usage"
RESPONSES_CREATE_PARAMS_KEY_NAME = "responses_create_params"
PARTIAL_RESPONSE_KEY_NAME = "_ng_partial_response"
RESPONSE_KEY_NAME = "response"
END_SESSION_HEADER = "x-nemo-gym-end-session"
"""An agent sends it with `/verify` to say that the episode is over."""
AGENT_REF_KEY_NAME = "agent_ref"
SKILLS_REF_KEY_NAME = "skills_ref"

# Parts of the paths of calls that belong to a rollout
ROLLOUT_PATH_PREFIX = "ng-rollout"
TOKEN_CAPTURE_PATH_SEGMENT = "training-token-capture"

RECORDING_BLOCK = "recording"
"""In the block of a model server: what of its calls is recorded or replayed."""

# Well-known keys that are ordinary config data
POLICY_BASE_URL_KEY_NAME = "policy_base_url"
POLICY_API_KEY_KEY_NAME = "policy_api_key"
POLICY_MODEL_NAME_KEY_NAME = "policy_model_name"
POLICY_MODEL_KEY_NAME = "policy_model"
UVICORN_TIMEOUT_WORKER_HEALTHCHECK = "uvicorn_timeout_worker_healthcheck"

WELL_KNOWN_TEXT_KEYS: frozenset[str] = frozenset(
    {
        POLICY_BASE_URL_KEY_NAME,
        POLICY_API_KEY_KEY_NAME,
        POLICY_MODEL_NAME_KEY_NAME,
        "wandb_project",
        "wandb_name",
        "wandb_api_key",
        "mlflow_tracking_uri",
        "mlflow_tracking_token",
        "mlflow_experiment_name",
        "mlflow_run_name",
        "hf_organization",
        "hf_collection_name",
        "hf_collection_slug",
        "profiling_results_dirpath",
        HF_TOKEN_KEY_NAME,
        DEFAULT_HOST_KEY_NAME,
        PYTHON_VERSION_KEY_NAME,
        RAY_HEAD_NODE_ADDRESS_KEY_NAME,
        UV_CACHE_DIR_KEY_NAME,
        UV_VENV_DIR_KEY_NAME,
        NEMO_GYM_LOG_DIR_KEY_NAME,
        RESULTS_DIR_KEY_NAME,
        CACHE_DIR_KEY_NAME,
        RECORDING_FOLDER_KEY_NAME,
        SESSION_SECRET_KEY_NAME,
        AUTH_TOKEN_KEY_NAME,
        ALLOWED_HOSTS_KEY_NAME,
    }
)
"""Config keys whose value is text even when it looks like something else (`a,b`, `x=1`, `007`)."""

NESTED_TEXT_KEYS: frozenset[str] = frozenset(
    {
        f"{HEAD_SERVER_KEY_NAME}.host",
        "skills.path",
        *(f"{RESPONSES_CREATE_PARAMS_KEY_NAME}.{name}" for name in ("instructions", "input", "model", "user")),
    }
)
"""The same, below the top level."""

TEXT_LIST_KEYS: frozenset[str] = frozenset({CONFIG_PATHS_KEY_NAME, POLICY_BASE_URL_KEY_NAME, ALLOWED_HOSTS_KEY_NAME})
"""Config keys whose value may be a list of texts, each as literal as the value of a text key."""

HTTP_CONFIG_KEYS: frozenset[str] = frozenset(
    {
        "global_aiohttp_client_request_debug",
        "global_aiohttp_connector_limit",
        "global_aiohttp_connector_limit_per_host",
        "global_aiohttp_tcp_keepalive_idle_seconds",
        "global_aiohttp_tcp_keepalive_interval_seconds",
        "global_aiohttp_tcp_keepalive_probes",
        "http_connect_timeout_s",
        "http_retry_first_delay_s",
        "http_retry_max_delay_s",
        "http_retry_max_elapsed_s",
        "http_retry_max_tries",
        "http_total_timeout_s",
        "max_response_bytes",
        "model_retry_first_delay_s",
        "model_retry_max_delay_s",
        "model_retry_max_elapsed_s",
        "model_retry_max_tries",
        "model_total_timeout_s",
    }
)
"""Settings of the HTTP client, whose types live in `nemo_gym.http.settings`."""

WELL_KNOWN_KEYS: frozenset[str] = WELL_KNOWN_TEXT_KEYS | {
    POLICY_MODEL_KEY_NAME,
    ERROR_ON_ALMOST_SERVERS_KEY_NAME,
    *HTTP_CONFIG_KEYS,
    "profiling_enabled",
    "uvicorn_logging_show_200_ok",
    UVICORN_TIMEOUT_WORKER_HEALTHCHECK,
}

DEFAULT_HEAD_SERVER_PORT = 11000
DEFAULT_HOST = "127.0.0.1"
MASK = "****"
"""What a secret looks like wherever a config is shown."""
MISSING = "???"
"""OmegaConf's mark for a value the user must supply."""
STAND_IN = "dummy_model"
"""The implementation of the model that commands put in place of one that they do not need."""
