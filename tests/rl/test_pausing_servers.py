"""Pauses by the servers' path: the model server stops, keeps the tokens of the endpoint, and goes on from them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml
from fastapi import Body, FastAPI
from fastapi.testclient import TestClient
from omegaconf import OmegaConf

from nemo_gym import global_config
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ConfigError
from nemo_gym.http.generation_gate import PAUSE_PATH
from nemo_gym.paths import PARENT_DIR
from nemo_gym.rl.batches import collate
from nemo_gym.rl.environment import NemoGym
from nemo_gym.rl.interfaces import Completion, DatumSpec, PromptGroupRecord
from nemo_gym.rl.rollout_manager import RolloutManager, RolloutTimeouts
from nemo_gym.server_utils import ServerClient
from responses_api_models.vllm_model.app import VLLMModel
from responses_api_models.vllm_model.config import VLLMModelConfig
from tests.rl.conftest import served

EXAMPLES = PARENT_DIR / "docs" / "examples"
PROMPT = [101, 102, 103]
ENDS_AFTER = 6
GROUP_SIZE = 3
ABORTABLE: dict[str, Any] = {"abort_path": "/abort_all", "resume_path": "/go_on"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}


class Engine:
    """An endpoint whose tokens are its version; it stops after two of them until told to abort, or to go on."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.version = 0
        self.is_slow = True
        self.tells_version = False
        self.waiting = 0
        self.told: list[str] = []
        self.chats = 0
        self.continued: list[dict[str, Any]] = []
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(body: dict[str, Any] = Body()) -> Any:
            self.chats += 1
            said, is_aborted = await self._generate(ENDS_AFTER)
            message = {"role": "assistant", "content": text_of(said)}
            content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in said]
            choice = {"message": message, "logprobs": {"content": content}, "token_ids": said}
            return self._answer(choice, said, is_aborted) | {"prompt_token_ids": PROMPT}

        @app.post("/v1/completions")
        async def complete(body: dict[str, Any] = Body()) -> Any:
            self.continued.append(body)
            said, is_aborted = await self._generate(ENDS_AFTER - len(body["prompt"]) + len(PROMPT))
            log_probs = {"tokens": [f"token_id:{it}" for it in said], "token_logprobs": [-0.25] * len(said)}
            choice = {"text": text_of(said), "logprobs": log_probs, "token_ids": said}
            return self._answer({**choice, "prompt_token_ids": body["prompt"]}, said, is_aborted)

        @app.post("/abort_all")
        async def abort() -> dict[str, Any]:
            self.told.append("abort")
            self._abort()
            return {}

        @app.post("/go_on")
        async def go_on() -> dict[str, Any]:
            self.told.append("go on")
            return {}

        return app

    def abort_from_outside(self) -> None:
        """What a trainer does that owns the engine."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        """End what is being generated now; what is asked for later is generated."""
        self._stop.set()
        self._stop = asyncio.Event()

    async def _generate(self, most: int) -> tuple[list[int], bool]:
        self._loop = asyncio.get_running_loop()
        token = 10 + self.version
        if self.is_slow:
            self.waiting += 1
            await self._stop.wait()
            return [token] * min(2, most), True
        return [token] * most, False

    def _answer(self, choice: dict[str, Any], said: list[int], is_aborted: bool) -> dict[str, Any]:
        counts = {"prompt_tokens": 3, "completion_tokens": len(said), "total_tokens": 3 + len(said)}
        choice = {"index": 0, "finish_reason": "abort" if is_aborted else "stop", **choice}
        told = {"metadata": {"weight_version": str(self.version)}} if self.tells_version else {}
        return {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": counts,
            **told,
        }


def text_of(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token - 10) for token in tokens)


class Runs:
    """Real servers in front of an engine, one run for each way to set the model server up."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._gyms: dict[str, tuple[Engine, NemoGym]] = {}

    def manager(
        self, tokenizer: Any, *, mask_interrupted: bool = False, num_replicas: int = 1, **settings: Any
    ) -> tuple[RolloutManager, Engine]:
        """A manager of a run with these settings of the model server, and its engine, as new."""
        key = repr((num_replicas, settings))
        if key not in self._gyms:
            self._gyms[key] = self._started(settings, num_replicas)
        engine, gym = self._gyms[key]
        engine.reset()
        how: Any = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 20}
        how |= {"stop_strings": None, "stop_token_ids": None}
        manager = RolloutManager(
            tokenizer,
            {"nemo_gym": gym},
            GROUP_SIZE,
            4096,
            generation_config=how,
            use_nemo_gym=True,
            mask_interrupted=mask_interrupted,
            timeouts=RolloutTimeouts(rollout_s=120),
        )
        return manager, engine

    def _started(self, settings: dict[str, Any], num_replicas: int) -> tuple[Engine, NemoGym]:
        engine = Engine()
        url = f"http://127.0.0.1:{self._stack.enter_context(served(engine.app()))}/v1"
        config = yaml.safe_load(
            (EXAMPLES / "resources_servers/tiny_arithmetic/configs/tiny_arithmetic.yaml").read_text()
        )
        config["policy_model"]["responses_api_models"]["vllm_model"] |= settings
        config["num_replicas"] = num_replicas
        cfg: Any = {"model_name": "m", "base_urls": [url], "initial_global_config_dict": config}
        return engine, self._stack.enter_context(NemoGym(cfg))


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("NEMO_GYM_EXTRA_ROOTS", str(EXAMPLES))
        yield Runs(stack)


