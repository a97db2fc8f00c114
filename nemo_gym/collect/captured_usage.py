"""What rollouts used of models, counted by their ids: from the calls that the model servers of a run have captured.

Agents that ask their models by clients of their own say it neither in `usage` nor by their process (`CallLog`). A judge
belongs to the rollout, too, but what it uses is not what the rollout costs; where it shares the agent's model server,
its calls cannot be told apart, and nobody knows what the agent used.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

from nemo_gym.collect.dispatch import Post
from nemo_gym.collect.environments import environments_of_agents
from nemo_gym.config.instances import server_refs
from nemo_gym.http.run_answers import CallUsage
from nemo_gym.keys import AGENTS_TYPE, MODELS_TYPE
from nemo_gym.observability.calls import ModelCallRecord, read_model_call_records
from nemo_gym.observability.store import CaptureStore, model_call_capture_dirs_from_config
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body
from nemo_gym.runs.record import Row, agent_name_of
from nemo_gym.runs.spending import add_usage, usage_of

_FAILED = 400


def counting_captured(post: Post, config: Mapping[Any, Any]) -> Post:
    """Return `post`, whose results tell what their captured calls used if they do not tell it themselves."""
    stores = [CaptureStore(folder) for folder in model_call_capture_dirs_from_config(config)]
    models = _models_of_agents(config)

    async def posted(row: Row) -> Any:
        result = await post(row)
        if isinstance(result, dict) and usage_of(result)[0] is None:
            add_usage(result, _used(row, stores, models.get(agent_name_of(row) or "", frozenset())))
        return result

    return posted


def _models_of_agents(config: Mapping[Any, Any]) -> dict[str, frozenset[str]]:
    """Return the model servers that each agent asks, for those whose environment asks none of them."""
    agents = [name for name, block in config.items() if isinstance(block, Mapping) and AGENTS_TYPE in block]
    environments = environments_of_agents(config, agents)
    own = {agent: _models_in(config[agent]) for agent in agents}
    return {
        agent: models for agent, models in own.items() if not models & _models_in(config.get(environments.get(agent)))
    }


def _models_in(block: Any) -> frozenset[str]:
    return frozenset(ref.name for _, ref in server_refs(block) if ref.type == MODELS_TYPE)


def _used(row: Row, stores: list[CaptureStore], models: frozenset[str]) -> CallUsage | None:
    """Return the sum over the answered calls of these models; None if there is none, or one that does not say it."""
    try:
        rollout_id = maybe_rollout_id_from_run_body(row)
        calls = [call for store in stores for call in read_model_call_records(store, str(rollout_id))]
    except (OSError, ValueError):
        return None
    answered = [call for call in calls if call.model_ref and call.model_ref.name in models and _is_answered(call)]
    told = [_usage_of_call(call) for call in answered if call.tokens_in is not None and call.tokens_out is not None]
    return reduce(CallUsage.plus, told) if told and len(told) == len(answered) else None


def _is_answered(call: ModelCallRecord) -> bool:
    return call.status_code is None or call.status_code < _FAILED


def _usage_of_call(call: ModelCallRecord) -> CallUsage:
    given, output = call.tokens_in or 0, call.tokens_out or 0
    total = given + output if call.tokens_total is None else call.tokens_total
    return CallUsage(call.model, given, call.cached_tokens or 0, output, total)
