"""Commands that make rollouts, steer their making, and look at them."""

from nemo_gym.cli.pages import NO_CONFIG, OFFLINE, ROLLOUTS, CommandInfo, Loading

COLLECT_ROLLOUTS = CommandInfo(
    "collect_rollouts",
    ROLLOUTS,
    "Collect rollouts from running servers",
    "nemo_gym.runs.options:RolloutCollectionConfig",
    "nemo_gym.cli.commands.collecting",
    OFFLINE,
    """
    Collect rollouts from servers that ng_run started.

    Every row is sent to its agent, as often as num_repeats says; each finished rollout is one line of the output
    file. A rollout that fails goes to <output>_failures.jsonl and the run goes on. Ctrl-C ends the run in good
    order; the same command with +resume_from_cache=true goes on where it ended.

    Exit code: 0 when every rollout is in the output file, 1 when some are missing, 2 for something to correct in the
    command or the data, 130 after Ctrl-C.

    Examples:
        ng_collect_rollouts +agent_name=my_agent +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl
        ng_collect_rollouts +agent_name=my_agent +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +limit=9
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl '+num_repeats={a: 4, b: 1}'
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +resume_from_cache=true
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +shard=3/16
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +plan=true
        ng_collect_rollouts +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=out.jsonl +pilot=20 +max_cost_usd=50
    """,
)
E2E_COLLECT_ROLLOUTS = CommandInfo(
    "e2e_collect_rollouts",
    ROLLOUTS,
    "Prepare data, start servers, collect rollouts, stop: in one command",
    "nemo_gym.runs.options:E2ERolloutCollectionConfig",
    "nemo_gym.cli.commands.collecting",
    Loading(starts_servers=True),
    r"""
    Prepare the data sets of a split, start the configured servers, collect rollouts, compute metrics, stop.

    With +input_jsonl_fpath the rows of that file are rolled out instead, by the configured agent. Without it, data that
    is missing is downloaded, or made by the benchmark's prepare script. Prepared rows go to
    <output without ending>/preprocessed_datasets. Everything else is as with ng_collect_rollouts: Ctrl-C ends the run
    in good order, and the same command with +resume_from_cache=true goes on where it ended.

    Examples:
        ng_e2e_collect_rollouts +benchmark=gsm8k +model=openai:gpt-4.1-mini
        ng_e2e_collect_rollouts +benchmark=gsm8k +model=vllm:http://localhost:8000/v1#Qwen/Qwen3-8B +limit=100
        ng_e2e_collect_rollouts +environment=example_single_tool_call +model=scripted
        ng_e2e_collect_rollouts +environment=example_single_tool_call +model=scripted +plan=true
        ng_e2e_collect_rollouts +environment=string_match +model=openai:gpt-4.1-mini +input_jsonl_fpath=mine.csv
        ng_e2e_collect_rollouts +split=benchmark +output_jsonl_fpath=results/gsm8k.jsonl \
            "+config_paths=[benchmarks/gsm8k/config.yaml,responses_api_models/openai_model/configs/openai_model.yaml]"
        ng_e2e_collect_rollouts +split=train +output_jsonl_fpath=results/my_env.jsonl +num_repeats=8 +limit=100 \
            "+config_paths=[resources_servers/my_env/configs/my_env.yaml,my_model.yaml]"
        ng_e2e_collect_rollouts +executor=ray +num_shards=16 +split=train +output_jsonl_fpath=/shared/my_env.jsonl \
            "+config_paths=[resources_servers/my_env/configs/my_env.yaml,my_model.yaml]"
    """,
)
CONTROL = CommandInfo(
    "control",
    ROLLOUTS,
    "Ask and steer a run while it is made",
    "nemo_gym.schemas.cli_config:ControlConfig",
    "nemo_gym.cli.commands.looking",
    NO_CONFIG,
    """
    Ask a running collector how it is doing, or change what it does: pause, other caps, one rollout less, stop.

    The run is named by its output or by its id, as ng_status shows them; if only one is going on, it need not be. Only
    the user who started it can do this, on the machine where its collector (with Ray: its driver) runs. What was
    changed is recorded in the run's manifest.

    Examples:
        ng_control +run=results/rollouts.jsonl +set='{num_samples_in_parallel: 64, rollout_timeout_s: 600}'
        ng_control +pause=true
        ng_control +run=results/rollouts.jsonl +in_flight=true
        ng_control +run=results/rollouts.jsonl +cancel=17/3
        ng_control +run=results/rollouts.jsonl +retry=failed
        ng_control +run=results/rollouts.jsonl +stop=true
    """,
)
ATTACH = CommandInfo(
    "attach",
    ROLLOUTS,
    "Show how a run is doing that goes on elsewhere",
    "nemo_gym.schemas.cli_config:AttachConfig",
    "nemo_gym.cli.commands.looking",
    NO_CONFIG,
    """
    Show how a run is doing that goes on in another terminal or in none, as its own terminal would.

    Ctrl-C ends the showing, never the run. Ends with the run: with 0 when every rollout is there, else with 1.

    Examples:
        ng_attach
        ng_attach +run=results/rollouts.jsonl
    """,
)
REVERIFY = CommandInfo(
    "reverify",
    ROLLOUTS,
    "Score stored rollouts again, without agents or models; say what changed",
    "nemo_gym.runs.options.reverify:RolloutReverificationConfig",
    "nemo_gym.cli.commands.collecting",
    Loading(needs_model=False),
    """
    Send stored responses to the environments that run now, and say what changed.

    Where environments are configured (config_paths, environment, benchmark), they are started, with the judges that
    they ask and nothing else, and stopped at the end; otherwise those that ng_run started are asked. No agent and no
    policy model is called. Every record of the output has the verdict of before beside the new one, as
    _ng_previous_verdict. The rest is as with ng_collect_rollouts: a verdict that fails goes to <output>_failures.jsonl,
    Ctrl-C ends in good order, and the same command with +resume_from_cache=true goes on where it ended.

    Exit code: 0 when every rollout that was asked for has its verdict, 1 when some are missing, 2 for something to
    correct in the command or the data, 130 after Ctrl-C.

    Examples:
        ng_reverify +environment=mcqa +rollouts_jsonl_fpath=results/old.jsonl +output_jsonl_fpath=results/new.jsonl
        ng_reverify +rollouts_jsonl_fpath=results/old.jsonl +output_jsonl_fpath=results/new.jsonl
        ng_reverify +rollouts_jsonl_fpath=old.jsonl +output_jsonl_fpath=new.jsonl '+where=reward < 1'
        ng_reverify +rollouts_jsonl_fpath=old.jsonl +output_jsonl_fpath=new.jsonl +judge_failed_only=true
        ng_reverify +rollouts_jsonl_fpath=old.jsonl +output_jsonl_fpath=new.jsonl +resume_from_cache=true
    """,
)
AGGREGATE_ROLLOUTS = CommandInfo(
    "aggregate_rollouts",
    ROLLOUTS,
    "Combine rollout files and compute their metrics",
    "nemo_gym.runs.options:RolloutAggregationConfig",
    "nemo_gym.cli.commands.collecting",
    OFFLINE,
    """
    Combine rollout files that were collected separately, and compute the metrics over all of them.

    Every rollout is checked to be there once. What lies beside the rollouts (failures, materialized inputs, the
    output of an earlier aggregation) is left out. The servers that collected the rollouts compute the metrics; when
    they do not run, their classes are loaded from config_paths and give the same numbers. No model is needed.

    Examples:
        ng_aggregate_rollouts '+input_glob=shards/rollouts-*.jsonl' +output_jsonl_fpath=rollouts.jsonl
        ng_aggregate_rollouts '+input_glob=a/*.jsonl,b/*.jsonl' +output_jsonl_fpath=all.jsonl "+config_paths=[my.yaml]"
        ng_aggregate_rollouts +input_glob=rollouts.jsonl +output_jsonl_fpath=rollouts.jsonl +merge_shards=false
    """,
)
SLURM = CommandInfo(
    "slurm",
    ROLLOUTS,
    "Write the Slurm jobs that collect rollouts in shards",
    "nemo_gym.runs.options.sharding:SlurmConfig",
    "nemo_gym.cli.commands.collecting",
    OFFLINE,
    r"""
    Write the Slurm scripts that collect rollouts in shards, and print them; submitting them is up to you.

    Give it the options of ng_e2e_collect_rollouts (or of +command). An array job runs one shard per task and resumes
    whatever it finds, so it may be submitted again at any time: +chain does so for runs that take longer than a job
    may. A last job combines the shards. submit.sh submits all of them, each waiting for the one before.

    Examples:
        ng_slurm +num_shards=16 +wall_time=04:00:00 +chain=3 '+sbatch_options={partition: batch, account: me}' \
            +split=benchmark +output_jsonl_fpath=results/gsm8k.jsonl "+config_paths=[benchmarks/gsm8k/config.yaml,...]"
        ng_slurm +num_shards=8 +command=ng_collect_rollouts +head_server.host=10.0.0.7 +agent_name=my_agent \
            +input_jsonl_fpath=tasks.jsonl +output_jsonl_fpath=results/out.jsonl
    """,
)
REWARD_PROFILE = CommandInfo(
    "reward_profile",
    ROLLOUTS,
    "Profile rollouts task by task; choose tasks by difficulty",
    "nemo_gym.schemas.cli_config:RewardProfileConfig",
    "nemo_gym.cli.commands.curating",
    OFFLINE,
    """
    Profile the rollouts of a run: how hard each task is, how long its rollouts are, what failed.

    Writes beside the rollouts: <stem>_reward_profiling.jsonl (one task per line), <stem>_agent_metrics.json and
    <stem>_reward_profile.html, a page to look at. With select, also the input rows of the tasks that match.

    Examples:
        ng_reward_profile +materialized_inputs_jsonl_fpath=r_materialized_inputs.jsonl +rollouts_jsonl_fpath=r.jsonl
        ng_reward_profile … ++allow_partial_rollouts=True '+select=0 < mean < 1'
        ng_reward_profile … +rollouts_page=r_rollouts.html
    """,
)
CHECK_ROLLOUTS = CommandInfo(
    "check_rollouts",
    ROLLOUTS,
    "Look for odd rollouts: empty, cut off, in loops, refused, wrongly rewarded; a gate for CI",
    "nemo_gym.schemas.cli_config:CheckRolloutsConfig",
    "nemo_gym.cli.commands.judging",
    NO_CONFIG,
    """
    Look for rollouts that are not what they should be, whatever their reward says.

    Empty answers, answers cut off at the token limit, tools that were offered and never called, loops, arguments of
    tool calls that are no JSON, refusals, equal answers over all repeats of a task, rewards out of range, rewards that
    never differ, judges that contradict each other. With fail_if the exit code is 1 if the condition applies, else 0.

    Examples:
        ng_check_rollouts +input=results/rollouts.jsonl
        ng_check_rollouts '+input=results/shards/*.jsonl' '+where=reward < 1' +examples=10
        ng_check_rollouts +input=results/rollouts.jsonl '+fail_if=truncated.share > 0.01 or bad_arguments > 0'
    """,
)
VIEW = CommandInfo(
    "view",
    ROLLOUTS,
    "Show runs and rollouts in a browser, or as one file",
    "nemo_gym.schemas.cli_config:ViewConfig",
    "nemo_gym.cli.commands.looking",
    NO_CONFIG,
    """
    Show runs, their rollouts and the conversations in them, in a browser, also while they are being collected.

    Serves on this machine and prints one address; Ctrl-C ends it. Nothing in the folders of runs is changed. With
    export, writes one HTML file that shows some rollouts without any server.

    Examples:
        ng_view +path=results/
        ng_view +path=results/rollouts.jsonl '+export=report.html' '+where=reward < 1 and output_tokens > 2000'
        ng_view +json=true
    """,
)
COMPARE = CommandInfo(
    "compare",
    ROLLOUTS,
    "Compare runs task by task: which is better, by how much, how surely; a gate for CI",
    "nemo_gym.compare:CompareConfig",
    "nemo_gym.cli.commands.judging",
    NO_CONFIG,
    """
    Compare runs task by task: by how much a run is better than the first, and how sure that is.

    Tasks are matched by what was asked. Failed rollouts are left out, and counted as 0 besides. With fail_if the exit
    code is 1 if the condition applies, 0 if it does not, and 3 if this much data cannot decide it.

    Examples:
        ng_compare '+runs=[results/base.jsonl,results/new.jsonl]'
        ng_compare '+runs={base: results/base.jsonl, new: results/new/*.jsonl}' '+where=level == "hard"' +by=topic
        ng_compare '+runs=[a.jsonl,b.jsonl]' '+fail_if=delta < -0.01' +junit=gate.xml +output=compare.md
    """,
)
EXPORT = CommandInfo(
    "export",
    ROLLOUTS,
    "Make a training data set (SFT, DPO, chats) of rollouts",
    "nemo_gym.schemas.cli_config:ExportConfig",
    "nemo_gym.cli.commands.curating",
    NO_CONFIG,
    """
    Write collected rollouts as a data set: for supervised (sft, messages) or preference (dpo) training, or of tasks.

    Every example names the rollouts it was made of: file, line and rollout key. Failed rollouts are never exported. A
    dataset has the input row of each chosen task with its solve rate, and can be rolled out and pushed to a hub.

    Examples:
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=sft.jsonl +format=sft +min_reward=1
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=dpo.parquet +format=dpo '+filter=0 < mean < 1'
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=chats.jsonl +format=messages +max_per_task=1
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=hard.jsonl +format=dataset '+filter=mean < 1'
        ng_export +rollouts_jsonl_fpath=rollouts.jsonl +output_fpath=hard.jsonl +format=dataset +push_to_hub=me/hard
    """,
)
RECORDINGS = CommandInfo(
    "recordings",
    ROLLOUTS,
    "List, check and prune recorded model calls",
    "nemo_gym.schemas.cli_config:RecordingsConfig",
    "nemo_gym.cli.commands.curating",
    OFFLINE,
    """
    List the model calls in a recording; check them; list those of a rollout; drop what is of no use.

    A recording is a folder that model servers have written with recording mode record or auto (docs/recording.md).
    With +prune=true, calls that were recorded again later, damaged ones and what killed servers left behind are
    dropped. Files that servers are writing at the moment stay as they are.

    Examples:
        ng_recordings +folder=recordings/gsm8k
        ng_recordings +folder=recordings/gsm8k +check=true
        ng_recordings +folder=recordings/gsm8k +rollout=3-0
        ng_recordings +folder=recordings/gsm8k +prune=true +older_than_days=30
    """,
)

COMMANDS = (
    COLLECT_ROLLOUTS,
    E2E_COLLECT_ROLLOUTS,
    CONTROL,
    ATTACH,
    REVERIFY,
    AGGREGATE_ROLLOUTS,
    SLURM,
    REWARD_PROFILE,
    CHECK_ROLLOUTS,
    VIEW,
    COMPARE,
    EXPORT,
    RECORDINGS,
)
