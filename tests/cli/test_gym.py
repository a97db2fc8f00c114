"""The tree of commands: what is typed becomes what its other spelling would be, and mistakes are answered."""

import json
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli import workloads
from nemo_gym.cli.command import Command
from nemo_gym.cli.commands.gym import _parsed, find_leaf, leaf_page, main, translate
from nemo_gym.cli.completion import answer
from nemo_gym.cli.registry import COMMANDS, known_options
from nemo_gym.cli.tree import GROUPS, TREE, Leaf, spelled_as_gym
from nemo_gym.cli.workloads import CatalogConfig, InitWorkloadConfig, TestWorkloadConfig, ValidateWorkloadConfig
from nemo_gym.config.options import options_of
from nemo_gym.keys import WELL_KNOWN_KEYS
from nemo_gym.paths import PARENT_DIR
from nemo_gym.schemas.cli_config import HelpConfig

Script = Callable[..., subprocess.CompletedProcess[str]]
MCQA = str(PARENT_DIR / "resources_servers/mcqa/configs/mcqa.yaml")
VLLM = str(PARENT_DIR / "responses_api_models/vllm_model/configs/vllm_model.yaml")


def translated(*typed: str) -> tuple[str, list[str]]:
    leaf, rest = find_leaf(typed)
    assert leaf is not None
    return translate(leaf, _parsed(leaf, rest))


@pytest.mark.parametrize(
    ("typed", "command", "options"),
    [
        (
            "eval run --benchmark gsm8k --model-type vllm_model -m Qwen/Q --model-url http://a:1/v1 --model-api-key k",
            "e2e_collect_rollouts",
            [
                f"+config_paths=[{VLLM}]",
                "+benchmark=gsm8k",
                "+policy_model_name=Qwen/Q",
                "+policy_base_url=http://a:1/v1",
                "+policy_api_key=k",
            ],
        ),
        (
            "eval run --environment mcqa -i in.csv",
            "e2e_collect_rollouts",
            ["+environment=mcqa", "+input_jsonl_fpath=in.csv"],
        ),
        (
            "eval run --no-serve -a me -i in.jsonl -o out.jsonl --limit 3 --num-repeats 2 --concurrency 8 --resume",
            "collect_rollouts",
            [
                "+resume_from_cache=true",
                "+agent_name=me",
                "+input_jsonl_fpath=in.jsonl",
                "+output_jsonl_fpath=out.jsonl",
                "+limit=3",
                "+num_repeats=2",
                "+num_samples_in_parallel=8",
            ],
        ),
        (
            "-v eval run --config a.yaml --config b.yaml --temperature 0.7 --top-p 1 +config_paths=[c.yaml] +x=1",
            "e2e_collect_rollouts",
            [
                "+config_paths=[a.yaml,b.yaml,c.yaml]",
                "+verbose=true",
                "+responses_create_params.temperature=0.7",
                "+responses_create_params.top_p=1",
                "+x=1",
            ],
        ),
        ("env start --resources-server mcqa", "run", [f"+config_paths=[{MCQA}]"]),
        ("env start --environment mcqa", "run", ["+environment=mcqa"]),
        ("env start --environment resources_servers/mcqa", "run", ["+environment=mcqa"]),
        ("env test --resources-server mcqa", "test", ["+entrypoint=resources_servers/mcqa"]),
        ("env test", "test_all", []),
        (
            "env packages --resources-server mcqa --json",
            "pip_list",
            ["+entrypoint=resources_servers/mcqa", "+format=json"],
        ),
        ("env init --resources-server my_env", "init_resources_server", ["+entrypoint=resources_servers/my_env"]),
        (
            "env init --benchmark quiz --reuse-verifier mcqa --reward-range -1 1 --lower-is-better",
            "nemo_gym.cli.workloads:init_workload",
            [
                "+scaffold_kind=benchmark",
                '+scaffold_name="quiz"',
                "+reuse_verifier=mcqa",
                "+reward_range=[-1,1]",
                "+higher_is_better=false",
            ],
        ),
        (
            "env validate school/exam --kind benchmark --sync --json",
            "nemo_gym.cli.workloads:validate_workload",
            ['+component_name="school/exam"', "+kind=benchmark", "+sync=true", "+json=true"],
        ),
        (
            "env test school/exam --update-expected",
            "nemo_gym.cli.workloads:check_verifier",
            ['+component_name="school/exam"', "+update_expected=true"],
        ),
        (
            "eval submit -c jobs.yaml --dry-run compute.a.account=me",
            "nemo_gym.cli.workloads:submit",
            ["+submission=jobs.yaml", "+dry_run=true", "compute.a.account=me"],
        ),
        (
            "eval reverify --inputs i --rollouts r -o o --judge-failed-only --append",
            "reverify",
            [
                "+materialized_inputs_jsonl_fpath=i",
                "+rollouts_jsonl_fpath=r",
                "+output_jsonl_fpath=o",
                "+judge_failed_only=true",
                "+append=true",
            ],
        ),
        (
            "eval profile --inputs i --rollouts=r",
            "reward_profile",
            ["+materialized_inputs_jsonl_fpath=i", "+rollouts_jsonl_fpath=r"],
        ),
        (
            "dataset upload -i rows.jsonl --name n --revision 2 --create-pr",
            "upload_dataset_to_hf",
            ["+input_jsonl_fpath=rows.jsonl", "+dataset_name=n", "+revision=2", "+create_pr=true"],
        ),
        (
            "dataset collate --resources-server mcqa --mode example_validation --output-dir d",
            "prepare_data",
            [f"+config_paths=[{MCQA}]", "+mode=example_validation", "+output_dirpath=d"],
        ),
    ],
)
def test_flags_become_the_options_of_the_other_spelling(typed: str, command: str, options: list[str]) -> None:
    assert translated(*typed.split()) == (command, options)


