"""Requests of any shape to every server of this distribution, made up from what each says it takes or from real ones.

A server answers, says in its log why when it answers 500, and is still there afterwards.
"""

import copy
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from nemo_gym import global_config
from nemo_gym.cli import RunHelper
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.http.addresses import Address, fetch
from nemo_gym.keys import AGENTS_TYPE, MODELS_TYPE, RESOURCES_TYPE
from nemo_gym.launch.plan import BUNDLED
from nemo_gym.paths import PARENT_DIR
from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.token_model.tests.stand_in import StandInEngine, serving, tokenizer_folder, tool_user
from tests.fuzz.bad_values import TEXT, json_trees

HEAD = "head_server"
NAMES = [HEAD, *sorted(implementation for _, implementation in BUNDLED)]
SAMPLE = [HEAD, "scripted_model", "example_single_tool_call", "simple_agent"]
"""The servers that the ordinary suite asks what their own description allows: making such requests up takes long."""
FEW_DESCRIBED, FEW_CHANGED = 3, 5
ANSWER_TIMEOUT_S = 60.0
LOG_TIMEOUT_S = 60.0
TOLD = re.compile(r"^(?:Warning|Error): (?:… (\d+) more like this)?|\(… (\d+) more like this\)$", re.MULTILINE)
"""What says, in a line, that something was refused or failed, or how many more there were."""
ENDPOINT = {
    "litellm_model": ("openai_base_url", "openai_api_key", "openai_model"),
    "openai_model": ("openai_base_url", "openai_api_key", "openai_model"),
    "azure_openai_model": ("openai_base_url", "openai_api_key", "openai_model"),
    "inference_provider": ("base_url", "api_key", "model"),
    "token_model": ("base_url", "api_key", "model"),
    "vllm_model": ("base_url", "api_key", "model"),
}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1.0,
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
SHORT = {"code_gen": {"num_processes": 1, "unit_test_timeout_secs": 2}, "remote_agent": {"timeout_s": 20}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def config_of(folder: Path, engine: str) -> dict[str, Any]:
    """One instance of everything: models behind the scripted one or the engine, agents on the simplest environment."""
    model_port = free_port()
    agent_port = free_port()
    judge = {"type": MODELS_TYPE, "name": "scripted_model"}
    environment = {"type": RESOURCES_TYPE, "name": "example_single_tool_call"}
    config: dict[str, Any] = {
        HEAD: {"port": free_port()},
        "nemo_gym_log_dir": str(folder / "logs"),
        "model_retry_max_tries": 1,
        "http_retry_max_tries": 2,
    }
    for server_type, name in BUNDLED:
        block: dict[str, Any] = {"entrypoint": "app.py", "isolation": "hosted", **SHORT.get(name, {})}
        if server_type == AGENTS_TYPE:
            block |= {"resources_server": environment, "model_server": judge}
        if server_type == RESOURCES_TYPE:
            block |= {"domain": "other"}
        for key, value in zip(ENDPOINT.get(name, ()), (f"http://127.0.0.1:{model_port}/v1", "key", "m"), strict=False):
            block[key] = value
        config[name] = {server_type: {name: block}}

    def of(name: str) -> dict[str, Any]:
        block: dict[str, Any] = next(iter(next(iter(config[name].values())).values()))
        return block

    of("scripted_model")["port"] = model_port
    of("simple_agent")["port"] = agent_port
    of("remote_agent")["url"] = f"http://127.0.0.1:{agent_port}"
    of("function_agent")["function"] = "responses_api_agents.function_agent.examples.ask_twice:run"
    for name in ("math_with_judge", "equivalence_llm_judge"):
        of(name).update(judge_model_server=judge, judge_responses_create_params={"input": []})
    of("azure_openai_model")["default_query"] = {"api-version": "1"}
    of("vllm_model")["return_token_id_information"] = False
    of("litellm_model")["openai_base_url"] = f"{engine}/v1"
    of("token_model").update(base_url=f"{engine}/v1", tokenizer=str(folder / "tokenizer"))
    for name in ("azure_openai_model", "inference_provider", "vllm_model"):
        of(name)["uses_reasoning_parser"] = True  # the scripted model splits reasoning off
    return config


@dataclass
class Servers:
    """Everything of this distribution, running."""

    addresses: dict[str, Address]
    logs: Path
    refused: int = 0
    """How many requests were not understood or failed."""

    def told(self) -> int:
        """About how many of them there is a word in a log; those alike are only counted there, after some seconds."""
        texts = [path.read_text() for path in self.logs.glob("*.log")]
        return sum(int(more or since or 1) for text in texts for more, since in TOLD.findall(text))

    def description(self, name: str) -> dict[str, Any]:
        """What a server says it answers."""
        status, body = fetch(self.addresses[name], "/openapi.json", ANSWER_TIMEOUT_S)
        assert status == 200
        described: dict[str, Any] = json.loads(body)
        return described

    def judge(self, status: int, text: str) -> None:
        """A server fails only because another one refused, and then says so in its answer and in a log."""
        if status >= 500:
            assert "calling an inner server" in json.loads(text), text
        self.refused += status >= 500 or status == 422


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    tokenizer = ChatTokenizer(tokenizer_folder(folder / "tokenizer"))
    helper = RunHelper()
    before = global_config._GLOBAL_CONFIG_DICT
    app = StandInEngine(tokenizer, tool_user("get_weather", "{}", rounds=1, thinks=True)).app()
    app.get("/health/readiness/details")(lambda: {"litellm_version": "1.83.0"})
    app.post("/v1/responses")(lambda: RESPONSE)
    with serving(app) as engine:
        try:
            config = OmegaConf.create(config_of(folder, engine))
            helper.start(GlobalConfigDictParserConfig(initial_global_config_dict=config, skip_load_from_dotenv=True))
            instances = helper._fleet.instances() if helper._fleet is not None else []
            addresses = {str(each.process_name): Address(str(each.host), int(each.port or 0)) for each in instances}
            head = helper._server_client.head_server_config
            servers = Servers({HEAD: Address(head.host, head.port), **addresses}, folder / "logs")
            yield servers
            deadline = time.monotonic() + LOG_TIMEOUT_S
            while servers.told() < servers.refused:
                assert time.monotonic() < deadline, f"{servers.refused} failures, and {servers.told()} in the logs"
                time.sleep(0.05)
        finally:
            helper.shutdown()
            global_config._GLOBAL_CONFIG_DICT = before


@dataclass(frozen=True)
class Amount:
    """How many requests, and which."""

    examples: int | None
    seed: int | None

    def of(self, few: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Bound a test that makes requests up."""
        bounds = settings(
            max_examples=self.examples or few, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        return lambda test: seed(self.seed or 0)(bounds(test))


@pytest.fixture
def amount(pytestconfig: pytest.Config) -> Amount:
    return Amount(pytestconfig.getoption("--fuzz-examples"), pytestconfig.getoption("--fuzz-seed"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "described" in metafunc.fixturenames:
        metafunc.parametrize("described", NAMES if metafunc.config.getoption("--fuzz-examples") else SAMPLE)


def test_a_server_answers_what_its_description_allows_and_what_it_forbids(
    servers: Servers, described: str, amount: Amount
) -> None:
    address = servers.addresses[described]
    schema = schemathesis.openapi.from_dict(servers.description(described))
    for operation in (result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)):
        modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.body else [])]
        requests = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

        @amount.of(FEW_DESCRIBED)
        @given(case=requests)
        def ask(case: Any) -> None:
            answer = case.call(base_url=f"http://127.0.0.1:{address.port}", timeout=ANSWER_TIMEOUT_S)
            servers.judge(answer.status_code, answer.text)

        ask()
    assert fetch(address, "/health", ANSWER_TIMEOUT_S)[0] == 200


def real_requests(name: str, path: str) -> list[dict[str, Any]]:
    """Requests as they are sent to a path of a server in a real run."""
    params = {"input": [{"role": "user", "content": "?"}], "tools": [], "metadata": {"extra_body": "{}"}}
    text = {"type": "output_text", "text": "Answer: \\boxed{A}\n```python\nprint(4)\n```"}
    message = {"type": "message", "role": "assistant", "content": [text]}
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "x"}'}
    usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
    response = {
        "id": "r",
        "created_at": 1,
        "model": "m",
        "object": "response",
        "output": [call, message],
        "usage": usage,
    }
    scored = {"reward": 1.0, "score": 0.5, "follow_instruction_list": [True, False], "response": response}
    record = {"_ng_task_index": 0, "_ng_rollout_index": 0, **scored}
    rows = rows_of(name)
    known: dict[str, list[dict[str, Any]]] = {
        "/v1/responses": [params, {"input": "?"}],
        "/v1/chat/completions": [{"messages": params["input"], "model": "m"}],
        "/aggregate_metrics": [{"verify_responses": [record, {**record, "_ng_rollout_index": 1}]}],
        "/verify": [{**row, "response": response} for row in rows],
        "/run": rows,
    }
    return known.get(path, [*rows, {"city": "x", "count": 1, "synonym": "a", "synonym_values": [1, 2]}])


def rows_of(name: str) -> list[dict[str, Any]]:
    """The examples of an environment; for agents those of the environment they are in."""
    file = PARENT_DIR / "resources_servers" / name / "data" / "example.jsonl"
    if not file.is_file():
        file = PARENT_DIR / "resources_servers" / "example_single_tool_call" / "data" / "example.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))
WORDS = TEXT.filter(lambda text: "\ud800" not in text)


def similar(value: Any) -> st.SearchStrategy[Any]:
    """Something else of the same type."""
    if isinstance(value, bool) or value is None:
        return st.booleans()
    if isinstance(value, int | float):
        return NUMBERS
    if isinstance(value, str):
        return WORDS
    if isinstance(value, list):
        return st.sampled_from([[], value * 2, value[::-1], [*value, None]])
    return st.dictionaries(WORDS, json_trees(), max_size=2).map(lambda more: {**value, **more})


@st.composite
def changed(draw: st.DrawFn, bodies: list[dict[str, Any]]) -> Any:
    """One of `bodies` with something else somewhere in it: mostly of the same type, at times anything or nothing."""
    body = copy.deepcopy(draw(st.sampled_from(bodies)))
    node: Any = body
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return body
        key = draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not draw(st.integers(0, 4)):
            break
        node = node[key]
    how = draw(st.integers(0, 5))
    if how == 0:
        del node[key]
    else:
        node[key] = draw(json_trees() if how == 1 else similar(node[key]))
    return body


def post(address: Address, path: str, body: bytes) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_server_answers_requests_that_are_almost_real(servers: Servers, name: str, amount: Amount) -> None:
    address = servers.addresses[name]
    paths = [path for path, methods in servers.description(name)["paths"].items() if "post" in methods]
    for path in paths:
        bodies = changed(real_requests(name, path)).map(lambda body: json.dumps(body).encode())

        @amount.of(FEW_CHANGED)
        @given(body=st.one_of(bodies, bodies, bodies, bodies, st.binary()), path=st.just(path))
        def ask(body: bytes, path: str) -> None:
            servers.judge(*post(address, path, body))

        ask()
    assert fetch(address, "/health", ANSWER_TIMEOUT_S)[0] == 200
