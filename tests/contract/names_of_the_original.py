# ruff: noqa: E501
"""Names of the original that programs import, with the parameters they pass, by module.

Facts about an interface: `Class.field`, `Class.method(parameters)`, `function(parameters)`, `CONSTANT=value`. `x=` is a
parameter that may be left out.
"""

MAY_2026 = {
    "nemo_gym.cli": """
        RunConfig
        RunConfig.entrypoint
        TestConfig
        TestConfig.should_validate_data
        TestConfig.model_post_init(context)
        TestConfig.dir_path()
        RunHelper
        RunHelper.wait_for_dry_run_spinup()
        RunHelper.wait_for_spinup()
        RunHelper.check_http_server_statuses(successful_servers)
        run(global_config_dict_parser_config=)
        e2e_rollout_collection()
        test()
        TestAllConfig
        TestAllConfig.fail_on_total_and_test_mismatch
        TestAllConfig.delete_venvs_after_each_test
        test_all()
        dev_test()
        init_resources_server()
        dump_config()
        display_help()
        status()
        PipListConfig
        PipListConfig.format
        PipListConfig.outdated
        pip_list()
        VersionConfig
        VersionConfig.json_format
        version()
        reinstall()
    """,
    "nemo_gym.cli_setup_command": """
        setup_env_command(dir_path, global_config_dict, prefix)
        run_command(command, working_dir_path, server_name=)
    """,
    "nemo_gym.server_metadata": """
        ServerMetadata
        ServerMetadata.domain
        ServerMetadata.description
        ServerMetadata.verified
        ServerMetadata.verified_url
        ServerMetadata.value
        ServerMetadata.to_dict()
        visit_resources_server(data, level=)
        visit_agent_server(data, level=)
    """,
    "nemo_gym.config_types": """
        BaseNeMoGymCLIConfig
        BaseNeMoGymCLIConfig.pre_process(data)
        ServerRefTypeAdapter
        UploadJsonlDatasetHuggingFaceConfig
        UploadJsonlDatasetHuggingFaceConfig.forbidden_fields
        UploadJsonlDatasetHuggingFaceConfig.check_forbidden_fields(data)
        DownloadJsonlDatasetHuggingFaceConfig
        DownloadJsonlDatasetHuggingFaceConfig.check_output_path()
        DatasetConfig
        DatasetConfig.check_train_validation_sets()
        BaseServerTypeConfig
        BaseServerTypeConfig.SERVER_TYPE
        ServerTypeConfig
        BaseServerInstanceConfig
        BaseServerInstanceConfig.name
        BaseServerInstanceConfig.server_type_config_dict
        BaseServerInstanceConfig.validate_domain_for_resources_server()
        BaseServerInstanceConfig.get_server_ref()
        BaseServerInstanceConfig.get_inner_run_server_config_dict()
        BaseServerInstanceConfig.get_inner_run_server_config()
        BaseServerInstanceConfig.datasets()
        ServerInstanceConfigTypeAdapter
    """,
    "nemo_gym.train_data_utils": """
        TrainDataProcessorConfig
        TrainDataProcessorConfig.in_scope_dataset_types()
        Accumulator
        Accumulator.is_aggregated
        Accumulator.add(other)
        Accumulator.aggregate()
        AvgMinMax
        AvgMinMax.stddev
        AvgMinMax.mean
        AvgMinMax.M2
        StringMetrics
        StringMetrics.unique_count
        StringMetrics.total_count
        aggregate_other_metrics(metrics, sample)
        postprocess_other_metrics(metrics, other_metrics)
        compute_sample_metrics(sample_dict_str)
        DatasetValidatorState
        DatasetValidatorState.metrics
        DatasetValidatorState.key_counts
        DatasetValidatorState.offending_example_idxs
        DatasetValidatorState.other_metrics
        prepare_data()
    """,
    "nemo_gym.server_utils": """
        MAX_NUM_TRIES=3
        DISCONNECTED_CLIENT_OS_PRINT_INTERVAL=100
        DISCONNECTED_CLIENT_OS_HELP_TEXT
        DEFAULT_HEAD_SERVER_PORT=11000
        ProfilingMiddlewareInputConfig
        ProfilingMiddlewareInputConfig.profiling_results_dirpath
        ProfilingMiddlewareConfig
        ProfilingMiddlewareConfig.profiling_enabled
        UvicornLoggingConfig
        UvicornLoggingConfig.uvicorn_logging_show_200_ok
        maybe_ray_cluster_exit()
        IS_NEMO_GYM_FASTAPI_WORKER_KEY_NAME='IS_NEMO_GYM_FASTAPI_WORKER'
        IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME='IS_NEMO_GYM_FASTAPI_ENTRYPOINT'
        NEMO_GYM_FASTAPI_NUM_WORKERS='NEMO_GYM_FASTAPI_NUM_WORKERS'
        is_nemo_gym_fastapi_worker()
        set_is_nemo_gym_fastapi_worker()
        set_is_nemo_gym_fastapi_entrypoint(file)
        get_nemo_gym_fastapi_num_workers()
        set_nemo_gym_fastapi_num_workers(num_workers)
        SimpleServer
        SimpleServer.setup_profiling(app, profiling_config)
        SimpleServer.set_ulimit(target_soft_limit=)
        SimpleServer.prefix_server_logs()
    """,
    "nemo_gym": """
        OLD_PRINT
        print_always_flushes(*args, **kwargs)
    """,
    "nemo_gym.global_config": """
        USE_ABSOLUTE_IP='use_absolute_ip'
        INHERIT_FROM_KEY_NAME='_inherit_from'
        COPY_KEY_NAME='_copy'
        DELETE_KEY_KEY_NAME='_delete_key'
        GlobalConfigDictParser
        GlobalConfigDictParser.parse_global_config_dict_from_cli()
        GlobalConfigDictParser.load_extra_config_paths(config_paths)
        GlobalConfigDictParser.validate_and_populate_defaults(server_instance_configs, default_host, port_range_low, port_range_high, initial_disallowed_ports=, skip_verification=, skip_verification_reward=, probe_ports=)
        GlobalConfigDictParser.detect_and_report_almost_servers(global_config_dict)
        format_almost_server_warning(server_name, error)
    """,
    "nemo_gym.reward_profile": """
        RewardProfiler
        RewardProfiler.rollout_info_from_result(result)
        RewardProfiler.histogram(data)
        RewardProfiler.describe_dataframe(df)
        RewardProfiler.calculate_metrics_single_df(grouped_df)
        reward_profile()
    """,
    "nemo_gym.profiling": """
        Profiler
        Profiler.name
        Profiler.base_profile_dir
        Profiler.required_str
        Profiler.model_post_init(context)
        Profiler.start()
        Profiler.stop()
        Profiler.dump()
    """,
    "nemo_gym.dataset_orchestrator": """
        delete_jsonl_dataset_from_gitlab(gitlab_model_name)
        upload_jsonl_dataset_to_hf_maybe_delete(config, delete_from_gitlab=)
        upload_jsonl_dataset_to_hf_cli()
        upload_jsonl_dataset_to_hf_and_delete_gitlab_cli()
        download_jsonl_dataset_from_hf_cli()
        delete_jsonl_dataset_from_gitlab_cli()
    """,
    "nemo_gym.prompt": """
        materialize_prompts_cli()
    """,
    "nemo_gym.openai_utils": """
        NeMoGymContent
    """,
    "nemo_gym.hf_utils": """
        create_huggingface_client(token)
        check_jsonl_format(file_path)
        download_hf_dataset_as_jsonl(config)
        upload_jsonl_dataset(config)
    """,
    "nemo_gym.benchmarks": """
        prepare_benchmark()
    """,
}

