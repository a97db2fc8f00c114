"""The first job, in one go: start an example environment on the built-in model and collect rollouts from it.

`make quickstart` runs it. No key, no network: everything a real run does, on this machine alone.
"""

import sys
from pathlib import Path

from nemo_gym import runtime
from nemo_gym.cli.show import print_summary
from nemo_gym.errors import GymError
from nemo_gym.global_config import GlobalConfigDictParserConfig, OmegaConf
from nemo_gym.launch.run_helper import RunHelper
from nemo_gym.log import setup_logging
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from nemo_gym.terminal import harmless

ENVIRONMENT = "resources_servers/example_single_tool_call"
CONFIGS = [
    f"{ENVIRONMENT}/configs/example_single_tool_call.yaml",
    "responses_api_models/scripted_model/configs/scripted_model.yaml",
]
COLLECT = {
    "agent_name": "example_single_tool_call_simple_agent",
    "input_jsonl_fpath": f"{ENVIRONMENT}/data/example.jsonl",
    "output_jsonl_fpath": "results/quickstart/rollouts.jsonl",
    "num_repeats": 4,
}


def main() -> int:
    """Run the example and say what to run next."""
    setup_logging()
    helper = RunHelper()
    base = OmegaConf.create({"config_paths": CONFIGS, "head_server": {"port": 0}})
    try:
        helper.start(GlobalConfigDictParserConfig(initial_global_config_dict=base, skip_load_from_dotenv=True))
        try:
            summary = runtime.run(RolloutCollectionHelper().collect(RolloutCollectionConfig.model_validate(COLLECT)))
        finally:
            helper.shutdown()
    except GymError as error:
        print(harmless(f"Error: {error}"), file=sys.stderr)
        return 1
    print_summary(summary)
    print(_next_steps())
    return summary.exit_code


def _next_steps() -> str:
    options = " ".join(f"+{name}={value}" for name, value in COLLECT.items())
    return f"""
Next, the same in two steps (activate the environment first: source .venv/bin/activate):
  ng_run +environment={Path(ENVIRONMENT).name} +model=scripted
  ng_collect_rollouts {options}          # in another terminal

With a model of your own: +model=openai:<name> (the key is OPENAI_API_KEY), or +model=vllm:http://<host>:8000/v1#<name>.
ng_list_environments and ng_list_benchmarks say what else there is to try.
"""


if __name__ == "__main__":
    sys.exit(main())
