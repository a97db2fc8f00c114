"""The servers that belong to this distribution: trusted to share one process."""

from nemo_gym.keys import AGENTS_TYPE, MODELS_TYPE, RESOURCES_TYPE

BUNDLED: frozenset[tuple[str, str]] = frozenset(
    {
        (AGENTS_TYPE, "function_agent"),
        (AGENTS_TYPE, "non_executing_simple_agent"),
        (AGENTS_TYPE, "remote_agent"),
        (AGENTS_TYPE, "simple_agent"),
        (MODELS_TYPE, "azure_openai_model"),
        (MODELS_TYPE, "inference_provider"),
        (MODELS_TYPE, "openai_model"),
        (MODELS_TYPE, "scripted_model"),
        (MODELS_TYPE, "vllm_model"),
        (RESOURCES_TYPE, "code_gen"),
        (RESOURCES_TYPE, "equivalence_llm_judge"),
        (RESOURCES_TYPE, "example_multi_step"),
        (RESOURCES_TYPE, "example_session_state_mgmt"),
        (RESOURCES_TYPE, "example_single_tool_call"),
        (RESOURCES_TYPE, "instruction_following"),
        (RESOURCES_TYPE, "math_with_judge"),
        (RESOURCES_TYPE, "mcqa"),
        (RESOURCES_TYPE, "reasoning_gym"),
        (RESOURCES_TYPE, "string_match"),
    }
)
"""(server type, implementation), as in `<server type>/<implementation>/app.py`."""
