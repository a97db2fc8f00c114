# %% [markdown]
# # Rollouts from Python
# Editors and notebooks show this file as cells; as a script it runs from top to bottom. No key and no network are
# needed: the model is the scripted one.

# %%
import nemo_gym
from nemo_gym.rollout_collection import RolloutCollectionConfig

ENVIRONMENT = "resources_servers/example_single_tool_call"
MODEL = "responses_api_models/scripted_model"

# %% [markdown]
# Start an environment, its agent and a model, collect two rollouts of each of five tasks, and stop the servers.

# %%
config_paths = [f"{ENVIRONMENT}/configs/example_single_tool_call.yaml", f"{MODEL}/configs/scripted_model.yaml"]
with nemo_gym.servers_of(config_paths=config_paths) as servers:
    config = RolloutCollectionConfig(
        agent_name="example_single_tool_call_simple_agent",
        input_jsonl_fpath=f"{ENVIRONMENT}/data/example.jsonl",
        output_jsonl_fpath="results/quickstart.jsonl",
        limit=5,
        num_repeats=2,
    )
    summary = servers.collect(config)

# %% [markdown]
# What it came to. In a notebook, `summary` as the last line of a cell is a table.

# %%
print(summary)

# %% [markdown]
# The rollouts, as a table of pandas (or polars).

# %%
rollouts = nemo_gym.to_dataframe("results/quickstart.jsonl")
print(rollouts[["task_index", "rollout_index", "reward", "total_tokens", "duration_s"]])
