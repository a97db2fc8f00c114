"""Names that programs outside this project import. They stay importable for ever."""

import importlib
import inspect
from dataclasses import fields

import pytest

import nemo_gym

CONTRACT = {
    "nemo_gym": """
        AggregateMetrics AggregateMetricsRequest BaseMultiRewardVerifyResponse BaseResourcesServerConfig
        BaseResponsesAPIAgentConfig BaseResponsesAPIModelConfig BaseRunRequest BaseRunServerInstanceConfig
        BaseSeedSessionRequest BaseSeedSessionResponse BaseServerConfig BaseVerifyRequest BaseVerifyResponse CACHE_DIR
        Domain ModelServerRef NeMoGymAsyncOpenAI NeMoGymChatCompletion NeMoGymChatCompletionCreateParamsNonStreaming
        NeMoGymResponse NeMoGymResponseCreateParamsNonStreaming PARENT_DIR RESULTS_DIR ROOT_DIR ReverifyMode
        SESSION_ID_KEY ServerClient SimpleResourcesServer SimpleResponsesAPIAgent SimpleResponsesAPIModel WORKING_DIR
        __package_name__ __version__ get_response_json raise_for_status
    """,
    "nemo_gym.cli": "GlobalConfigDictParserConfig RunHelper",
    "nemo_gym.global_config": """
        AGENT_REF_KEY_NAME ATTEMPT_INDEX_KEY_NAME ROLLOUT_ID_KEY_NAME SKILLS_REF_KEY_NAME
        CONFIG_PATHS_KEY_NAME DEFAULT_HEAD_SERVER_PORT DEFAULT_HOST_KEY_NAME
        DISALLOWED_PORTS_KEY_NAME DRY_RUN_KEY_NAME DictConfig ENTRYPOINT_KEY_NAME GlobalConfigDictParser
        GlobalConfigDictParserConfig HEAD_SERVER_DEPS_KEY_NAME HEAD_SERVER_KEY_NAME HF_TOKEN_KEY_NAME
        NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME NEMO_GYM_LOG_DIR_KEY_NAME
        NEMO_GYM_RESERVED_TOP_LEVEL_KEYS OmegaConf PIP_INSTALL_VERBOSE_KEY_NAME POLICY_API_KEY_KEY_NAME
        POLICY_BASE_URL_KEY_NAME POLICY_MODEL_KEY_NAME POLICY_MODEL_NAME_KEY_NAME PORT_RANGE_HIGH_KEY_NAME
        PORT_RANGE_LOW_KEY_NAME PYTHON_VERSION_KEY_NAME RAY_HEAD_NODE_ADDRESS_KEY_NAME
        RESPONSES_CREATE_PARAMS_KEY_NAME RESPONSE_KEY_NAME ROLLOUT_INDEX_KEY_NAME SKIP_VENV_IF_PRESENT_KEY_NAME
        TASK_INDEX_KEY_NAME USE_ABSOLUTE_IP_KEY_NAME UV_CACHE_DIR_KEY_NAME UV_PIP_SET_PYTHON_KEY_NAME
        UV_VENV_DIR_KEY_NAME _GLOBAL_CONFIG_DICT _find_open_port_using_range find_open_port
        get_first_server_config_dict get_global_config_dict get_hf_token get_wandb_run maybe_get_global_config_dict
        set_global_config_dict
    """,
    "nemo_gym.config_types": """
        AGENT_REF_KEY AgentServerRef AggregateMetrics AggregateMetricsRequest AlmostServerError BaseNeMoGymCLIConfig
        BaseRunServerConfig BaseRunServerInstanceConfig BaseRunServerTypeConfig BaseServerConfig
        BaseUploadJsonlDatasetHuggingFaceConfig BenchmarkDatasetConfig ConfigError ConfigInterpolationError
        ConfigMissingValuesError ConfigPathNotFoundError DatasetConfig DatasetType DeleteJsonlDatasetGitlabConfig
        Domain DownloadJsonlDatasetGitlabConfig DownloadJsonlDatasetHuggingFaceConfig InheritPathNotFoundError
        JsonlDatasetGitlabIdentifer JsonlDatasetHuggingFaceIdentifer MalformedConfigPathsError ModelServerRef
        NoServerInstancesError ResourcesServerInstanceConfig ResourcesServerRef ResourcesServerTypeConfig
        ResponsesAPIAgentServerInstanceConfig ResponsesAPIAgentServerTypeConfig
        ResponsesAPIModelServerInstanceConfig ResponsesAPIModelServerTypeConfig ServerInstanceConfig ServerRef
        ServerRefNotFoundError UploadJsonlDatasetGitlabConfig UploadJsonlDatasetHuggingFaceConfig
        UploadJsonlDatasetHuggingFaceMaybeDeleteConfig WANDBConfig is_almost_server is_server_ref
        maybe_get_server_instance_config
    """,
    "nemo_gym.openai_utils": """
        NeMoGymAsyncOpenAI NeMoGymChatCompletion NeMoGymChatCompletionCreateParamsNonStreaming
        NeMoGymChatCompletionMessage NeMoGymChatCompletionMessageForTraining NeMoGymChatCompletionMessageToolCall
        NeMoGymChatCompletionToolParam NeMoGymChoice NeMoGymEasyInputMessage NeMoGymEasyInputMessageForTraining
        NeMoGymFunction NeMoGymFunctionCallOutput NeMoGymFunctionDefinition NeMoGymFunctionToolParam NeMoGymMessage
        NeMoGymMessageForTraining NeMoGymResponse NeMoGymResponseCreateParamsNonStreaming
        NeMoGymResponseFunctionToolCall NeMoGymResponseFunctionToolCallForTraining NeMoGymResponseInput
        NeMoGymResponseInputItem NeMoGymResponseOutputItem NeMoGymResponseOutputMessage
        NeMoGymResponseOutputMessageForTraining NeMoGymResponseOutputRefusal NeMoGymResponseOutputText
        NeMoGymResponseReasoningItem NeMoGymResponseReasoningItemForTraining NeMoGymResponseUsage NeMoGymSummary
        RATE_LIMIT_ERROR_CODES RESPONSES_TO_TRAIN RETRY_ERROR_CODES TokenIDLogProbMixin accumulate_response_usage
        training_variant_of
    """,
    "nemo_gym.server_utils": """
        BaseRunServerInstanceConfig BaseServer BaseServerConfig ClientResponse DictConfig
        GlobalAIOHTTPAsyncClientConfig HEAD_SERVER_KEY_NAME HeadServer OmegaConf SESSION_ID_KEY ServerClient
        ServerInstanceDisplayConfig ServerStatus SimpleServer get_global_aiohttp_client get_global_config_dict
        get_response_json get_server_url global_aiohttp_client_exit is_global_aiohttp_client_request_debug_enabled
        is_global_aiohttp_client_setup is_nemo_gym_fastapi_entrypoint raise_for_status request
        set_global_aiohttp_client
    """,
    "nemo_gym.base_resources_server": """
        BaseResourcesServerConfig BaseRunRequest BaseSeedSessionRequest BaseSeedSessionResponse BaseVerifyRequest
        BaseVerifyResponse SimpleResourcesServer
    """,
    "nemo_gym.base_responses_api_agent": "BaseResponsesAPIAgentConfig Body SimpleResponsesAPIAgent",
    "nemo_gym.base_responses_api_model": "BaseResponsesAPIModelConfig Body SimpleResponsesAPIModel",
    "nemo_gym.rollout_reverification": """
        JUDGE_FAILED_FAILURE_CLASS RolloutReverificationConfig RolloutReverificationHelper
    """,
    "nemo_gym.rollout_collection": """
        E2ERolloutCollectionConfig NG_FAILURE_CLASS_KEY NG_NO_PERSIST_KEY NG_TERMINAL_KEY RolloutAggregationConfig
        RolloutAggregationHelper RolloutCollectionConfig RolloutCollectionHelper SharedRolloutCollectionConfig
        _DEFAULT_MAX_ROLLOUT_ATTEMPTS _expand_input_glob _failures_path_for _get_max_rollout_attempts
        _rollout_request_debug_summary aggregate_rollouts collect_rollouts
        is_global_aiohttp_client_request_debug_enabled raise_for_status
    """,
    "nemo_gym.reward_profile": """
        AggregateMetrics AggregateMetricsMixin AggregateMetricsRequest RewardProfiler add_avg_sample_std_dev
        compute_aggregate_metrics compute_pass_majority_metrics compute_subset_metrics highest_k_metrics
    """,
    "nemo_gym.prompt": """
        PromptConfig MaterializePromptsConfig _resolve_path apply_prompt_to_row fill_prompt load_prompt_config
        materialize_prompts validate_prompt_compatibility
    """,
    "nemo_gym.benchmarks": """
        BENCHMARKS_DIR BenchmarkConfig ListBenchmarksConfig PrepareBenchmarkConfig config_name find_benchmark_configs
        list_benchmarks prepare_benchmarks search_benchmarks
    """,
    "nemo_gym.train_data_utils": """
        AvgMinMax DatasetMetrics MetricsConflictError MissingDatasetError OffendingRowsError StringMetrics
        TrainDataProcessor TrainDataProcessorConfig validate_backend_credentials
    """,
    "nemo_gym.server_status": "StatusCommand",
    "nemo_gym.responses_converter": "ResponsesConverter split_responses_input_output_items",
    "nemo_gym.rl": """
        AsyncNemoGymRolloutImpl AsyncRolloutImpl Completion DatumSpec EnvironmentInterface EnvironmentReturn
        GenerationConfig GenerationInterface NemoGym NemoGymConfig PromptGroupRecord RolloutManager Timer
        export_rollouts group_advantages has_signal prompt_groups with_signal
    """,
    "nemo_gym.rl.rollout_manager": """
        AsyncNemoGymRolloutImpl AsyncRolloutImpl RolloutManager RolloutRetryPolicy RolloutStats RolloutTimeouts
        TokenizerType
    """,
    "nemo_gym.rl.interfaces": """
        Completion DatumSpec EnvironmentInterface EnvironmentReturn GenerationConfig GenerationInterface
        PromptGroupRecord Timer
    """,
    "nemo_gym.rl.environment": "NemoGym NemoGymConfig",
    "nemo_gym.rl.failures": """
        FailureClass GenerationUnavailable GymTransportError RolloutDataFailure RolloutFailure RolloutInfraFailure
        RolloutTimeout classify_rollout_failure
    """,
    "responses_api_models.vllm_model.app": "VLLMConverter VLLMModel VLLMModelConfig",
}


