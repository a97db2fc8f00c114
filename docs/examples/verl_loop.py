"""The agent loop of `verl_agent_loop.py` as verl loads it, around an environment of two turns.

Put this folder onto PYTHONPATH, and name the class in a YAML file, to which verl's option
`actor_rollout_ref.rollout.agent.agent_loop_config_path` points:

    - name: lucky_digits
      _target_: verl_loop.LuckyDigitsLoop

Rows of the data set choose it with `agent_name: lucky_digits`, and their environment with `data_source: lucky`.
"""

from typing import Any

from tiny_transformer import LuckyDigits
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl_agent_loop import ManagerAgentLoop

ENVIRONMENTS = {"lucky": LuckyDigits()}


class LuckyDigitsLoop(ManagerAgentLoop, AgentLoopBase):
    """verl makes one of these per sample."""

    output_type = AgentLoopOutput

    def __init__(self, **given: Any) -> None:
        AgentLoopBase.__init__(self, **given)
        prompt, response = self.rollout_config.prompt_length, self.rollout_config.response_length
        ManagerAgentLoop.__init__(
            self, self.server_manager, self.tokenizer, ENVIRONMENTS, prompt + response, response_length=response
        )

    async def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the prompt as verl writes it, cut to its `prompt_length`."""
        ids: list[int] = await self.ct_build_initial_tokens(messages)
        return ids