def test_every_command_has_both_spellings() -> None:
    missing = [info.name for info in COMMANDS if not spelled_as_gym(info.name)]
    assert missing == []
    assert {leaf.words[0] for leaf in TREE} == set(GROUPS)


@pytest.mark.parametrize("leaf", TREE, ids=lambda leaf: leaf.title)
def test_a_flag_sets_options_that_exist_and_its_page_explains_it(leaf: Leaf) -> None:
    of_workloads = {
        name
        for config_class in (CatalogConfig, ValidateWorkloadConfig, TestWorkloadConfig, InitWorkloadConfig)
        for option in options_of(config_class)
        for name in option.names
    }
    known = known_options(HelpConfig) | WELL_KNOWN_KEYS | of_workloads | {"entrypoint", "responses_create_params"}
    page = leaf_page(leaf)
    assert page.startswith(f"Usage: {leaf.title} ")
    for flag in leaf.flags:
        assert flag.name in page
        if flag.role == "option":
            keys = {key.partition("=")[0].partition(".")[0] for key in flag.sets}
            assert keys <= known, f"{leaf.title} {flag.name}"


@pytest.mark.parametrize(
    "command",
    [each for each in vars(workloads).values() if isinstance(each, Command)],
    ids=lambda command: command.name,
)
def test_the_work_of_what_only_gym_types_takes_its_options(command: Command[Any]) -> None:
    assert typing.get_type_hints(command.main)["config"] is command.config_class
    assert (command.words or "").strip()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("evl run", "gym has no command 'evl'. Did you mean `eval`?"),
        ("eval rum", "gym eval has no command 'rum'. Did you mean `run`?"),
        ("eval run --limt 3", "unrecognized arguments: --limt. Did you mean `--limit`?"),
        ("eval run --model-api-kee=secret", "unrecognized arguments: --model-api-kee. Did you mean `--model-api-key`?"),
        ("eval run --limit", "--limit: expected one argument"),
        (
            "dataset collate --mode example_valdation",
            "choose from train_preparation, example_validation. Did you mean `example",
        ),
        ("env start --benchmark gsm9k", "there is no benchmarks/gsm9k/config.yaml. Did you mean `gsm8k`?"),
        ("env start --model-type vlm_model", "vlm_model/configs/vlm_model.yaml. Did you mean `vllm_model`?"),
        ("env start --environment weathr", f"{PARENT_DIR}/environments, {PARENT_DIR}/resources_servers"),
        ("env start --search-dir nowhere", "--search-dir nowhere: there is no such folder"),
        ("list agents simple_agnt", "Unknown agent 'simple_agnt'. Did you mean `simple_agent`?"),
        ("list benchmarks mcqa", "'mcqa' is an environment: see gym list environments mcqa"),
        ("list agents a b", "gym list agents takes one NAME"),
        ("search agnts tool", "'agnts' is no type of component. Did you mean `agents`?"),
        (
            "search math problems",
            "'math' is no type of component. Types are benchmarks, environments, agents, models, ",
        ),
        ("search word math problems", "A QUERY of several words wants quotes: gym search 'word math problems'\n"),
        ("search agents tool calls", "Error: A QUERY of several words wants quotes: gym search agents 'tool calls'\n"),
        ("eval attach +path=results", "Error: gym eval attach does not read +path; it takes +run\n"),
        ("list models +limit=1", "Error: gym list does not read +limit; it takes +catalog, +component_name, +query"),
        ("dataset rm", "--name <text> (+dataset_name) is required. The data set to delete."),
        ("dataset migrate", "--input <text> (+input_jsonl_fpath) is required."),
        ("env init --environment a --reward-range 1 0", "write the lowest reward first: --reward-range 0 1"),
        ("search", "wants a QUERY"),
        ("dataset upload --storage gitlab -i x", "not uploaded to or downloaded from GitLab here; use --storage hf"),
        ("dataset rm --name old", "the GitLab registry needs mlflow_tracking_uri and mlflow_tracking_token"),
        ("dataset rm", "See gym dataset rm --help."),
        ("dataset migrate", "See gym dataset migrate --help."),
        ("eval submit --config jobs.yaml", "--config jobs.yaml: there is no such file"),
        ("eval submit", "gym eval submit wants a file: --config jobs.yaml"),
        ("env publish mine", "there is no environment or benchmark 'mine' with a manifest.yaml."),
        ("env publish", "gym env publish wants the NAME of a workload"),
        ("env init", "wants one of --resources-server, --environment and --benchmark"),
        (
            "env init --resources-server a --benchmark b",
            "wants one of --resources-server, --environment and --benchmark",
        ),
        ("env init --resources-server a --profile external-agent-loop", "goes with --environment or --benchmark"),
        ("env init --environment a --profile external-loop", "Did you mean `external-agent-loop`?"),
        ("env init --environment a --reward-range 1", "--reward-range: expected 2 arguments"),
        ("env init --environment a --reward-range 0 high", "reward_range"),
        ("env init --environment a --higher-is-better --lower-is-better", "exclude each other"),
        ("env test mine --resources-server mcqa", "takes a workload as it is written, not --resources-server"),
        ("env test --update-expected", "--update-expected of gym env test goes with a NAME"),
        ("env validate mine --config a.yaml", "takes a workload as it is written, not --config"),
        ("env validate mine +x=1", "takes a workload as it is written, not +x=1"),
        ("env validate --sync", "--sync of gym env validate goes with a NAME"),
        ("env validate --manifest nowhere/manifest.yaml", "there is no such file"),
        ("eval profile", "--rollouts <text> (+rollouts_jsonl_fpath) is required"),
        ("env packages", "--resources-server <text> (+entrypoint) is required"),
        ("env start --benchmark GSM8K", "Did you mean `gsm8k`?"),
        ("env run", "gym env has no command 'run'. Did you mean `gym env start`?\nSee gym env --help."),
        ("env stop", "gym env has no command 'stop'. There are init, resolve, validate,"),
        ("version", "Did you mean `gym --version`?"),
        ("help nonsense", "gym has no command 'nonsense'. There are list, search,"),
        ("env validate mcqa", "mcqa has no manifest.yaml: gym env validate --environment mcqa checks its config"),
        ("--verson", "unrecognized arguments: --verson. Did you mean `--version`?"),
    ],
)
def test_a_mistake_is_one_message_on_stderr_with_what_was_meant(script: Script, typed: str, said: str) -> None:
    done = script("gym", *typed.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


def test_a_group_alone_and_gym_alone_show_both_spellings_of_their_commands(script: Script) -> None:
    whole, group, asked = script("gym"), script("gym", "eval"), script("gym", "eval", "--help")
    assert (whole.returncode, group.returncode, asked.returncode) == (2, 2, 0)
    assert group.stdout == asked.stdout == script("gym", "help", "eval").stdout == script("gym", "eval", "help").stdout
    line = next(line for line in whole.stdout.splitlines() if line.startswith("  gym env start "))
    assert line.split()[3] == "ng_run"
    assert "Also typed as `gym env start`" in script("ng_run", "--help").stdout
    assert "Also typed as ng_run" in script("gym", "env", "start", "--help").stdout


def listed(script: Script, *typed: str) -> Any:
    done = script("gym", *typed, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_lists_have_the_shapes_that_programs_read(script: Script) -> None:
    entries = {entry["name"]: entry for entry in listed(script, "list", "environments")}
    assert list(entries["gsm8k"]) == [
        "name",
        "kind",
        "status",
        "domain",
        "description",
        "version",
        "integration_profile",
        "modality",
        "licensing",
        "lifecycle",
    ]
    assert entries["gsm8k"]["kind"] == "benchmark"
    assert entries["resources_servers/mcqa"]["kind"] == "environment"
    benchmarks = listed(script, "list", "benchmarks")
    assert [entry for entry in entries.values() if entry["kind"] == "benchmark"] == benchmarks
    agent = next(row for row in listed(script, "list", "agents") if row["name"] == "simple_agent")
    assert (agent["pattern"], agent["self_contained"], agent["variants"]) == ("A (composable)", False, ["simple_agent"])
    models = listed(script, "list", "models")
    assert {"name": "vllm_model", "model": "vllm_model", "model_group": "vllm_model"} in models
    servers = {row["name"]: row for row in listed(script, "list", "resources-servers")}
    assert list(servers["mcqa"]) == ["name", "domain", "description"]


def test_one_component_is_shown_with_how_to_use_it_and_the_use_works(script: Script) -> None:
    shown = listed(script, "list", "environments", "resources_servers/mcqa")
    assert list(shown) == ["name", "type", "domain", "description", "details", "usage_example"]
    words = shown["usage_example"].replace("<model>", "m").split()
    assert translated(*words[1:])[1][1] == "+environment=mcqa"
    assert "Use it: gym eval run --benchmark gsm8k" in script("gym", "list", "benchmarks", "gsm8k").stdout


@pytest.mark.parametrize(
    ("typed", "usage"),
    [
        ("environments mcqa/mcqa_scripted", "--environment resources_servers/mcqa/mcqa_scripted"),
        ("environments mcqa", "--environment resources_servers/mcqa --model-type openai_model -m <model>"),
        ("benchmarks gsm8k", "--benchmark gsm8k --model-type openai_model -m <model>"),
        ("models vllm_model", "--benchmark <benchmark> --model-type vllm_model -m <model>"),
        (
            "resources-servers structured_outputs",
            "--resources-server structured_outputs/structured_outputs_json --model-type openai_model -m <model>",
        ),
        (
            "agents simple_agent",
            "--config responses_api_agents/simple_agent/configs/simple_agent.yaml --config <environment.yaml> "
            "--model-type openai_model -m <model> "
            "+simple_agent.responses_api_agents.simple_agent.resources_server.name=<name>",
        ),
    ],
)
def test_the_use_of_a_component_names_what_it_lacks_and_nothing_that_it_brings(
    script: Script, typed: str, usage: str
) -> None:
    shown = listed(script, "list", *typed.split())
    assert shown["usage_example"].partition(" --")[2] == usage.removeprefix("--")


def test_search_goes_by_name_domain_and_description_of_a_type(script: Script) -> None:
    assert {entry["name"] for entry in listed(script, "search", "gsm")} == {"gsm8k"}
    assert [row["name"] for row in listed(script, "search", "agents", "tool calls")] == ["non_executing_simple_agent"]
    assert listed(script, "search", "models", "zzzz") == []
    assert script("gym", "search", "zzzz").stdout == "No environments match 'zzzz'.\n"


def test_components_of_a_search_dir_come_first(script: Script, tmp_path: Path) -> None:
    config = tmp_path / "mine/benchmarks/exam/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text((PARENT_DIR / "benchmarks/gsm8k/config.yaml").read_text())
    names = [entry["name"] for entry in listed(script, "list", "benchmarks", "--search-dir", "mine")]
    assert "exam" in names
    dumped = script(
        "gym", "env", "resolve", "--benchmark", "exam", "--model-type", "scripted_model", "--search-dir", "mine"
    )
    assert dumped.returncode == 0, dumped.stderr
    assert "gsm8k" in dumped.stdout


def test_a_filter_says_how_many_entries_do_not_say(script: Script) -> None:
    done = script("gym", "list", "environments", "--modality", "text", "--json")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "do not say their modality" in done.stderr
    knowledge = listed(script, "list", "environments", "--domain", "knowledge", "--kind", "benchmark")
    assert {entry["name"] for entry in knowledge} == {"gpqa", "mmlu_pro", "reasoning_gym_mini"}


def test_versions_and_prefetching(script: Script) -> None:
    facts = json.loads(script("gym", "--version", "--json").stdout)
    assert set(facts) >= {"nemo_gym", "python", "dependencies", "system"}
    assert script("gym", "--version").stdout.startswith("NeMo Gym ")
    done = script("gym", "env", "prefetch", "--environment", "mcqa")
    assert done.returncode == 0, done.stderr
    assert "2 servers are ready to start" in done.stdout


def test_main_can_be_called_with_arguments(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gym"])
    main(["search", "models", "azure", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["name"] == "azure_openai_model"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gym ev", ["eval "]),
        ("gym eval pro", ["profile "]),
        ("gym -v env st", ["start ", "status "]),
        ("gym --vers", ["--version "]),
        ("ng eval run --no", ["--no-serve "]),
        ("gym eval run --model-type vllm_model/vllm_model_f", ["vllm_model/vllm_model_for_training "]),
        ("gym dataset collate --mode t", ["train_preparation "]),
        ("gym eval run +pilo", ["+pilot="]),
        ("gym search res", ["resources-servers "]),
        ("gym nonsense ", []),
    ],
)
def test_the_tab_key_knows_words_flags_their_values_and_options(line: str, offered: list[str]) -> None:
    script, _, rest = line.partition(" ")
    before, _, word = rest.rpartition(" ")
    assert answer("bash", f"/bin/{script}", line, word) == offered
    assert answer("zsh", script, word, "", before) == offered


def test_a_help_page_loads_nothing_heavy() -> None:
    probe = (
        "import sys\nfrom nemo_gym.cli.commands.gym import main\n"
        "try:\n    main(['eval', 'run', '--help'])\nexcept SystemExit as exit:\n    assert not exit.code\n"
        "heavy = {'omegaconf', 'hydra', 'rich', 'yaml', 'asyncio', 'aiohttp', 'fastapi', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_the_page_about_commands_has_both_spellings_side_by_side() -> None:
    page = (PARENT_DIR / "docs/commands.md").read_text(encoding="utf-8")
    missing = [info.name for info in COMMANDS if f"`ng_{info.name}` | `{spelled_as_gym(info.name)}` |" not in page]
    assert missing == []


MANIFEST: dict[str, Any] = {
    "name": "school/exam",
    "version": 2,
    "kind": "benchmark",
    "integration_profile": "custom-gym-verifier",
    "domain": "math",
    "description": "Sums.",
    "modality": "text",
    "authors": ["me"],
    "reward": {"range": [0, 1], "higher_is_better": True},
    "resources_server": "gsm8k",
    "agent_server": "gsm8k_agent",
    "model_server": "policy_model",
    "canonical_split": "benchmark",
    "standard_prompt_config": "prompt.yaml",
    "licensing": "Apache-2.0",
    "datasets": [{"name": "exam", "type": "benchmark", "jsonl_fpath": "x.jsonl", "prepare_script": "prepare.py"}],
}


def write_workload(folder: Path, manifest: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text((PARENT_DIR / "benchmarks/gsm8k/config.yaml").read_text())
    (folder / "manifest.yaml").write_text(json.dumps(manifest))


def test_a_manifest_says_more_about_a_workload(script: Script, tmp_path: Path) -> None:
    write_workload(tmp_path / "benchmarks/school/exam", MANIFEST)
    (found,) = listed(script, "list", "environments", "--status", "experimental")
    assert found == {
        "name": "school/exam",
        "kind": "benchmark",
        "status": "experimental",
        "domain": "math",
        "description": "Sums.",
        "version": "2",
        "integration_profile": "custom-gym-verifier",
        "modality": "text",
        "licensing": "Apache-2.0",
        "lifecycle": "active",
    }
    done = script("gym", "list", "environments", "--licensing", "apache-2.0")
    assert "manifests 1/1" in done.stdout
    assert translated("eval", "run", "--benchmark", "school/exam")[1] == ["+benchmark=school/exam/config"]


def test_a_manifest_without_a_config_is_named_in_a_warning(script: Script, tmp_path: Path) -> None:
    write_workload(tmp_path / "environments/exam", {"name": "exam"})
    (tmp_path / "environments/exam/config.yaml").unlink()
    done = script("gym", "list", "benchmarks", "--json")
    assert done.returncode == 0
    assert "gsm8k" in {entry["name"] for entry in json.loads(done.stdout)}
    assert done.stderr.endswith("exam/manifest.yaml: there is no config.yaml beside it; it is not listed\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "exam"}, "but its folder is that of the benchmark 'school/exam'"),
        ({"licence": "MIT"}, "licence: Extra inputs are not permitted"),
        ({"model_server": None}, "integration_profile custom-gym-verifier needs a model_server"),
        ({"rollout_driver": "a:b"}, "rollout_driver belongs to integration_profile external-rollout-driver"),
        ({"canonical_split": None}, "a benchmark needs canonical_split and standard_prompt_config"),
        ({"reward": {"range": [1, 0], "higher_is_better": True}}, "write the lowest reward first"),
        ({"authors": []}, "authors: List should have at least 1 item"),
        ({"authors": ["me", "me"]}, "authors names somebody twice"),
    ],
)
def test_a_manifest_that_is_wrong_costs_a_warning_and_hides_nothing(
    script: Script, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    write_workload(tmp_path / "benchmarks/school/exam", MANIFEST | change)
    done = script("gym", "list", "benchmarks", "--json")
    assert done.returncode == 0
    assert said in done.stderr
    names = {entry["name"]: entry["status"] for entry in json.loads(done.stdout)}
    assert names["school/exam/config"] == names["gsm8k"] == "no-manifest"