@pytest.mark.parametrize("module", CONTRACT)
def test_public_names_stay_importable(module: str) -> None:
    loaded = importlib.import_module(module)

    missing = [name for name in CONTRACT[module].split() if not hasattr(loaded, name)]

    assert missing == [], f"{module} no longer offers {missing}; programs outside import them"


def test_the_package_offers_what_it_lists_and_nothing_else() -> None:
    assert [name for name in nemo_gym.__all__ if not hasattr(nemo_gym, name)] == []
    assert not hasattr(nemo_gym, "no_such_name")


def test_parsers_keep_the_methods_that_others_call_and_replace() -> None:
    from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig

    methods = ["parse", "parse_no_environment", "filter_for_server_instance_configs", "_recursively_hide_secrets"]
    known = {"dotenv_path", "initial_global_config_dict", "skip_load_from_cli", "skip_load_from_dotenv", "offline"}

    assert all(callable(getattr(GlobalConfigDictParser, method)) for method in methods)
    assert {*known, "hide_secrets"} <= set(GlobalConfigDictParserConfig.model_fields)
    assert "policy_model" in GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT


def test_rollout_managers_keep_the_arguments_and_methods_that_trainers_use() -> None:
    from nemo_gym.rl.interfaces import Completion, PromptGroupRecord
    from nemo_gym.rl.rollout_manager import AsyncNemoGymRolloutImpl, AsyncRolloutImpl, RolloutManager

    asked = "tokenizer task_to_env num_generations_per_prompt max_seq_len max_rollout_turns policy_generation"
    others = "generation_config use_nemo_gym tq_buffer timeouts retry_policy reward_weights min_group_size"
    others += " mask_interrupted mask_env_flagged_samples"
    of_native = "run_rollout _run_single_rollout _generate_response _aggregate_rollout_metrics"
    of_gym = "run_rollout _validate_init_params _build_inputs _run_rollouts _result_to_completion"

    assert list(inspect.signature(RolloutManager).parameters) == f"{asked} {others}".split()
    assert all(callable(getattr(AsyncRolloutImpl, name)) for name in of_native.split())
    assert all(
        callable(getattr(AsyncNemoGymRolloutImpl, name)) for name in f"{of_gym} _compute_rollout_metrics".split()
    )
    assert [field.name for field in fields(Completion)][:4] == ["message_log", "env_extras", "truncated", "reward"]
    assert Completion([], None, False, 0.0).truncation_reason is None  # what was added need not be given
    assert [field.name for field in fields(PromptGroupRecord)] == (
        ["prompt_idx", "prompt", "extra_env_info", "metadata", "completions", "rollout_metrics"]
    )
