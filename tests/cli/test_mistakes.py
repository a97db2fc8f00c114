"""What newcomers get wrong, each with the answer it gets: exit code 2, no traceback, nothing started or written."""

import json
from pathlib import Path

import pytest

from nemo_gym.cli.command import command_named

MODEL = ["+model=scripted"]
MCQA = ["+environment=mcqa", *MODEL]
ROWS = ["+input_jsonl_fpath=rows.jsonl", "+output_jsonl_fpath=out.jsonl", "+agent_name=x"]
FILES = {
    "rows.jsonl": json.dumps({"responses_create_params": {"input": "hi"}}) + "\n",
    "tab.yaml": "a:\n\tb: 1\n",
    "prompt.txt": "hello {question}",
    "prompt.yaml": "usr: hello\n",
    "folder/configs/folder.yaml": "a: 1\n",
    "folder/configs/another.yaml": "a: 1\n",
}

MISTAKES = [
    ("e2e_collect_rollouts", ["gsm8k", "scripted"], "gsm8k: write +benchmark=gsm8k\n  scripted: write +model=scripted"),
    (
        "e2e_collect_rollouts",
        ["mcqa", "vllm:http://h/v1#x"],
        "mcqa: write +environment=mcqa\n  vllm:http://h/v1#x: write '+",
    ),
    ("prepare_benchmark", ["gsm8k"], "gsm8k: write +benchmark=gsm8k"),
    ("prepare_benchmark", [], "name a benchmark, such as +benchmark=gsm8k or"),
    ("list_environments", ["math"], "math: write +query=math"),
    ("list_models", ["--json"], "--json: write +json=true"),
    ("list_models", ["+json"], "+json: write +json=true"),
    ("run", ["verbose"], "verbose: write +verbose=true"),
    ("help", ["ng_run"], "ng_run: write ng_run --help"),
    (
        "run",
        ["+environment", "=", "mcqa"],
        "+environment = mcqa: no space belongs around the =, write +environment=mcqa",
    ),
    ("run", ["+num_replicas=", "2"], "+num_replicas= 2: no space belongs around the =, write +num_replicas=2"),
    ("run", ["num_replicas", "=2"], "num_replicas =2: no space belongs around the =, write +num_replicas=2"),
    ("run", ["+num_replicas", "2"], "+num_replicas 2: no space belongs around the =, write +num_replicas=2"),
    (
        "run",
        ["+policy_api_key", "sk-1"],
        "+policy_api_key ****: no space belongs around the =, write +policy_api_key=<value>",
    ),
    ("validate", ["+enviroment=mcqa"], "unknown option 'enviroment'; did you mean 'environment'?"),
    ("run", ["+environment=mcqa"], "Add a model: +model=openai:<name>, +model=vllm:<url>#<name>, or +model=scripted"),
    ("run", [], "name an environment and a model, +environment=<name> +model=<model>"),
    ("run", ["+config_paths=[tab.yaml]"], "tab.yaml, line 2, column 1: a tab, where YAML wants spaces"),
    (
        "run",
        ["+config_paths=[rows.jsonl]"],
        "is no configuration, which is a YAML file; rows are given as +input_jsonl_fpath=",
    ),
    ("run", ["+config_paths=[folder]"], "(it is a folder); did you mean 'folder/configs/folder.yaml'? Looked for:"),
    (
        "run",
        [*MCQA, "+num_replicas=0"],
        "+num_replicas=0: expected int or text (a number of at least 1, auto, or auto:<at most>)\nSee",
    ),
    (
        "run",
        [*MCQA, "+num_replicas=auto:0"],
        "+num_replicas=auto:0: expected int or text (a number of at least 1, auto, or auto:<at most>)\nSee",
    ),
    ("e2e_collect_rollouts", [*MCQA, "+split=train"], "no data set of the type train, only of example; name"),
    (
        "e2e_collect_rollouts",
        [*MCQA, "+agent_name=mcqa"],
        "of the agent 'mcqa' of the type example, only of 'mcqa_simple_agent'; name",
    ),
    (
        "e2e_collect_rollouts",
        [*MCQA, "+output_jsonl_fpath=rows.jsonl/x.jsonl"],
        "rows.jsonl is a file, so there can be no folder",
    ),
    (
        "e2e_collect_rollouts",
        ["+environment=mcqa", "+model=scripted:promt.yaml"],
        "there is no such script; did you mean 'prompt.yaml'?",
    ),
    (
        "e2e_collect_rollouts",
        [*MCQA, "+responses_create_params.temperature=hot", "+responses_create_params.top_p=0.5"],
        "Error: +responses_create_params.temperature=hot: Input should be a valid number",
    ),
    (
        "collect_rollouts",
        [*ROWS, "+num_repeats=a:2"],
        "+num_repeats=a:2: expected int or {text: int}; in quotes, '+num_repeats={a:2}'",
    ),
    ("collect_rollouts", [*ROWS, "+num_repeats={a: x}"], "+num_repeats={a: x}: expected int or {text: int} ("),
    (
        "collect_rollouts",
        [*ROWS, "+prompt_config=prompt.txt"],
        "'prompt.txt': it is no mapping. It is YAML with a text `user`",
    ),
    (
        "collect_rollouts",
        [*ROWS, "+prompt_config=prompt.yaml"],
        "it has no `user` (is `usr` meant to be it?). It is YAML",
    ),
    ("prepare_data", [*MCQA[:1], "+mode=example", "+output_dirpath=d"], "; did you mean 'example_validation'?"),
    ("prepare_data", [*MCQA[:1], "+mode=example_validation", "+output_dirpath="], "+output_dirpath is empty; name the"),
    ("test", ["+entrypoint="], "+entrypoint=: name the folder of a server"),
    (
        "export",
        ["+input_jsonl_fpath=rows.jsonl", "+format=sft"],
        "See ng_export --help. It does not read +input_jsonl_fpath.",
    ),
    ("run", ["+benchmark=GSM8K"], "there is no such benchmark; did you mean 'gsm8k'?"),
    (
        "run",
        ["+environment=gsm8k"],
        "no such environment; that is the name of another thing: +benchmark=gsm8k.",
    ),
    ("run", ["+benchmark=mcqa"], "there is no such benchmark; that is the name of another thing: +environment=mcqa."),
    ("run", ["+environment=[mcqa,code_gen]"], "one name is wanted; what comes beside it goes into config_paths"),
    ("run", ["+config_paths=[a.yaml"], "'+config_paths=[a.yaml': its brackets are not closed, or not opened"),
    ("run", ["“+environment=mcqa”", "–model=scripted"], "–model=scripted: quotes or dashes of a word processor"),  # noqa: RUF001
    (
        "collect_rollouts",
        [*ROWS, "+num_samples_in_parallel=-3"],
        "-3 is less than 0; a number of rollouts is wanted, 0 for any number, or auto",
    ),
    (
        "collect_rollouts",
        [*ROWS, "+input_jsonl_fpath=https://h/x.jsonl"],
        "input_jsonl_fpath=https://h/x.jsonl: a path on this machine is wanted, no URL; copy",
    ),
    *(
        (name, [*arguments, f"+{option}=s3://bucket/x"], f"Error: {option}=s3://bucket/x: a path on this machine is")
        for name, arguments, option in [
            ("collect_rollouts", ROWS, "output_jsonl_fpath"),
            ("collect_rollouts", [*ROWS, "+detach=true"], "log_fpath"),
            ("collect_rollouts", [*ROWS, "+only=failed"], "of"),
            ("e2e_collect_rollouts", MCQA, "output_jsonl_fpath"),
            ("e2e_collect_rollouts", MCQA, "nemo_gym_log_dir"),
            ("e2e_collect_rollouts", [*MCQA, "+recording_mode=record"], "recording_folder"),
            ("e2e_collect_rollouts", MCQA, "prompt_config"),
            ("run", MCQA, "results_dir"),
            ("run", MCQA, "uv_venv_dir"),
            ("run", [*MCQA, "+observability_enabled=true"], "model_call_capture_dir"),
            ("prepare_data", [*MCQA[:1], "+mode=example_validation"], "output_dirpath"),
            ("aggregate_rollouts", ["+input_glob=rows.jsonl"], "output_jsonl_fpath"),
            ("aggregate_rollouts", ["+output_jsonl_fpath=a"], "input_glob"),
            ("reverify", ["+rollouts_jsonl_fpath=rows.jsonl"], "output_jsonl_fpath"),
            ("materialize_prompts", [*ROWS[:1], "+prompt_config=p"], "output_jsonl_fpath"),
            ("export", ["+rollouts_jsonl_fpath=rows.jsonl", "+format=sft"], "output_fpath"),
            ("check_rollouts", [], "input"),
            ("view", [], "path"),
            ("compare", ["+runs=[rows.jsonl,rows.jsonl]"], "junit"),
        ]
    ),
    ("view", ["+path=rows.jsonl", "+export=s3://bucket/x.html"], "export=s3://bucket/x.html: a path on this machine"),
    ("aggregate_rollouts", ["+output_jsonl_fpath=a", "+input_glob=a,file:///b/*"], "input_glob=file:///b/*: a path on"),
    ("compare", ["+runs=[rows.jsonl,gs://key:secret@bucket/b.jsonl]"], "runs=gs://****@bucket/b.jsonl: a path on this"),
    ("run", ["+config_paths=[https://host/c.yaml]"], "config_paths=https://host/c.yaml: a path on this machine"),
    ("attach", ["+path=results"], "Error: ng_attach does not read +path; it takes +run\n"),
    ("control", ["+path=results", "+pause=true"], "ng_control does not read +path; it takes +run, +set, +pause,"),
    ("view", ["+paths=x"], "unknown option 'paths'; did you mean 'path'?"),
    ("list_models", ["+querry=x", "+limit=2"], "unknown option 'querry'; did you mean 'query'?"),
    ("list_models", ["+limit=2"], "ng_list_models does not read +limit; it takes +query, +json\n"),
    ("test", ["+entrypoint=mcqa"], "responses_api_agents; did you mean 'resources_servers/mcqa'?"),
]


@pytest.mark.parametrize(("name", "arguments", "answer"), MISTAKES)
def test_a_mistake_is_answered_before_anything_happens(
    name: str, arguments: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    command = command_named(name)

    with pytest.raises(SystemExit) as ended:
        command.run(arguments)

    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert answer in printed.err
    assert "Traceback" not in printed.err
    assert "sk-1" not in printed.err
    assert printed.out == ""
    assert sorted(tmp_path.rglob("*")) == before
