"""Short ways are the long way in fewer words: the same configuration, the same rollouts."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym.cli.command import command_named
from nemo_gym.cli.config import load_config
from nemo_gym.cli.shortcuts import expand, shown_expansion
from nemo_gym.errors import ConfigError, UnknownOptionError
from nemo_gym.runs.options import E2ERolloutCollectionConfig, RolloutCollectionConfig
from nemo_gym.schemas.cli_config import DumpConfigConfig, RunConfig
from tests.programs import run_program

dump_config = command_named("dump_config")
validate = command_named("validate")


Script = Callable[..., subprocess.CompletedProcess[str]]
GSM8K = "benchmarks/gsm8k/config.yaml"
MCQA = "resources_servers/mcqa/configs/mcqa.yaml"
OPENAI = "responses_api_models/openai_model/configs/openai_model.yaml"
VLLM = "responses_api_models/vllm_model/configs/vllm_model.yaml"
SCRIPTED = "responses_api_models/scripted_model/configs/scripted_model.yaml"


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "AZURE_OPENAI_API_KEY", "OPENROUTER_API_KEY", "NVIDIA_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def config_of(*arguments: str) -> Any:
    config: Any = dict(load_config(arguments, DumpConfigConfig, dump_config.loading))
    for name, block in config.items():  # ports are chosen anew each time
        for inner in block.values() if hasattr(block, "values") and name != "head_server" else ():
            for settings in inner.values() if hasattr(inner, "values") else ():
                if hasattr(settings, "pop"):
                    settings.pop("port", None)
    config.pop("disallowed_ports")
    return config


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["+benchmark=gsm8k", "+model=scripted"], [f"+config_paths=[{GSM8K},{SCRIPTED}]"]),
        (
            ["+environment=mcqa", "+model=vllm:http://host:8000/v1#org/name"],
            [
                f"+config_paths=[{MCQA},{VLLM}]",
                "+policy_base_url=http://host:8000/v1",
                "+policy_model_name=org/name",
                "+policy_api_key=EMPTY",
            ],
        ),
        (
            ["+benchmark=gsm8k", "+model=openai:gpt-x:free", "+policy_api_key=k"],
            [
                f"+config_paths=[{GSM8K},{OPENAI}]",
                "+policy_base_url=https://api.openai.com/v1",
                "+policy_model_name=gpt-x:free",
                "+policy_api_key=k",
            ],
        ),
        (
            ["+config_paths=[" + MCQA + "]", "+model=vllm:http://a/v1,http://b/v1#n", "+policy_api_key=k"],
            [
                f"+config_paths=[{MCQA},{VLLM}]",
                "+policy_base_url=[http://a/v1,http://b/v1]",
                "+policy_model_name=n",
                "+policy_api_key=k",
            ],
        ),
        (
            ["+environment=mcqa", "+model=scripted:scripts/my own.yaml", "++mcqa.resources_servers.mcqa.x=1"],
            [
                f"+config_paths=[{MCQA},{SCRIPTED}]",
                "++policy_model.responses_api_models.scripted_model.script='scripts/my own.yaml'",
                "++mcqa.resources_servers.mcqa.x=1",
            ],
        ),
    ],
)
def test_a_short_way_is_the_configuration_of_the_long_way(short: list[str], long: list[str], tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/my own.yaml").touch()
    assert config_of(*short) == config_of(*long)


def test_what_env_yaml_lists_is_kept_and_what_it_sets_gives_way_to_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text(f"config_paths: [{MCQA}]\npolicy_model_name: former\npolicy_api_key: k\n")
    config = config_of("+model=openai:later")
    assert config["config_paths"] == [MCQA, OPENAI]
    assert (config["policy_model_name"], config["policy_api_key"]) == ("later", "k")


def test_a_key_goes_nowhere_but_where_it_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    assert config_of("+model=openai:x")["policy_api_key"] == "of-openai"
    assert config_of("+model=vllm:http://elsewhere/v1#x")["policy_api_key"] == "EMPTY"
    with pytest.raises(ConfigError, match=r"needs an API key: give it as .*any text will do"):
        expand(["+model=openai:http://elsewhere/v1#x"], RunConfig)
    (tmp_path / "env.yaml").write_text("policy_base_url: https://mine/v1\npolicy_api_key: of-mine\n")
    assert config_of("+model=openai:x")["policy_base_url"] == "https://mine/v1"
    assert config_of("+model=openai:https://mine/v2#x")["policy_api_key"] == "of-mine"
    assert config_of("+model=vllm:http://elsewhere/v1#x")["policy_api_key"] == "EMPTY"
    with pytest.raises(ConfigError, match="in your files is for another policy_base_url"):
        expand(["+model=openai:http://elsewhere/v1#x"], RunConfig)
    monkeypatch.setenv("OPENROUTER_API_KEY", "of-router")
    assert config_of("+model=openrouter:org/x")["policy_api_key"] == "of-router"


def test_a_missing_key_is_one_line_where_servers_start_and_left_open_where_they_do_not(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        validate.run(["+benchmark=gsm8k", "+model=openai:gpt-x"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("Error: +model=openai:gpt-x needs an API key: export OPENAI_API_KEY=<key>, or ")
    assert error.count("\n") == 1
    shown = script("ng_dump_config", "+benchmark=gsm8k", "+model=openai:gpt-x")
    assert shown.returncode == 0, shown.stderr
    first, *rest = shown.stdout.splitlines()
    assert first == (
        "# +benchmark=gsm8k +model=openai:gpt-x stands for "
        f"'+config_paths=[{GSM8K},{OPENAI}]' +policy_model_name=gpt-x +policy_base_url=https://api.openai.com/v1 "
        "'+policy_api_key=****'"
    )
    assert yaml.safe_load("\n".join(rest))["policy_model_name"] == "gpt-x"


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("+model=gpt-4o", "no model server is called 'gpt-4o'; did you mean openai:gpt-4o? "),
        ("+model=http://h:8000/v1", "no model server is called 'http'; did you mean vllm:http://h:8000/v1#<name>? "),
        ("+model=vlm:http://h/v1#x", "no model server is called 'vlm'; did you mean 'vllm'? "),
        ("+model=vllm:http://h:8000/v1", "it names no model. "),
        ("+model=vllm:name", "it does not say where the model is. "),
        ("+model=vllm:h:8000/v1#x", "a URL begins with http:// or https://. "),
        ("+model=vllm:#x", "a URL stands before the # and a name after it. "),
        ("+model=vllm:http://u:hunter2@h/v1", "it names no model. "),
        ("+model=openai:", "nothing follows the colon. "),
        ("+model=openai", "it names no model. "),
        ("+model=nvidia:http://h/v1#x", "its models are at one place, which needs no URL. "),
        ("+model=my.yaml", 'a config file is given as "+config_paths=[my.yaml]". '),
        ("+model=5", "no model server is called '5'; did you mean openai:5? "),
        ("+model=", "no model server is called ''. "),
    ],
)
def test_a_model_of_the_wrong_shape_is_answered_with_the_shapes(argument: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        expand([argument], RunConfig)
    message = str(refused.value)
    assert f": {complaint}A model is written as openai:<name> or openai:<url>#<name>, vllm:<url>#<name>, " in message
    assert "\n" not in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "+benchmark=gsm8",
            "+benchmark=gsm8: there is no such benchmark; did you mean 'gsm8k'? ng_list_benchmarks lists them",
        ),
        (
            "+environment=weather",
            "+environment=weather: there is no such environment. ng_list_environments lists them",
        ),
        (
            "+benchmark=my/config.yaml",
            "+benchmark=my/config.yaml: there is no such benchmark; a config file is given as "
            '"+config_paths=[my/config.yaml]". ng_list_benchmarks lists them',
        ),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_the_list(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        expand([argument], RunConfig)
    assert str(refused.value) == message


def test_what_is_said_twice_must_agree() -> None:
    short = "+model=vllm:http://u:hunter2@h/v1#x"
    with pytest.raises(ConfigError) as refused:
        expand([short, "+policy_base_url=http://other/v1"], RunConfig)
    assert str(refused.value) == (
        "+model=vllm:http://u:****@h/v1#x and +policy_base_url=http://other/v1 contradict each other; "
        "leave one of them out"
    )
    assert "+policy_model_name=x" in expand([short, "+policy_model_name=x"], RunConfig)
    own = expand(["+model=openai:x", "+policy_base_url=http://other/v1", "+policy_api_key=k"], RunConfig)
    assert own == [f"+config_paths=[{OPENAI}]", "+policy_model_name=x", *own[2:]]
    assert own[2:] == ["+policy_base_url=http://other/v1", "+policy_api_key=k"]
    with pytest.raises(ConfigError, match=r"'policy_model' is responses_api_models/\w+ in .* and responses"):
        config_of("+environment=mcqa/mcqa_scripted", "+model=vllm:http://h/v1#x")


def test_keys_of_the_same_name_in_configs_keep_their_meaning(tmp_path: Path) -> None:
    (tmp_path / "mapping.yaml").write_text("model: {size: 1}\nsize: ${model.size}\n")
    (tmp_path / "text.yaml").write_text("environment: staging\nplace: ${environment}\n")
    (tmp_path / "wanted.yaml").write_text("place: ${benchmark}\n")
    assert config_of("+config_paths=[text.yaml]", "+environment=mcqa")["place"] == "mcqa"
    assert config_of("+config_paths=[wanted.yaml]", "+benchmark=gsm8k")["place"] == "gsm8k"
    # `${model.size}` makes `model` a name that the file refers to: text replaces it, as it always did
    assert config_of("+config_paths=[mapping.yaml]", "+model.size=2")["size"] == 2
    (tmp_path / "mapping.yaml").write_text("model: {size: 1}\n")
    config = config_of("+config_paths=[mapping.yaml]", "+model=scripted")
    assert config["model"] == {"size": 1}
    assert "policy_model" in config
    with pytest.raises(UnknownOptionError, match="unknown option 'model'"):
        config_of("+model={a: 1}")


def test_commands_without_servers_of_their_own_say_where_a_short_way_belongs(script: Script) -> None:
    refused = script("ng_status", "+model=openai:x")
    assert refused.returncode == 2
    assert "unknown option 'model'; did you mean 'policy_model_name'? As one word (+model=<name>)" in refused.stderr
    flag = script("ng_run", "--model", "gpt-x", "--benchmark", "gsm8k")
    assert flag.returncode == 2
    assert "--model gpt-x: write +model=openai:gpt-x\n  --benchmark gsm8k: write +benchmark=gsm8k" in flag.stderr


def test_one_line_implies_the_split_and_the_output_unless_they_are_given(tmp_path: Path) -> None:
    def implied(*arguments: str) -> set[str]:
        expanded = expand([*arguments, "+policy_api_key=k"], E2ERolloutCollectionConfig)
        return {argument for argument in expanded if argument.startswith(("+split", "+output"))}

    gsm8k = "+benchmark=gsm8k"
    assert implied(gsm8k, "+model=openai:org/gpt x") == {
        "+split=benchmark",
        "+output_jsonl_fpath=results/gsm8k/org_gpt_x.jsonl",
    }
    assert implied("+environment=mcqa", "+model=scripted") == {
        "+split=example",
        "+output_jsonl_fpath=results/mcqa/scripted.jsonl",
    }
    assert implied(gsm8k, "+split=train", "+output_jsonl_fpath=o.jsonl") == {
        "+split=train",
        "+output_jsonl_fpath=o.jsonl",
    }
    assert implied("+model=scripted") == set()
    (tmp_path / "env.yaml").write_text("output_jsonl_fpath: mine.jsonl\nsplit: train\n")
    assert implied(gsm8k) == set()
    assert expand(["+benchmark=x", "+limit=1"], RolloutCollectionConfig) == ["+benchmark=x", "+limit=1"]
    assert shown_expansion(["+limit=1"], DumpConfigConfig) is None


def test_components_of_extra_roots_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "extra"
    for path in (
        "resources_servers/group/shop/configs/shop.yaml",
        "resources_servers/mcqa/configs/mcqa.yaml",
        "responses_api_models/oracle/configs/only_one.yaml",
    ):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text("a: 1\n")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(root))
    assert expand(["+environment=group/shop", "+model=oracle:http://h/v1#x"], RunConfig) == [
        "+config_paths=[resources_servers/group/shop/configs/shop.yaml,"
        "responses_api_models/oracle/configs/only_one.yaml]",
        "+policy_base_url=http://h/v1",
        "+policy_model_name=x",
    ]


def run_e2e(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    done = run_program("ng_e2e_collect_rollouts", *arguments, "+head_server.port=0", "+json=true", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    output = tmp_path / json.loads(done.stdout)["output_jsonl_fpath"]
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_one_line_collects_rollouts_with_the_scripted_model(tmp_path: Path) -> None:
    rollouts = run_e2e(tmp_path, "+environment=example_single_tool_call", "+model=scripted", "+limit=2")
    assert [each["reward"] for each in rollouts] == [1.0, 1.0]
    assert (tmp_path / "results/example_single_tool_call/scripted_aggregate_metrics.json").is_file()


@pytest.fixture
def vllm() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint that answers as vLLM does, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"object": "list", "data": [{"id": "org/tiny", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"path": self.path, "key": self.headers["Authorization"], "model": body["model"]})
            message = {"role": "assistant", "content": "Answer: A"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            self._answer(
                {
                    "id": "c",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "m",
                    "choices": [choice],
                    "usage": usage,
                }
            )

        def _answer(self, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()


def test_one_line_collects_rollouts_from_an_endpoint(tmp_path: Path, vllm: tuple[str, list[dict[str, Any]]]) -> None:
    url, asked = vllm
    rollouts = run_e2e(tmp_path, "+environment=mcqa", f"+model=vllm:{url}#org/tiny", "+limit=2")
    assert len(rollouts) == 2
    assert (tmp_path / "results/mcqa/org_tiny.jsonl").is_file()
    assert asked == [{"path": "/v1/chat/completions", "key": "Bearer EMPTY", "model": "org/tiny"}] * 2