AUGUST_2026 = {
    "nemo_gym.exporters": """
        EXPORTER_REGISTRY
        get_exporters()
        setup_exporters(global_config_dict)
        teardown_exporters()
        export_metrics(metrics, step=)
        export_rollouts(rollouts)
    """,
    "nemo_gym.exporters.base": """
        BaseExporter
        BaseExporter.setup()
        BaseExporter.teardown()
        BaseExporter.export_config()
        BaseExporter.export_metrics(metrics, step=)
        BaseExporter.export_rollouts(rollouts)
    """,
    "nemo_gym.exporters.mlflow": """
        MLflowExporter
        MLflowExporter.name='mlflow'
    """,
    "nemo_gym.exporters.wandb": """
        WandbExporter
        WandbExporter.name='wandb'
    """,
    "nemo_gym": """
        NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME='NEMO_GYM_EXTRA_ROOTS'
        component_search_roots(*, sys_path=)
        OLD_PRINT
        print_always_flushes(*args, **kwargs)
    """,
    "nemo_gym.base_resources_server": """
        NEMO_GYM_MCP_SESSION_TOKEN_HEADER='X-NeMo-Gym-Session-Token'
        NEMO_GYM_MCP_METADATA_KEY='mcp'
        normalize_tool_name(name, server_name=)
        RESERVED_MCP_TOOL_NAMES
        BaseResourcesServerConfig
        BaseResourcesServerConfig.expose_tools_over_mcp
        BaseResourcesServerConfig.REVERIFY_MODE
        MCPServerMetadata
        MCPServerMetadata.server_name
        MCPServerMetadata.url_path
        MCPServerMetadata.transport
        MCPServerMetadata.headers
        SimpleResourcesServer
        SimpleResourcesServer.normalize_tool_name(name)
        SimpleResourcesServer.mcp_tools(harvested, catchall)
        SimpleResourcesServer.mcp_allowed_tools_for_session(seed_body)
        SimpleResourcesServer.get_reverify_mode()
    """,
    "nemo_gym.base_responses_api_agent": """
        BaseResponsesAPIAgentConfig
        BaseResponsesAPIAgentConfig.token_id_capture
        SimpleResponsesAPIAgent
        SimpleResponsesAPIAgent.rollout_id_from_run(body)
        SimpleResponsesAPIAgent.url_path_for_run(url_path, body)
        SimpleResponsesAPIAgent.base_url_for_run(base_url, body)
        SimpleResponsesAPIAgent.url_path_for_request(url_path, request)
        SimpleResponsesAPIAgent.resolve_model_base_url(model_server_name, rollout_id=)
    """,
    "nemo_gym.base_responses_api_model": """
        SimpleResponsesAPIModel
        SimpleResponsesAPIModel.responses_dispatch(request, body=)
        SimpleResponsesAPIModel.chat_completions_dispatch(request, body=)
        SimpleResponsesAPIModel.messages(request, body=)
        ModelCallCaptureConfig
        ModelCallCaptureConfig.observability_enabled
        ModelCallCaptureConfig.model_call_capture_dir
        ModelCallCaptureConfig.validate_capture_dir()
        CaptureStore
        CaptureStore.root()
        CaptureStore.path_for(rollout_id)
        CaptureStore.incomplete_path_for(rollout_id)
        CaptureStore.mark_incomplete(rollout_id)
        CaptureStore.is_incomplete(rollout_id)
        CaptureStore.record(rollout_id, exchange)
        CaptureStore.read(rollout_id)
        CaptureStore.read_available(rollout_id)
        extract_token_stats(usage)
        ModelCallRecord
        ModelCallRecord.model_call_id
        ModelCallRecord.response_id
        ModelCallRecord.call_index
        ModelCallRecord.model_ref
        ModelCallRecord.model
        ModelCallRecord.dialect
        ModelCallRecord.status_code
        ModelCallRecord.response_status
        ModelCallRecord.finish_reason
        ModelCallRecord.started_at
        ModelCallRecord.completed_at
        ModelCallRecord.tokens_in
        ModelCallRecord.tokens_out
        ModelCallRecord.tokens_reasoning
        ModelCallRecord.tokens_total
        ModelCallRecord.request
        ModelCallRecord.response
        ModelCallRecord.request_raw
        ModelCallRecord.response_raw
        ModelCallRecord.tool_calls
        ModelCallRecord.reasoning_content
        ModelCallRecord.cache_hit
        ModelCallRecord.cached_tokens
        ModelCallRecord.cache_creation_tokens
        ModelCallRecord.error_category
        ModelCallRecord.latency_total_ms
        ModelCallRecord.latency_ttft_ms
        build_model_call_record(exchange, *, call_index)
        read_model_call_records(store, rollout_id)
        read_available_model_call_records(store, rollout_id)
        aggregate_model_call_records(calls)
        aggregate_model_call_metrics(store, rollout_id)
        make_capture_store(config)
        install_model_call_capture(app, config, *, model_server_name=, global_config_dict=)
        model_call_capture_dirs_from_config(global_config_dict)
        clear_model_call_captures_for_rollouts(records, capture_dirs)
        merge_model_call_capture_into_record(record, capture_dirs, *, include_payloads=)
    """,
    "nemo_gym.server_utils": """
        MAX_NUM_TRIES=3
        DISCONNECTED_CLIENT_OS_PRINT_INTERVAL=100
        DISCONNECTED_CLIENT_OS_HELP_TEXT
        DEFAULT_HEAD_SERVER_PORT=11000
        BaseServer
        ProfilingMiddlewareInputConfig
        ProfilingMiddlewareInputConfig.profiling_results_dirpath
        ProfilingMiddlewareConfig
        ProfilingMiddlewareConfig.profiling_enabled
        UvicornLoggingConfig
        UvicornLoggingConfig.uvicorn_logging_show_200_ok
        maybe_ray_cluster_exit()
        IS_NEMO_GYM_FASTAPI_WORKER_KEY_NAME='IS_NEMO_GYM_FASTAPI_WORKER'
        IS_NEMO_GYM_FASTAPI_ENTRYPOINT_KEY_NAME='IS_NEMO_GYM_FASTAPI_ENTRYPOINT'
        NEMO_GYM_FASTAPI_NUM_WORKERS='NEMO_GYM_FASTAPI_NUM_WORKERS'
        is_nemo_gym_fastapi_worker()
        set_is_nemo_gym_fastapi_worker()
        set_is_nemo_gym_fastapi_entrypoint(file)
        get_nemo_gym_fastapi_num_workers()
        set_nemo_gym_fastapi_num_workers(num_workers)
        SimpleServer
        SimpleServer.setup_profiling(app, profiling_config)
        SimpleServer.set_ulimit(target_soft_limit=)
        SimpleServer.prefix_server_logs()
        rollout_path_prefix(rollout_id, *, token_capture=)
        apply_rollout_prefix(base_url, rollout_id, *, token_capture=)
    """,
    "nemo_gym.openai_utils": """
        RoutedExperts
        REQUIRED_TOKEN_METADATA_FIELDS
        TOKEN_METADATA_FIELDS
        NeMoGymContent
        NeMoGymInputVideoPart
        NeMoGymInputVideoPart.type
        NeMoGymInputVideoPart.video_url
        NeMoGymInputVideoPart.video
        NeMoGymResponseInputContentPart
        NeMoGymResponseInputContentList
        NeMoGymResponseMcpCall
        NeMoGymResponseMcpCall.type
        NeMoGymResponseMcpCall.id
        NeMoGymResponseMcpCall.server_label
        NeMoGymResponseMcpCall.status
        NeMoGymResponseMcpListTools
        NeMoGymResponseMcpListTools.type
        NeMoGymResponseMcpListTools.tools
        NeMoGymResponseMcpListTools.id
        NeMoGymResponseMcpListTools.server_label
        NeMoGymResponseMcpApprovalRequest
        NeMoGymResponseMcpApprovalRequest.type
        NeMoGymResponseMcpApprovalRequest.id
        NeMoGymResponseMcpApprovalRequest.server_label
        NeMoGymResponseFileSearchToolCall
        NeMoGymResponseFunctionWebSearch
        NeMoGymResponseComputerToolCall
        NeMoGymImageGenerationCall
        NeMoGymResponseCodeInterpreterToolCall
        NeMoGymLocalShellCall
        NeMoGymResponseCustomToolCall
        NeMoGymComputerCallOutput
        NeMoGymResponseCustomToolCallOutput
        NeMoGymLocalShellCallOutput
        NeMoGymMcpApprovalResponse
        NeMoGymChatCompletionOutputMessage
        NeMoGymChatCompletionContentPartVideoUrlParam
        NeMoGymChatCompletionContentPartVideoUrlParam.video_url
        NeMoGymChatCompletionContentPartVideoUrlParam.type
    """,
    "nemo_gym.config_types": """
        DEPRECATED_UPLOAD_ROLLOUTS_KEY='upload_rollouts_to_wandb'
        UploadRolloutsConfigMixin
        UploadRolloutsConfigMixin.upload_rollouts
        UploadRolloutsConfigMixin.map_deprecated_upload_rollouts(data)
        ExporterConfig
        ExporterConfig.is_available
        MLFlowConfig
        MLFlowConfig.mlflow_tracking_uri
        MLFlowConfig.mlflow_tracking_token
        MLFlowConfig.mlflow_experiment_name
        MLFlowConfig.mlflow_run_name
        MLFlowConfig.is_available
        BaseNeMoGymCLIConfig
        BaseNeMoGymCLIConfig.pre_process(data)
        ServerRefTypeAdapter
        UploadJsonlDatasetHuggingFaceConfig
        UploadJsonlDatasetHuggingFaceConfig.forbidden_fields
        UploadJsonlDatasetHuggingFaceConfig.check_forbidden_fields(data)
        DownloadJsonlDatasetHuggingFaceConfig
        DownloadJsonlDatasetHuggingFaceConfig.check_output_path()
        GitlabDatasetSource
        GitlabDatasetSource.type
        GitlabDatasetSource.dataset_name
        GitlabDatasetSource.version
        GitlabDatasetSource.artifact_fpath
        HuggingFaceDatasetSource
        HuggingFaceDatasetSource.type
        HuggingFaceDatasetSource.repo_id
        HuggingFaceDatasetSource.artifact_fpath
        DatasetSource
        DatasetConfig
        DatasetConfig.check_train_validation_sets()
        DatasetConfig.normalize_dataset_source()
        BaseServerTypeConfig
        BaseServerTypeConfig.SERVER_TYPE
        ServerTypeConfig
        BaseServerInstanceConfig
        BaseServerInstanceConfig.name
        BaseServerInstanceConfig.server_type_config_dict
        BaseServerInstanceConfig.validate_domain_for_resources_server()
        BaseServerInstanceConfig.get_server_ref()
        BaseServerInstanceConfig.get_inner_run_server_config_dict()
        BaseServerInstanceConfig.get_inner_run_server_config()
        BaseServerInstanceConfig.datasets()
        ServerInstanceConfigTypeAdapter
        ROLLOUT_PATH_PREFIX='ng-rollout'
        TOKEN_CAPTURE_PATH_SEGMENT='training-token-capture'
    """,
    "nemo_gym.global_config": """
        USE_ABSOLUTE_IP='use_absolute_ip'
        UVICORN_TIMEOUT_WORKER_HEALTHCHECK='uvicorn_timeout_worker_healthcheck'
        MODEL_ENDPOINT_READINESS_TIMEOUT_KEY_NAME='model_endpoint_readiness_timeout_seconds'
        ALLOW_OPENAI_VERSION_SKEW_KEY_NAME='allow_openai_version_skew'
        RESULTS_DIR_KEY_NAME='results_dir'
        CACHE_DIR_KEY_NAME='cache_dir'
        INHERIT_FROM_KEY_NAME='_inherit_from'
        COPY_KEY_NAME='_copy'
        DELETE_KEY_KEY_NAME='_delete_key'
        VERBOSE_KEY_NAME='verbose'
        JSON_OUTPUT_KEY_NAME='json'
        QUERY_KEY_NAME='query'
        OBSERVABILITY_ENABLED_KEY_NAME='observability_enabled'
        MODEL_CALL_CAPTURE_DIR_KEY_NAME='model_call_capture_dir'
        TOKEN_ID_CAPTURE_BLOCK='token_id_capture'
        COMPONENT_NAME_KEY_NAME='component_name'
        GlobalConfigDictParser
        GlobalConfigDictParser.raise_on_no_server_instances(global_config_dict)
        GlobalConfigDictParser.collect_missing_value_paths(config)
        GlobalConfigDictParser.raise_on_missing_values(global_config_dict)
        GlobalConfigDictParser.parse_global_config_dict_from_cli()
        GlobalConfigDictParser.load_extra_config_paths(config_paths)
        GlobalConfigDictParser.detect_and_report_almost_servers(global_config_dict)
        format_almost_server_warning(server_name, error)
    """,
    "nemo_gym.judge": """
        ResponseT
    """,
    "nemo_gym.rollout_reverification": """
        JUDGE_FAILED_FAILURE_CLASS='judge_failed'
        RolloutReverificationConfig
        RolloutReverificationConfig.materialized_inputs_jsonl_fpath
        RolloutReverificationConfig.rollouts_jsonl_fpath
        RolloutReverificationConfig.output_jsonl_fpath
        RolloutReverificationConfig.force
        RolloutReverificationConfig.disable_aggregation
        RolloutReverificationConfig.num_samples_in_parallel
        RolloutReverificationConfig.limit
        RolloutReverificationConfig.overwrite
        RolloutReverificationConfig.resume_from_cache
        RolloutReverificationConfig.judge_failed_only
        RolloutReverificationConfig.append
        RolloutReverificationConfig.upload_rollouts
        InputRolloutPair(input, rollout)
        OutputPaths(output, failures)
        CacheKeysByStatus(successful_keys, terminal_keys, maxed_out_keys)
        summarize_cache_usage(cache, all_payloads, filtered_payloads)
        RolloutReverificationHelper
        RolloutReverificationHelper.run_from_config(config)
    """,
    "nemo_gym.rollout_collection": """
        NG_TRAJECTORY_KEY='ng_trajectory'
        SharedRolloutCollectionConfig.rollout_collection_driver
        RolloutCollectionConfig.skills
        loads_jsonl_line(raw, fpath, line_no)
        SharedRolloutCollectionConfig
        RolloutCollectionConfig
    """,
    "nemo_gym.rollout_observability": """
        ObservationModel
        ModelCallRef
        ModelCallRef.model_call_id
        ModelCallRef.model_ref
        ModelCallRef.response_id
        ModelCallRef.validate_join_key()
        TrajectoryTokenStats
        TrajectoryTokenStats.prompt_tokens
        TrajectoryTokenStats.completion_tokens
        TrajectoryTokenStats.reasoning_tokens
        TrajectoryTokenStats.total_tokens
        TrajectoryTokenStats.cached_tokens
        TrajectoryResponseMetadata
        TrajectoryResponseMetadata.response_id
        TrajectoryResponseMetadata.model_ref
        TrajectoryResponseMetadata.model
        TrajectoryResponseMetadata.dialect
        TrajectoryResponseMetadata.status_code
        TrajectoryResponseMetadata.response_status
        TrajectoryResponseMetadata.finish_reason
        TrajectoryResponseMetadata.error_category
        TrajectoryResponseMetadata.latency_ttft_ms
        TrajectoryModelCall
        TrajectoryModelCall.model_call_id
        TrajectoryModelCall.started_at
        TrajectoryModelCall.completed_at
        TrajectoryModelCall.duration_ms
        TrajectoryModelCall.request
        TrajectoryModelCall.response
        TrajectoryModelCall.response_metadata
        TrajectoryModelCall.token_stats
        TrajectoryTurn
        TrajectoryTurn.invocation_id
        TrajectoryTurn.task_id
        TrajectoryTurn.rollout_id
        TrajectoryTurn.turn_no
        TrajectoryTurn.timestamp
        TrajectoryTurn.question
        TrajectoryTurn.answer
        TrajectoryTurn.reasoning_content
        TrajectoryTurn.resolved
        TrajectoryTurn.step_count
        TrajectoryTurn.model_calls
        AgentInvocation
        AgentInvocation.kind
        AgentInvocation.invocation_id
        AgentInvocation.parent_invocation_id
        AgentInvocation.spawned_by_tool_call_id
        AgentInvocation.status
        AgentInvocation.duration_ms
        AgentInvocation.error_type
        AgentInvocation.model_calls
        AgentInvocation.conversation
        ToolCallObservation
        ToolCallObservation.kind
        ToolCallObservation.invocation_id
        ToolCallObservation.tool_call_id
        ToolCallObservation.sandbox_id
        ToolCallObservation.tool_name
        ToolCallObservation.started_at
        ToolCallObservation.completed_at
        ToolCallObservation.duration_ms
        ToolCallObservation.timing_source
        ToolCallObservation.status
        ToolCallObservation.error_type
        ToolCallObservation.validate_timing()
        TrajectoryToolCall
        TrajectoryToolCall.output
        SandboxObservation
        SandboxObservation.kind
        SandboxObservation.role
        SandboxObservation.provider
        SandboxObservation.sandbox_id
        SandboxObservation.outcome
        SandboxObservation.exit_code
        SandboxObservation.wall_time_s
        SandboxObservation.cpu_time_s
        SandboxObservation.peak_memory_mib
        SandboxObservation.resource_usage_source
        SandboxObservation.error_type
        ContextCompactionObservation
        ContextCompactionObservation.kind
        ContextCompactionObservation.invocation_id
        ContextCompactionObservation.observed_at
        ContextCompactionObservation.trigger
        ContextCompactionObservation.tokens_before
        ContextCompactionObservation.tokens_after
        ContextCompactionObservation.outcome
        ContextCompactionObservation.summary
        ContextCompactionObservation.first_kept_item_id
        ContextCompactionObservation.before_model_call
        ContextCompactionObservation.model_calls
        ContextCompactionObservation.after_model_call
        ObservationGap
        ObservationGap.code
        ObservationGap.invocation_id
        ObservationGap.detail
        AgentObservationRecord
        AgentObservationBundle
        AgentObservationBundle.source
        AgentObservationBundle.records
        AgentObservationBundle.gaps
        AgentObservationBundle.validate_identity()
        TrajectoryRecord
        TrajectoryRecord.schema_version
        TrajectoryRecord.task_id
        TrajectoryRecord.rollout_id
        TrajectoryRecord.invocations
        TrajectoryRecord.turns
        TrajectoryRecord.model_calls
        TrajectoryRecord.tool_calls
        TrajectoryRecord.gaps
        TrajectoryRecord.validate_identity()
        join_model_call_observations(bundle, calls)
        AgentEpisode
        AgentEpisode.response
        AgentEpisode.observations
    """,
    "nemo_gym.rollout_correlation": """
        ROLLOUT_ID_PATTERN
        maybe_rollout_id_from_run_body(body)
        current_rollout_id()
        rollout_context(rollout_id)
        RolloutContextMiddleware
    """,
    "nemo_gym.responses_converter": """
        ResponsesConverterState
        ResponsesConverterState.return_token_id_information
        ResponsesConverterState.messages
        ResponsesConverterState.content_buffer
        ResponsesConverterState.tool_calls_buffer
        ResponsesConverterState.assistant_item_buffered
        ResponsesConverterState.token_information
        ResponsesConverterState.flush_assistant()
        ResponsesConverter
        ResponsesConverter.THINK_TAG_PATTERN
        ResponsesConverter.chat_completion_to_responses_create_params(chat_completion_create_params)
        VLLMConverter
        VLLMConverterResponsesToChatCompletionsState
    """,
    "nemo_gym.mcp_auto_exposure": """
        TOKEN_HEADER='X-NeMo-Gym-Session-Token'
        MCP_URL_PATH='/mcp'
        PERMISSIVE_SCHEMA={'type': 'object', 'additionalProperties': True}
        DirectBinding(endpoint, path, request_params=, body_param=, body_model=, path_param=, return_model=, body_is_dict=, is_coroutine=)
        BindResult(binding, reasons, body_model)
        bind_route(route)
        DirectDispatchError(status, detail)
        call_direct(app, binding, session_id, arguments, path_value=)
        MCPTool(name, tool, binding=, path_value=, path=, reasons=)
        harvest_tools(app, server)
        maybe_auto_expose(server, app)
        install_auto_exposure(server, app)
    """,
    "nemo_gym.path_utils": """
        failures_path_for(output_fpath)
    """,
    "nemo_gym.profiling": """
        Profiler
        Profiler.name
        Profiler.base_profile_dir
        Profiler.required_str
        Profiler.model_post_init(context)
        Profiler.start()
        Profiler.stop()
        Profiler.dump()
    """,
    "nemo_gym.skills": """
        SKILL_MD_FILENAME='SKILL.md'
        SkillMetadata
        SkillMetadata.name
        SkillMetadata.description
        SkillMetadata.version
        SkillsRef
        SkillsRef.path
        SkillsRef.hash
        SkillsRef.skills
        SkillsConfig
        SkillsConfig.path
        hash_skill_dir(root)
        parse_skill_md(skill_md_path)
        load_skill_directory(path)
        stage_skills(path, dest_skills_dir)
    """,
    "nemo_gym.secret_utils": """
        recursively_hide_secrets(dict_config)
    """,
    "nemo_gym.train_data_utils": """
        TrainDataProcessorConfig
        TrainDataProcessorConfig.in_scope_dataset_types()
        Accumulator
        Accumulator.is_aggregated
        Accumulator.add(other)
        Accumulator.aggregate()
        AvgMinMax
        AvgMinMax.stddev
        AvgMinMax.mean
        AvgMinMax.M2
        StringMetrics
        StringMetrics.unique_count
        StringMetrics.total_count
        aggregate_other_metrics(metrics, sample)
        postprocess_other_metrics(metrics, other_metrics)
        compute_sample_metrics(sample_dict_str)
        DatasetValidatorState
        DatasetValidatorState.metrics
        DatasetValidatorState.key_counts
        DatasetValidatorState.offending_example_idxs
        DatasetValidatorState.other_metrics
    """,
    "nemo_gym.benchmarks": """
        BENCHMARKS_SUBDIR='benchmarks'
        discover_benchmarks()
    """,
    "nemo_gym.reward_profile": """
        RewardProfiler
        RewardProfiler.rollout_info_from_result(result)
        RewardProfiler.histogram(data)
        RewardProfiler.describe_dataframe(df)
        RewardProfiler.calculate_metrics_single_df(grouped_df)
    """,
    "nemo_gym.dataset_orchestrator": """
        delete_jsonl_dataset_from_gitlab(gitlab_model_name)
        upload_jsonl_dataset_to_hf_maybe_delete(config, delete_from_gitlab=)
    """,
    "nemo_gym.hf_utils": """
        create_huggingface_client(token)
        check_jsonl_format(file_path)
        download_hf_dataset_as_jsonl(config)
        upload_jsonl_dataset(config)
    """,
    "nemo_gym.server_metadata": """
        ServerMetadata
        ServerMetadata.domain
        ServerMetadata.description
        ServerMetadata.verified
        ServerMetadata.verified_url
        ServerMetadata.value
        ServerMetadata.to_dict()
        visit_resources_server(data, level=)
        visit_agent_server(data, level=)
    """,
    "nemo_gym.decorators": """
        experimental(fn)
    """,
    "nemo_gym.token_id_capture.records": """
        TOKEN_FIELDS
        TOKEN_ENTRY_RECORD_SCHEMA_VERSION=1
        TokenEntry
        TokenEntry.schema_version
        TokenEntry.rollout_id
        TokenEntry.model_call_id
        TokenEntry.model
        TokenEntry.prompt_token_ids
        TokenEntry.generation_token_ids
        TokenEntry.generation_log_probs
        TokenEntry.routed_experts
        TokenEntry.output_items
        TokenEntry.token_item_index
        TokenEntry.created_at
        response_to_output_items(payload)
        strip_token_fields(items)
        extract_token_fields(response_json)
    """,
    "nemo_gym.token_id_capture.config": """
        TOKEN_ID_CAPTURE_BLOCK='token_id_capture'
        TokenIdCaptureSettings
        TokenIdCaptureSettings.enabled
        TokenIdCaptureSettings.all_agents
        TokenIdCaptureSettings.dir
        TokenIdCaptureSettings.sink
        TokenIdCaptureSettings.sink_kwargs
        TokenIdCaptureSettings.rebuild_response
        TokenIdCaptureSettings.max_mask_fraction
        TokenIdCaptureSettings.mask_fraction_min_samples
        TokenIdCaptureConfig
        TokenIdCaptureConfig.token_id_capture
        TokenIdCaptureConfig.model_call_capture_dir
        TokenIdCaptureConfig.enabled
        TokenIdCaptureConfig.resolved_dir
        TokenIdCaptureConfig.build_sink()
        token_id_capture_config(global_config_dict)
        token_id_capture_enabled_for_agent(global_config_dict, agent_name)
    """,
    "nemo_gym.token_id_capture.protocols": """
        TokenCaptureSnapshot
        TokenSink
        TokenSink.put(entry)
        TokenSink.mark_incomplete(rollout_id, model_call_id=)
        TokenSink.close()
        TokenSource
        TokenSource.freeze(rollout_id)
        TokenSource.drop(rollout_id, snapshot_id, version)
        TokenSource.close()
        install_token_sink(sink)
        installed_token_sink()
        install_token_source(source)
        installed_token_source()
    """,
    "nemo_gym.token_id_capture.sink": """
        CaptureContext
        set_token_sink(context)
        current_capture_context()
        reset_token_sink(token)
        register_call_intent()
        capture_tokens(response)
        commit_entry(entry)
    """,
    "nemo_gym.token_id_capture.store": """
        validate_rollout_id(rollout_id)
        TokenCaptureStore
        TokenCaptureStore.root
        TokenCaptureStore.path_for(rollout_id)
        TokenCaptureStore.incomplete_path_for(rollout_id)
        TokenCaptureStore.intents_path_for(rollout_id)
        TokenCaptureStore.state_path_for(rollout_id)
        TokenCaptureStore.lock_path_for(rollout_id)
        TokenCaptureStore.mark_incomplete(rollout_id, model_call_id=)
        TokenCaptureStore.is_incomplete(rollout_id)
        TokenCaptureStore.append(entry)
        TokenCaptureStore.put(entry)
        TokenCaptureStore.begin_call(rollout_id, model_call_id)
        TokenCaptureStore.freeze(rollout_id)
        TokenCaptureStore.freeze_now(rollout_id)
        TokenCaptureStore.drop(rollout_id, snapshot_id, version)
        TokenCaptureStore.close()
        TokenCaptureStore.delete(rollout_id)
        TokenCaptureStore.sweep_retired(older_than_seconds)
        TokenCaptureStore.read_entries(rollout_id)
        make_token_store(global_config_dict)
    """,
    "nemo_gym.token_id_capture.builder": """
        ChainLink
        Chain
        Chain.validate()
        BuildNotes
        BuildOutput
        per_request(entries)
        prefix_merging(entries)
        run_builder(entries, builder=)
        project_chain_to_output_items(chain)
        project_main_chain_response(rollout_id, out, model=)
        assert_prefix_contiguity(response)
    """,
    "nemo_gym.token_id_capture.consumer": """
        token_id_capture_dirs_from_config(global_config_dict)
        clear_token_captures_for_rollouts(records, token_capture_dirs)
        trajectories_for_rollout(rollout_id, token_capture_dirs, builder=, model=)
        trajectories_from_source(rollout_id, source, builder=, model=)
    """,
    "nemo_gym.token_id_capture.delivery": """
        TOKEN_CAPTURE_KEY='_ng_token_capture'
        MASK_SAMPLE_KEY='mask_sample'
        rollout_carries_token_ids(result)
        finalize_rollout_token_capture(result, source)
        retire_rollout_token_capture(rollout_id, source, built)
        capture_build_can_retire(built)
    """,
    "nemo_gym.sandbox": """
        Sandbox
        AsyncSandbox
        SandboxSpec
        SandboxResources
        SandboxHandle
        SandboxExecResult
        ExecResult
        SandboxStatus
        SandboxEndpoint
        SandboxCreateError
        SandboxCreateVerificationError
        SandboxProvider
        SandboxPty
        SandboxPtyError
        SandboxPtySession
        SandboxPtySpec
        ConnectableProvider
        SupportsSandboxEndpoint
        SupportsSandboxPty
        SupportsSandboxPtyAttach
        create_provider
        get_provider_class
        list_providers
        register_provider
        resolve_provider_config
        resolve_provider_metadata
        rewrite_image
    """,
    "nemo_gym.sandbox.api": """
        SYNC_OPERATION_TIMEOUT_S=3600.0
        SANDBOX_PTY_RUNTIME_RETURN_CODE=125
        SYNC_LOOP_CLOSE_TIMEOUT_S=5.0
        SandboxPty
        SandboxPty.__init__(sandbox)
        SandboxPty.create(command=, cwd=, env=, rows=, cols=, user=, pty=)
        SandboxPty.attach(session_id, takeover=, since=)
        SandboxPty.exec(command, session=, cwd=, env=, timeout_s=, user=, rows=, cols=, pty=)
        AsyncSandbox
        AsyncSandbox.__init__(provider, spec=)
        AsyncSandbox.start(spec=)
        AsyncSandbox.exec(command, cwd=, env=, timeout_s=, user=)
        AsyncSandbox.upload(local_path, remote_path)
        AsyncSandbox.download(remote_path, local_path)
        AsyncSandbox.status()
        AsyncSandbox.endpoint(port)
        AsyncSandbox.stop()
        AsyncSandbox.serialize(scope=)
        AsyncSandbox.connect(descriptor, provider)
        Sandbox
        Sandbox.__init__(provider, spec=)
        Sandbox.start(spec=)
        Sandbox.exec(command, cwd=, env=, timeout_s=, user=)
        Sandbox.upload(local_path, remote_path)
        Sandbox.download(remote_path, local_path)
        Sandbox.status()
        Sandbox.endpoint(port)
        Sandbox.stop()
    """,
    "nemo_gym.sandbox.config": """
        SANDBOX_BLOCK_DEFAULT_METADATA_KEY='default_metadata'
        SANDBOX_BLOCK_RESERVED_KEYS
        resolve_provider_config(sandbox_provider, named_configs=)
        resolve_provider_metadata(sandbox_provider, named_configs=)
    """,
    "nemo_gym.sandbox.utils": """
        rewrite_image(image, rewrites)
    """,
    "nemo_gym.sandbox.providers.base": """
        SandboxStatus
        SandboxStatus.STARTING
        SandboxStatus.RUNNING
        SandboxStatus.STOPPED
        SandboxStatus.ERROR
        SandboxStatus.UNKNOWN
        SandboxEndpoint
        SandboxEndpoint.endpoint
        SandboxEndpoint.headers
        SandboxResources
        SandboxResources.cpu
        SandboxResources.memory_mib
        SandboxResources.disk_gib
        SandboxResources.gpu
        SandboxResources.gpu_type
        SandboxResources.from_mapping(resources)
        SandboxSpec
        SandboxSpec.image
        SandboxSpec.ttl_s
        SandboxSpec.ready_timeout_s
        SandboxSpec.workdir
        SandboxSpec.env
        SandboxSpec.files
        SandboxSpec.metadata
        SandboxSpec.resources
        SandboxSpec.entrypoint
        SandboxSpec.provider_options
        SandboxSpec.ports
        SandboxHandle
        SandboxHandle.sandbox_id
        SandboxHandle.provider_name
        SandboxHandle.raw
        SandboxExecResult
        SandboxExecResult.stdout
        SandboxExecResult.stderr
        SandboxExecResult.return_code
        SandboxExecResult.error_type
        ExecResult
        SandboxPtySpec
        SandboxPtySpec.command
        SandboxPtySpec.cwd
        SandboxPtySpec.env
        SandboxPtySpec.rows
        SandboxPtySpec.cols
        SandboxPtySpec.user
        SandboxPtySpec.pty
        SandboxPtyError
        SandboxCreateError
        SandboxCreateVerificationError
        SandboxProvider
        SandboxProvider.name
        SandboxProvider.create(spec)
        SandboxProvider.exec(handle, command, cwd=, env=, timeout_s=, user=)
        SandboxProvider.upload_file(handle, source_path, target_path)
        SandboxProvider.download_file(handle, source_path, target_path)
        SandboxProvider.status(handle)
        SandboxProvider.close(handle)
        SandboxProvider.aclose()
        SupportsSandboxEndpoint
        SupportsSandboxEndpoint.endpoint(handle, port)
        SandboxPtySession
        SandboxPtySession.session_id
        SandboxPtySession.mode
        SandboxPtySession.closed()
        SandboxPtySession.read(timeout_s=)
        SandboxPtySession.read_stderr(timeout_s=)
        SandboxPtySession.write(data)
        SandboxPtySession.resize(rows, cols)
        SandboxPtySession.send_signal(signal)
        SandboxPtySession.wait_exit(timeout_s=)
        SandboxPtySession.close()
        SupportsSandboxPty
        SupportsSandboxPty.create_pty(handle, spec)
        SupportsSandboxPtyAttach
        SupportsSandboxPtyAttach.attach_pty(handle, session_id, takeover=, since=)
        ConnectableProvider
        ConnectableProvider.serialize_handle(handle, scope=)
        ConnectableProvider.connect(descriptor)
    """,
    "nemo_gym.sandbox.providers.registry": """
        ProviderClass
        ProviderLoader
        ENTRY_POINT_GROUP='nemo_gym.sandbox_providers'
        register_provider(name, provider_class, override=)
        get_provider_class(name)
        create_provider(config)
        list_providers()
    """,
    "nemo_gym.responses_streaming": """
        NAMESPACE_TOOL_DELIMITER='__'
        NamespaceMap
        flatten_namespace_tools(tools)
        sanitize_streaming_responses_body(body)
        validate_streaming_responses_params(body)
        synthesize_responses_sse(response_json, ns_map=)
        synthesize_responses_failure_sse(message, *, code=)
    """,
    "nemo_gym.chat_streaming": """
        sanitize_streaming_chat_body(body)
        synthesize_chat_completion_sse(completion, include_usage=)
    """,
    "nemo_gym.anthropic_converter": """
        SUPPORTED_ANTHROPIC_IMAGE_MEDIA_TYPES
        AnthropicConverter
        AnthropicConverter.responses_to_anthropic(body, model, max_tokens, thinking, thinking_budget_tokens, extra_body)
        AnthropicConverter.anthropic_to_responses(anthropic_response, request_body, model)
        AnthropicConverter.anthropic_request_to_responses(anthropic_body)
        AnthropicConverter.responses_to_anthropic_response(response, model)
        AnthropicConverter.anthropic_response_to_sse(anthropic_response)
    """,
    "nemo_gym.anthropic_utils": """
        NeMoGymAnthropicMessageCreateParamsNonStreaming
        NeMoGymAnthropicMessageCreateParamsNonStreaming.max_tokens
        NeMoGymAnthropicMessageCreateParamsNonStreaming.messages
        NeMoGymAnthropicMessageCreateParamsNonStreaming.model
        NeMoGymAnthropicMessageCreateParamsNonStreaming.cache_control
        NeMoGymAnthropicMessageCreateParamsNonStreaming.container
        NeMoGymAnthropicMessageCreateParamsNonStreaming.inference_geo
        NeMoGymAnthropicMessageCreateParamsNonStreaming.metadata
        NeMoGymAnthropicMessageCreateParamsNonStreaming.output_config
        NeMoGymAnthropicMessageCreateParamsNonStreaming.service_tier
        NeMoGymAnthropicMessageCreateParamsNonStreaming.stop_sequences
        NeMoGymAnthropicMessageCreateParamsNonStreaming.system
        NeMoGymAnthropicMessageCreateParamsNonStreaming.temperature
        NeMoGymAnthropicMessageCreateParamsNonStreaming.thinking
        NeMoGymAnthropicMessageCreateParamsNonStreaming.tool_choice
        NeMoGymAnthropicMessageCreateParamsNonStreaming.tools
        NeMoGymAnthropicMessageCreateParamsNonStreaming.top_k
        NeMoGymAnthropicMessageCreateParamsNonStreaming.top_p
        NeMoGymAnthropicMessageCreateParamsNonStreaming.stream
        NeMoGymAnthropicMessage
    """,
}