def sample(**params: Any) -> DatumSpec:
    messages = [{"role": "user", "content": "1+1="}]
    row = {"question": "1+1=", "responses_create_params": {"input": messages, **params}}
    row |= {"agent_ref": {"name": "tiny_arithmetic_agent"}}
    return {"idx": 0, "message_log": [], "extra_env_info": row}


async def interrupted(
    manager: RolloutManager, engine: Engine, given: DatumSpec, abort: Any = None
) -> PromptGroupRecord:
    await manager.resume()  # the servers learn which weights there are
    making = asyncio.ensure_future(manager.run_rollout(given))
    async with asyncio.timeout(60):
        while engine.waiting < GROUP_SIZE:  # noqa: ASYNC110 - the engine runs in a thread of its own
            await asyncio.sleep(0.01)
    await manager.pause(abort)
    assert not making.done()
    engine.version, engine.is_slow = 1, False
    manager.set_weight_version(1)
    await manager.resume()
    return await asyncio.wait_for(making, 60)


def said(completion: Completion) -> tuple[list[int], list[float]]:
    message = completion.message_log[1]
    return [int(token) for token in message["token_ids"]], [float(it) for it in message["generation_logprobs"]]


def test_the_endpoint_is_told_to_end_and_goes_on_from_its_own_tokens(runs: Runs, tokenizer: Any) -> None:
    manager, engine = runs.manager(tokenizer, mask_interrupted=True, **ABORTABLE)

    record = asyncio.run(interrupted(manager, engine, sample()))

    assert engine.told == ["abort", "go on"]
    assert engine.chats == GROUP_SIZE
    assert {tuple(body["prompt"]) for body in engine.continued} == {(*PROMPT, 10, 10)}
    assert {body["max_tokens"] for body in engine.continued} == {18}
    for completion in record.completions:
        assert said(completion) == ([10, 10, 11, 11, 11, 11], [-0.5, -0.5, -0.25, -0.25, -0.25, -0.25])
        message = completion.message_log[1]
        assert (message["weight_versions"], message["weight_segments"]) == ([0, 1], [[0, 2], [1, 4]])
        assert completion.weight_versions == (0, 1)
        assert completion.env_extras is not None
        (item,) = completion.env_extras["response"]["output"]
        assert item["content"][0]["text"] == "aabbbb"
        assert completion.env_extras["response"]["usage"]["output_tokens"] == 6
    batch = collate([record], as_numpy=True)
    assert batch["weight_versions"].tolist() == [[0, 1]] * GROUP_SIZE
    assert batch["loss_mask"][0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_a_trainer_may_abort_the_engine_itself(runs: Runs, tokenizer: Any) -> None:
    manager, engine = runs.manager(tokenizer)

    async def abort() -> None:
        engine.abort_from_outside()

    record = asyncio.run(interrupted(manager, engine, sample(), abort))

    assert said(record.completions[0])[0] == [10, 10, 11, 11, 11, 11]


def test_every_replica_is_paused_and_goes_on(runs: Runs, tokenizer: Any) -> None:
    manager, engine = runs.manager(tokenizer, num_replicas=2, **ABORTABLE)

    record = asyncio.run(interrupted(manager, engine, sample()))

    assert engine.told == ["abort", "abort", "go on", "go on"]
    for (
        completion
    ) in record.completions:  # the abort of one replica ends calls of the other, which may not be paused yet
        assert said(completion)[0] in ([10, 10, 11, 11, 11, 11], [10, 10, 10, 10, 11, 11])
    assert {completion.weight_versions for completion in record.completions} == {(0, 1)}


@pytest.mark.parametrize("tools", [False, True])
def test_what_cannot_be_gone_on_from_is_generated_anew(runs: Runs, tokenizer: Any, tools: bool) -> None:
    """Without a way to abort the engine the calls are cancelled; with tools the endpoint has to find the calls."""
    manager, engine = runs.manager(tokenizer, **(ABORTABLE if tools else {}))

    record = asyncio.run(interrupted(manager, engine, sample(tools=[TOOL]) if tools else sample()))

    assert (engine.chats, engine.continued) == (2 * GROUP_SIZE, [])
    for completion in record.completions:
        assert said(completion)[0] == [11] * 6
        assert completion.weight_versions == (1, 1)


def test_what_the_endpoint_tells_about_its_weights_counts(runs: Runs, tokenizer: Any) -> None:
    manager, engine = runs.manager(tokenizer)
    engine.is_slow, engine.tells_version, engine.version = False, True, 5

    record = asyncio.run(manager.run_rollout(sample()))

    assert record.completions[0].message_log[1]["weight_versions"] == [5, 5]


def test_without_a_word_about_weights_those_of_the_manager_count(
    attached: Callable[..., NemoGym], rows: Any, result_of: Any, tokenizer: Any
) -> None:
    async def answer(row: dict[str, Any]) -> Any:
        manager.set_weight_version(4)  # while the rollout is under way
        return result_of(row)

    how: Any = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 20}
    how |= {"stop_strings": None, "stop_token_ids": None}
    gym = attached(answer)
    manager = RolloutManager(tokenizer, {"nemo_gym": gym}, 2, 99, generation_config=how, use_nemo_gym=True)
    manager.set_weight_version(3)

    record = asyncio.run(manager.run_rollout({"idx": 0, "message_log": [], "extra_env_info": rows(1)[0]}))

    assert [completion.weight_versions for completion in record.completions] == [(3, 4)] * 2


