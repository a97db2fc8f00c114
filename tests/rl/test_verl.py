"""The bridge to verl, driven by verl's own classes with a tokenizer of transformers; `make test-verl` installs both."""

import asyncio
import dataclasses
import inspect
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from nemo_gym import global_config
from nemo_gym.cli import GlobalConfigDictParserConfig, RunHelper  # type: ignore[attr-defined]  # the recipe's import
from nemo_gym.paths import PARENT_DIR
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import HEAD_SERVER_KEY_NAME, BaseServerConfig

torch = pytest.importorskip("torch", reason="the policies are torch modules: install the extra `rl` (make test-rl)")
pytest.importorskip("verl", reason="verl is not installed; `make test-verl` runs these tests")

pytestmark = pytest.mark.filterwarnings("ignore")  # verl and what it imports use names that others have deprecated
EXAMPLES = PARENT_DIR / "docs" / "examples"
PROMPT_LENGTH, RESPONSE_LENGTH = 8, 6
QUESTION = [{"role": "user", "content": "digit"}]


@pytest.fixture(scope="module")
def examples() -> Iterator[Any]:
    """The modules of the examples."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import tiny_policy  # type: ignore[import-not-found]
        import tiny_policy_server  # type: ignore[import-not-found]
        import tiny_transformer  # type: ignore[import-not-found]
        import verl_agent_loop  # type: ignore[import-not-found]

        yield SimpleNamespace(
            policy=tiny_policy, server=tiny_policy_server, transformer=tiny_transformer, loop=verl_agent_loop
        )
    for name in set(sys.modules) - before:
        if name.startswith(("tiny_", "verl_", "resources_servers.tiny_")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def trainer_config(examples: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The configuration of a PPO training that comes with verl, and what a user sets of it."""
    import verl
    from hydra import compose, initialize_config_dir

    folder = tmp_path_factory.mktemp("model")
    examples.transformer.tiny_tokenizer().save_pretrained(folder)
    examples.transformer.tiny_model().save_pretrained(folder)
    loops = folder / "loops.yaml"
    loops.write_text("- name: lucky_digits\n  _target_: verl_loop.LuckyDigitsLoop\n")
    rollout = {
        "name": "vllm",
        "calculate_log_probs": "true",
        "agent.agent_loop_config_path": loops,
        "prompt_length": PROMPT_LENGTH,
        "response_length": RESPONSE_LENGTH,
    }
    options = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()]
    assert verl.__file__ is not None
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=[f"actor_rollout_ref.model.path={folder}", *options])


