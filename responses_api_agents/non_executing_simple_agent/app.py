"""`non_executing_simple_agent`: like `simple_agent`, except that tool calls are answers and not carried out.

For environments that judge which tools a model wants to call, and with what, and for tools that nobody
has implemented.
"""

from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig
from responses_api_agents.simple_agent.cookies import Cookies
from responses_api_agents.simple_agent.trajectory import Trajectory


class NonExecutingSimpleAgentConfig(SimpleAgentConfig):
    """As for `simple_agent`."""


class NonExecutingSimpleAgent(SimpleAgent):
    """Asks the model until it speaks or calls a tool, and leaves it at that."""

    replicable = True

    config: NonExecutingSimpleAgentConfig

    async def _run_steps(
        self,
        params: NeMoGymResponseCreateParamsNonStreaming,
        resources_cookies: Cookies,
        model_cookies: Cookies | None,
    ) -> Trajectory:
        trajectory = Trajectory(params, resources_cookies, model_cookies)
        while (answer := await self._next_answer(trajectory)) is not None:
            calls = trajectory.add_turn(answer)
            if calls or trajectory.ends_with_turn(calls, self.config.max_idle_turns):
                break
        return trajectory


if __name__ == "__main__":
    NonExecutingSimpleAgent.run_webserver()