def test_a_run_without_a_model_server_that_can_be_paused_says_so(runs: Runs, tokenizer: Any) -> None:
    manager, _ = runs.manager(tokenizer, return_token_id_information=False)

    with pytest.raises(ConfigError, match=r"no model server of this run can be paused .there is policy_model.; a vllm"):
        asyncio.run(manager.pause())


def test_several_workers_cannot_be_paused() -> None:
    settings: dict[str, Any] = {"base_url": ["http://x/v1"], "api_key": "k", "model": "m", "num_workers": 2}
    settings |= {"return_token_id_information": True, "uses_reasoning_parser": False}
    settings |= {"host": "127.0.0.1", "port": 1, "entrypoint": "app.py", "name": "policy"}
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    server = VLLMModel(config=VLLMModelConfig(**settings), server_client=client)

    with TestClient(server.setup_webserver()) as asking:
        answer = asking.post(PAUSE_PATH, json={})

    assert answer.status_code == 409
    assert answer.text.startswith("policy cannot be paused: of its num_workers=2 only one would hear of it")


def _noting(told: list[tuple[str, Any]]) -> FastAPI:
    """A model server that can be paused, and notes what it is told."""
    app = FastAPI()
    app.post("/weights/{what}")(lambda what, body=Body(): told.append((what, body)))
    return app


def test_a_model_server_that_is_added_hears_how_the_weights_are_before_it_is_sent_anything(
    serve: Callable[[FastAPI], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)
    told: list[list[tuple[str, Any]]] = [[], [], []]
    ports = [serve(_noting(each)) for each in told]
    listed = ports[:1]
    model = {"policy": {"responses_api_models": {"vllm_model": {"host": "127.0.0.1", "port": ports[0]}}}}
    head = FastAPI()
    head.get("/global_config_dict_yaml")(lambda: yaml.safe_dump(model))
    head.get("/server_states")(lambda: {"edition": len(listed)})
    kind = {"server_type": "responses_api_models", "process_name": "policy", "host": "127.0.0.1", "most_replicas": 3}
    head.get("/server_instances")(lambda: [{**kind, "port": port} for port in listed])
    gym = NemoGym({"head_server": {"host": "127.0.0.1", "port": serve(head)}})

    async def train() -> None:
        await gym.resume_generation(3)
        listed.append(ports[1])  # while they generate
        gym._poll()
        async with asyncio.timeout(20):
            while not told[1]:  # noqa: ASYNC110 - the servers run in threads of their own
                await asyncio.sleep(0.01)
        await gym.pause_generation(1.0)
        listed.append(ports[2])  # while they do not
        await gym.resume_generation(4)

    with gym:
        asyncio.run(train())
    stopped, on = ("pause", {"grace_s": 1.0, "is_aborted": False}), ("resume", {"weight_version": 4})
    assert told[0] == [("resume", {"weight_version": 3}), stopped, on]
    assert told[1] == [("resume", {"weight_version": 3}), stopped, on]
    assert told[2] == [("pause", {"is_shut_only": True}), on]
