"""The servers that belong to this distribution: trusted to share one process."""

from nemo_gym.keys import AGENTS_TYPE, MODELS_TYPE, RESOURCES_TYPE

BUNDLED: frozenset[tuple[str, str]] = frozenset(
    {
        (AGENTS_TYPE, "simple_agent"),
        (MODELS_TYPE, "openai_model"),
        (MODELS_TYPE, "scripted_model"),
        (RESOURCES_TYPE, "example_single_tool_call"),
    }
)
"""(server type, implementation), as in `<server type>/<implementation>/app.py`."""