class Engine:
    """In the place of verl's client of its engines: says these tokens, one after another."""

    def __init__(self, says: list[int]) -> None:
        self.says = says
        self.asked: list[tuple[str, list[int]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        assert all(type(token) is int for token in prompt_ids)
        assert sampling_params["logprobs"] is True
        self.asked.append((request_id, prompt_ids))
        turn = sum(request == request_id for request, _ in self.asked)
        return TokenOutput(token_ids=[self.says[turn - 1]], log_probs=[-0.5 * turn])


def batch_of(*raw_prompts: Any) -> Any:
    from verl.protocol import DataProto

    rows = np.empty(len(raw_prompts), dtype=object)
    rows[:] = raw_prompts
    columns = {"raw_prompt": rows, "data_source": ["lucky"] * len(rows), "agent_name": ["lucky_digits"] * len(rows)}
    return DataProto(non_tensor_batch={name: np.array(column, dtype=object) for name, column in columns.items()})


def generated(trainer_config: Any, engine: Engine, *raw_prompts: Any) -> Any:
    from verl.experimental.agent_loop import AgentLoopWorker

    async def main() -> Any:
        return await AgentLoopWorker(trainer_config, engine).generate_sequences(batch_of(*raw_prompts))

    return asyncio.run(main())


def test_the_worker_of_verl_makes_a_batch_with_the_loop_of_the_example(examples: Any, trainer_config: Any) -> None:
    word = examples.transformer.WORDS.index
    engine = Engine([word("7"), word("3")])

    made = generated(trainer_config, engine, QUESTION, QUESTION)

    prompt = [word(it) for it in ("<user>", "digit", "<end>", "<assistant>")]
    between = [word(it) for it in ("<user>", "again", "<end>", "<assistant>")]
    response = [word("7"), *between, word("3")]
    padding = [word("<pad>")] * (PROMPT_LENGTH - len(prompt))
    assert made.batch["prompts"].tolist() == [padding + prompt] * 2
    assert made.batch["responses"].tolist() == [response] * 2
    assert made.batch["response_mask"].tolist() == [[1, 0, 0, 0, 0, 1]] * 2
    assert made.batch["rollout_log_probs"].tolist() == [[-0.5, 0.0, 0.0, 0.0, 0.0, -1.0]] * 2
    assert made.batch["rm_scores"].tolist() == [[0.0] * 5 + [0.5]] * 2
    assert made.non_tensor_batch["__num_turns__"].tolist() == [5, 5]
    assert len({request for request, _ in engine.asked}) == 2, "one request id per conversation"
    assert sorted(asked for _, asked in engine.asked) == sorted([prompt, [*prompt, word("7"), *between]] * 2)


def test_prompts_and_responses_fit_the_lengths_that_verl_is_given(examples: Any, trainer_config: Any) -> None:
    word = examples.transformer.WORDS.index
    config = OmegaConf.merge(trainer_config, {"actor_rollout_ref": {"rollout": {"response_length": 3}}})
    long = [{"role": "user", "content": "digit " * 7}]

    made = generated(config, Engine([word("7"), word("7")]), long, QUESTION)

    assert made.batch["prompts"].shape == (2, PROMPT_LENGTH)
    assert made.batch["prompts"][0].tolist()[-2:] == [word("<end>"), word("<assistant>")]
    assert made.batch["responses"].shape == made.batch["response_mask"].shape == (2, 3)
    assert made.batch["rm_scores"].sum(dim=1).tolist() == [0.5, 1.0], "the first has no room for a second turn"


@pytest.mark.parametrize("max_model_len", [64, 3])
def test_the_loop_of_the_example_takes_a_tokenizer_of_transformers(examples: Any, max_model_len: int) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    word = examples.transformer.WORDS.index
    environments = {"lucky": examples.transformer.LuckyDigits()}
    tokenizer, engine = examples.transformer.tiny_tokenizer(), Engine([word("7"), word("3")])
    loop = examples.loop.ManagerAgentLoop(engine, tokenizer, environments, max_model_len)
    loop.output_type = AgentLoopOutput
    answer = loop.run({"logprobs": True}, raw_prompt=QUESTION, data_source="lucky")

    if max_model_len == 3:
        with pytest.raises(ValueError, match=r"the prompt has 4 tokens, .*filter_overlong_prompts"):
            asyncio.run(answer)
        return
    output = asyncio.run(answer)
    assert output.prompt_ids == [word(it) for it in ("<user>", "digit", "<end>", "<assistant>")]
    assert output.response_mask == [1, 0, 0, 0, 0, 1]
    assert output.as_dict()["rm_scores"].tolist() == [0.0] * 5 + [0.5]


def test_the_stand_in_of_the_example_has_the_fields_of_verl(examples: Any) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    stand_in = examples.loop.AgentLoopOutput([1], [2], [1])
    assert {field.name for field in dataclasses.fields(stand_in)} <= set(AgentLoopOutput.model_fields)
    assert {"generate_sequences", "tool_calls"} <= set(AgentLoopMetrics.model_fields)
    assert set(examples.loop.TokenOutput._fields) <= set(TokenOutput.model_fields)
    asked = inspect.signature(examples.loop.TinyServerManager.generate).parameters
    assert set(asked) <= set(inspect.signature(LLMServerClient.generate).parameters)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Recipe:
    """What verl's recipe for NeMo Gym asks of this package, in the place of verl's `AgentLoopManager`.

    The recipe itself is not in verl's package. It starts the servers of a configuration, with the policy's endpoints,
    sends the rows of a batch to their agents, and makes verl's outputs of the tokens that come back.
    """

    def __init__(self, trainer_config: Any, base_urls: list[str], config_paths: list[str], folder: Path) -> None:
        from verl.experimental.agent_loop import AgentLoopWorker

        self.worker = AgentLoopWorker(trainer_config, None)
        port = free_port()
        self.head = BaseServerConfig(host="127.0.0.1", port=port)
        config = {
            "config_paths": config_paths,
            "policy_model_name": "tiny",
            "policy_api_key": "dummy_key",
            "policy_base_url": base_urls,
            "global_aiohttp_connector_limit_per_host": 16_384,
            "global_aiohttp_connector_limit": 65_536,
            HEAD_SERVER_KEY_NAME: {"host": "127.0.0.1", "port": port},
        }
        self.servers = RunHelper()
        self.servers.start(
            global_config_dict_parser_config=GlobalConfigDictParserConfig(
                dotenv_path=folder / "not_there.yaml",
                initial_global_config_dict=OmegaConf.create(config),
                skip_load_from_cli=True,
            )
        )
        self.rollouts = RolloutCollectionHelper()

    async def generate_sequences(self, batch: Any) -> Any:
        rows = [{**row, "_rowidx": index} for index, row in enumerate(batch.non_tensor_batch["extra_env_info"])]
        found: dict[int, dict[str, Any]] = {}
        for awaitable in self.rollouts.run_examples(examples=rows, head_server_config=self.head):
            row, result = await awaitable
            found[row["_rowidx"]] = result
        self.servers.poll()
        outputs = [
            await self.worker._agent_loop_postprocess(self.output_of(found[row["_rowidx"]]), False, raw_prompt=None)
            for row in rows
        ]
        return self.worker._postprocess(outputs)

    def output_of(self, result: dict[str, Any]) -> Any:
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        items = [item for item in result["response"]["output"] if item.get("generation_token_ids")]
        prompt = items[0]["prompt_token_ids"]
        response, mask, log_probs = list[int](), list[int](), list[float]()
        for item in items:
            between = item["prompt_token_ids"][len(prompt) + len(response) :]
            response += between + item["generation_token_ids"]
            mask += [0] * len(between) + [1] * len(item["generation_token_ids"])
            log_probs += [0.0] * len(between) + item["generation_log_probs"]
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=mask,
            response_logprobs=log_probs,
            reward_score=result["reward"],
            num_turns=2 * len(items),
            metrics=AgentLoopMetrics(),
        )


def test_what_the_recipe_of_verl_asks_for_works_with_verl_itself(
    examples: Any, trainer_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.protocol import DataProto

    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", None)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(EXAMPLES))
    pairs = [(3, 4), (1, 1), (0, 9)]
    rows = np.empty(len(pairs), dtype=object)
    rows[:] = [
        {
            "agent_ref": {"name": "tiny_arithmetic_agent"},
            "question": f"{first}+{second}=",
            "responses_create_params": {
                "input": [{"role": "user", "content": f"{first}+{second}="}],
                "temperature": 1.0,
                "top_p": 1.0,
                "max_output_tokens": RESPONSE_LENGTH,
            },
        }
        for first, second in pairs
    ]
    tokenizer, sampler = examples.policy.ToyTokenizer(), examples.policy.Sampler(examples.policy.NumberLinePolicy())
    config_paths = ["resources_servers/tiny_arithmetic/configs/tiny_arithmetic.yaml"]
    with examples.server.serving(examples.server.chat_app(sampler, tokenizer)) as base_url:
        recipe = Recipe(trainer_config, [base_url], config_paths, tmp_path)
        try:
            batch = DataProto(non_tensor_batch={"extra_env_info": rows})
            made = asyncio.run(recipe.generate_sequences(batch))
        finally:
            recipe.servers.shutdown()

    for index, (first, second) in enumerate(pairs):
        is_token = made.batch["attention_mask"][index].bool()
        texts = tokenizer.decode(made.batch["input_ids"][index][is_token].tolist())
        assert texts.startswith(f"<user>{first}+{second}=<end><assistant>"), "rows come back in the order of the batch"
        said = made.batch["response_mask"][index].bool()
        assert said.any()
        assert (made.batch["rollout_log_probs"][index][said] < 0).all()
    assert made.batch["rm_scores"].shape == (len(pairs), RESPONSE_LENGTH)
