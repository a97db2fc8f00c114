"""Components in the idioms of the original's newest version, as their authors write them."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import aiohttp
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from omegaconf import OmegaConf

from nemo_gym import PARENT_DIR, _resolve_under_cwd_or_install
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.base_responses_api_model import (
    CaptureStore,
    ModelCallCaptureConfig,
    SimpleResponsesAPIModel,
    _CaptureMiddleware,
    install_model_call_capture,
    observability_enabled_from_config,
)
from nemo_gym.cli import RunConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.path_utils import aggregate_metrics_path_for, materialized_path_for
from nemo_gym.responses_converter import ResponsesConverter, VLLMConverter, _usage_detail
from nemo_gym.rollout_collection import NG_TRAJECTORY_KEY, _attach_trajectory_record
from nemo_gym.rollout_observability import TrajectoryRecord
from nemo_gym.sandbox.utils import CPU_CAP_ENV_VARS, cpu_cap_env
from nemo_gym.schemas.openai_chat import NeMoGymChatCompletion
from nemo_gym.server_utils import BaseServer, ServerClient, SimpleServer, raise_for_status, request
from nemo_gym.token_id_capture import current_capture_context
from nemo_gym.train_data_utils import TrainDataProcessor, TrainDataProcessorConfig
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig
from tests.ports import free_port

ASKED = NeMoGymResponseCreateParamsNonStreaming(input="hi")


def completion(text: str) -> NeMoGymChatCompletion:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return NeMoGymChatCompletion.model_validate({"id": "c", "created": 7, "model": "m", "choices": [choice]})


def test_a_component_that_declares_ray_enabled_without_annotation_serves() -> None:
    class Quiz(SimpleResourcesServer):
        ray_enabled = False

        config: BaseResourcesServerConfig

        async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
            return BaseVerifyResponse(**body.model_dump(), reward=1.0)

    config = BaseResourcesServerConfig(host="127.0.0.1", port=0, entrypoint="app.py", name="quiz", domain="other")
    quiz = Quiz(config=config, server_client=MagicMock(spec=ServerClient))

    with TestClient(quiz.setup_webserver()) as caller:
        assert caller.post("/seed_session", json={}).status_code == 200
    assert (Quiz.ray_enabled, quiz.ray_enabled) == (False, False)
    assert "ray_enabled" not in Quiz.model_fields


@pytest.mark.parametrize(
    "base", [BaseServer, SimpleServer, SimpleResourcesServer, SimpleResponsesAPIAgent, SimpleResponsesAPIModel]
)
def test_every_kind_of_server_may_say_whether_it_uses_ray(base: type[BaseServer]) -> None:
    says_yes = type("SaysYes", (base,), {"ray_enabled": True, "__module__": __name__})

    assert vars(says_yes)["ray_enabled"] is True
    assert base.ray_enabled is None


def ids_of(response: Any) -> list[str]:
    return [response.id, *(item.id for item in response.output)]


def test_replacing_uuid4_of_the_converters_module_changes_the_ids_of_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nemo_gym.responses_converter.uuid4", lambda: SimpleNamespace(hex="123"))

    response = VLLMConverter(return_token_id_information=False).chat_completion_to_response(
        ASKED, completion("<think>Hm.</think>Yes.")
    )

    assert ids_of(response) == ["resp_123", "rs_123", "msg_123"]


@pytest.mark.parametrize("module", ["nemo_gym.responses_converter", "responses_api_models.vllm_model.app"])
def test_replacing_uuid4_in_either_module_changes_the_ids_of_vllm_model(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setattr(f"{module}.uuid4", lambda: SimpleNamespace(hex="123"))
    config = VLLMModelConfig(
        host="127.0.0.1",
        port=0,
        entrypoint="app.py",
        name="policy_model",
        base_url="http://127.0.0.1:1/v1",
        api_key="key",
        model="m",
        return_token_id_information=False,
        uses_reasoning_parser=False,
    )
    model = VLLMModel(config=config, server_client=MagicMock(spec=ServerClient))
    model._clients = [MagicMock(spec=NeMoGymAsyncOpenAI)]
    model._clients[0].create_chat_completion = AsyncMock(  # type: ignore[method-assign]
        return_value=completion("Yes.").model_dump()
    )

    response = asyncio.run(model.responses(MagicMock(session={"session_id": "s"}), ASKED))

    assert ids_of(response) == ["resp_123", "msg_123"]


def test_a_converters_attributes_can_be_set() -> None:
    converter = ResponsesConverter(return_token_id_information=False)
    items = completion("<think>Hm.</think>Yes.").choices[0]

    converter.uses_reasoning_parser = False
    assert [item.type for item in converter.postprocess_chat_response(items)] == ["message"]
    converter.uses_reasoning_parser = True
    assert [item.type for item in converter.postprocess_chat_response(items)] == ["reasoning", "message"]


def test_converters_take_reasoning_out_of_text_and_put_it_back() -> None:
    converter = VLLMConverter(return_token_id_information=False)

    assert converter._extract_reasoning_from_content("a<think>b</think>c<think>d\n</think>") == (["b", "d\n"], "ac")
    assert converter._extract_reasoning_from_content("no tags") == ([], "no tags")
    assert converter._wrap_reasoning_in_think_tags(["b", "", "d"]) == "<think>b</think><think>d</think>"
    assert converter._wrap_reasoning_in_think_tags([]) == ""


def test_a_converter_that_writes_reasoning_in_its_own_way_is_asked_both_ways() -> None:
    class Bracketed(ResponsesConverter):
        def _extract_reasoning_from_content(self, content: str) -> tuple[list[str], str]:
            thought, end, said = content.removeprefix("[THINK]").partition("[/THINK]")
            return ([thought], said) if end else ([], content)

        def _wrap_reasoning_in_think_tags(self, texts: Sequence[str]) -> str:
            return "".join(f"[THINK]{text}[/THINK]" for text in texts)

    converter = Bracketed(return_token_id_information=False)

    output = converter.chat_completion_to_response(ASKED, completion("[THINK]Hm.[/THINK]Yes.")).output
    again = converter.responses_to_chat_completion_create_params(
        NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": [item.model_dump() for item in output]})
    )

    assert [item.type for item in output] == ["reasoning", "message"]
    assert [*again.messages] == [{"role": "assistant", "content": "[THINK]Hm.[/THINK]Yes."}]


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 3}, "cached_input_tokens": 9}, 3),
        (SimpleNamespace(prompt_tokens_details=SimpleNamespace(cached_tokens=3)), 3),
        ({"prompt_tokens_details": None, "cached_input_tokens": 0, "cache_read_input_tokens": 9}, 0),
        (SimpleNamespace(prompt_tokens_details={"cached_tokens": None}, cache_read_input_tokens=4), 4),
        ({"cached_input_tokens": "many"}, None),
        (None, None),
    ],
)
def test_usage_details_are_found_in_their_group_or_under_an_alias(usage: Any, expected: int | None) -> None:
    aliases = ("cached_input_tokens", "cache_read_input_tokens")

    assert _usage_detail(usage, "prompt_tokens_details", "cached_tokens", *aliases) == expected


@pytest.mark.parametrize("order", [("row", "result"), ("result", "row"), ("result",)])
def test_a_driver_of_its_own_attaches_trajectories_to_results(order: tuple[str, ...]) -> None:
    row = {"_ng_task_index": 3, "_ng_rollout_index": 1, "instance_id": "fix-the-build"}
    call = {"model_call_id": "call-1", "call_index": 0, "tokens_out": 5, "request": {"input": "hi"}, "response": {}}
    capture = {"rollout_id": "3-1", "metrics": {}, "calls": [call]}
    result = {**row, "reward": 1.0, "ng_model_call_capture": capture}
    given = {"row": row, "result": result}

    _attach_trajectory_record(*(given[name] for name in order))

    trajectory = TrajectoryRecord.model_validate(result[NG_TRAJECTORY_KEY])
    assert (trajectory.task_id, trajectory.rollout_id) == ("fix-the-build", "3-1")
    assert [each.token_stats.completion_tokens for each in trajectory.model_calls] == [5]
    assert NG_TRAJECTORY_KEY not in row


def test_a_result_without_captured_calls_gets_no_trajectory() -> None:
    result = {"_ng_task_index": 3, "_ng_rollout_index": 1, "reward": 1.0}

    _attach_trajectory_record({}, result)

    assert result == {"_ng_task_index": 3, "_ng_rollout_index": 1, "reward": 1.0}


@pytest.mark.parametrize("how", ["added", "installed"])
def test_an_app_of_their_own_has_its_model_calls_captured(tmp_path: Path, how: str) -> None:
    app = FastAPI()

    @app.post("/v1/responses")
    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        return {"output": [], "asked": body["input"]}

    if how == "added":
        app.add_middleware(_CaptureMiddleware, store=CaptureStore(tmp_path), model_server_name="policy")
    else:
        config = ModelCallCaptureConfig(observability_enabled=True, model_call_capture_dir=tmp_path)
        install_model_call_capture(app, config, model_server_name="policy")
    with TestClient(app) as caller:
        named = caller.post("/ng-rollout/3-1/v1/responses", json={"input": "hi"})
        nameless = caller.post("/v1/responses", json={"input": "again"})

    assert [*map(attrgetter("cls"), app.user_middleware)] == [_CaptureMiddleware]
    assert (named.json()["asked"], nameless.json()["asked"]) == ("hi", "again")
    assert [call["request"] for call in CaptureStore(tmp_path).read("3-1")] == [{"input": "hi"}]
    assert [path.name for path in tmp_path.iterdir()] == ["3-1.capture.jsonl"]


def test_without_a_store_the_capture_only_takes_the_prefix_off() -> None:
    app = FastAPI()
    app.add_middleware(_CaptureMiddleware)
    app.post("/v1/responses")(lambda: {"output": []})

    with TestClient(app) as caller:
        assert caller.post("/ng-rollout/3-1/v1/responses").json() == {"output": []}


def test_arguments_can_be_built_without_a_folder_for_steps_that_need_none(tmp_path: Path) -> None:
    (tmp_path / "demo.jsonl").write_text('{"responses_create_params": {"input": "hi"}}\n')
    dataset = {"name": "demo", "type": "example", "jsonl_fpath": str(tmp_path / "demo.jsonl")}
    agent = {"simple_agent": {"entrypoint": "app.py", "datasets": [dataset]}}
    config = TrainDataProcessorConfig(output_dirpath="", mode="example_validation")
    processor = TrainDataProcessor()

    agents = processor.load_and_validate_server_instance_configs(
        config, OmegaConf.create({"demo_agent": {"responses_api_agents": agent}})
    )
    metrics = processor.validate_samples_and_aggregate_metrics(agents)

    assert metrics["example"].number_of_examples == 1
    assert RunConfig(entrypoint="").entrypoint == ""


def test_small_helpers_that_components_import_do_what_their_names_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = {"host": "127.0.0.1", "port": 81, "entrypoint": "app.py"}
    servers = OmegaConf.create({"policy": {"responses_api_models": {"vllm_model": block}}})
    client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=80), global_config_dict=servers)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiz.yaml").write_text("")

    assert client._resolve_base_url("policy") == "http://127.0.0.1:81"
    assert cpu_cap_env(None) == {}
    assert cpu_cap_env(2.9) == dict.fromkeys(CPU_CAP_ENV_VARS, "2")
    assert cpu_cap_env(0.5)["OMP_NUM_THREADS"] == "1"
    assert _resolve_under_cwd_or_install("quiz.yaml") == tmp_path / "quiz.yaml"
    assert _resolve_under_cwd_or_install("nemo_gym", validator=Path.is_dir) == PARENT_DIR / "nemo_gym"
    assert materialized_path_for("out/r.jsonl") == Path("out/r_materialized_inputs.jsonl")
    assert aggregate_metrics_path_for("out/r.jsonl") == Path("out/r_aggregate_metrics.json")
    assert observability_enabled_from_config(OmegaConf.create({"observability_enabled": True}))
    assert not observability_enabled_from_config(MagicMock())
    assert current_capture_context() is None


def test_a_request_is_tried_as_often_as_its_caller_says_and_its_error_names_the_server() -> None:
    url = f"http://127.0.0.1:{free_port()}/"

    with pytest.raises(aiohttp.ClientError, match=r"'policy', .* \(tries: 2, "):
        asyncio.run(request("GET", url, _internal=True, _max_connection_retries=1, _server_name="policy"))


def test_an_error_carries_the_body_that_its_caller_has_read() -> None:
    answer = MagicMock(ok=False, status=503, headers={}, method="GET")

    with pytest.raises(aiohttp.ClientResponseError) as raised:
        asyncio.run(raise_for_status(answer, b"busy"))

    assert (raised.value.status, raised.value.response_content) == (503, b"busy")  # type: ignore[attr-defined]
    answer.read.assert_not_called()