OCTOBER_2026 = {  # those that components of that version need before they can be imported or run
    "nemo_gym.server_utils": """
        BaseServer.ray_enabled
        ServerClient._resolve_base_url(server_name)
        raise_for_status(response, content=)
        request(method, url, _internal=, _max_connection_retries=, _server_name=, **kwargs)
        SimpleServer.ray_enabled
    """,
    "nemo_gym": "_resolve_under_cwd_or_install(rel_path, *, validator=)",
    "nemo_gym.base_responses_api_model": """
        _CaptureMiddleware
        observability_enabled_from_config(global_config_dict)
    """,
    "nemo_gym.openai_utils": "MAX_NUM_TRIES=3",
    "nemo_gym.path_utils": """
        aggregate_metrics_path_for(output_fpath)
        materialized_path_for(output_fpath)
    """,
    "nemo_gym.sandbox.providers": "create_provider(config)",
    "nemo_gym.sandbox.utils": """
        CPU_CAP_ENV_VARS
        cpu_cap_env(cpu)
    """,
    "nemo_gym.token_id_capture": "current_capture_context()",
    "nemo_gym.responses_converter": """
        ResponsesConverter._extract_reasoning_from_content(content)
        ResponsesConverter._wrap_reasoning_in_think_tags(texts)
        VLLMConverter.return_token_id_information
        VLLMConverter.uses_reasoning_parser
        _usage_detail(usage, group, name, *top_level_aliases)
        uuid4
    """,
    "nemo_gym.rollout_collection": """
        _attach_trajectory_record(row, result=)
        get_max_rollout_attempts()
    """,
    "nemo_gym.sandbox.providers.apptainer.provider": "ApptainerProvider",
    "nemo_gym.sandbox.providers.docker.provider": "DockerProvider",
}
