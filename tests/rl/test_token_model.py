"""Groups over many turns, by way of real servers, where text cannot be tokenized again to what was sampled.

Three things that policies and chat templates do: tokens that are not those the tokenizer would choose, a template that
drops the thoughts of earlier turns, and one that spells tool arguments otherwise than the model did. Each is tried with
`token_model`, which keeps tokens, and with `vllm_model`, whose endpoint writes every conversation anew.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.rl.environment import NemoGym
from nemo_gym.rl.failures import NonContiguousTokensError
from nemo_gym.rl.interfaces import Completion, PromptGroupRecord, as_list
from nemo_gym.rl.rollout_manager import RolloutManager
from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.token_model.tests.stand_in import (
    DROPPING,
    KEEPING,
    StandInEngine,
    log_prob,
    serving,
    tokenizer_folder,
    tool_user,
)
from tests.rl.calculator import CALCULATOR, TOOL

GROUPS, GROUP_SIZE, TURNS = 6, 2, 3
PLAIN, SPACED = '{"expression": "1+1"}', '{ "expression":"1+1" }'


@dataclass
class Trouble:
    """What keeps tokens from being found again."""

    template: str = KEEPING
    arguments: str = PLAIN
    thinks: bool = False
    is_canonical: bool = True


TROUBLES = {
    "non_canonical_tokens": Trouble(is_canonical=False),
    "stripped_reasoning": Trouble(template=DROPPING, thinks=True),
    "re_spaced_arguments": Trouble(arguments=SPACED),
}


def _model_block(kind: str, url: str, folder: Path) -> dict[str, Any]:
    block = {"entrypoint": "app.py", "base_url": f"{url}/v1", "api_key": "key", "model": "m"}
    if kind == "token_model":
        return {**block, "tokenizer": str(folder)}
    return {**block, "return_token_id_information": True, "uses_reasoning_parser": True}


@pytest.fixture(scope="module")
def gyms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One run with an agent per trouble and model server; as it is, and with branches."""
    folder = tmp_path_factory.mktemp("roots")
    server = folder / "resources_servers" / "calculator"
    server.mkdir(parents=True)
    (server / "app.py").write_text(CALCULATOR)
    (server / "requirements.txt").write_text("")
    hosted = {"entrypoint": "app.py", "domain": "math", "isolation": "hosted"}
    config: dict[str, Any] = {"calculator": {"resources_servers": {"calculator": hosted}}}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as up:
        patch.setenv("NEMO_GYM_EXTRA_ROOTS", str(folder))
        for name, trouble in TROUBLES.items():
            files = tokenizer_folder(folder / "tokenizers" / name, trouble.template)
            say = tool_user("calculate", trouble.arguments, rounds=TURNS - 1, thinks=trouble.thinks)
            engine = StandInEngine(ChatTokenizer(files), say, is_canonical=trouble.is_canonical)
            url = up.enter_context(serving(engine.app()))
            for kind in ("token_model", "vllm_model"):
                config[f"{name}_{kind}"] = {"responses_api_models": {kind: _model_block(kind, url, files)}}
                agent = {
                    "entrypoint": "app.py",
                    "resources_server": {"type": "resources_servers", "name": "calculator"},
                    "model_server": {"type": "responses_api_models", "name": f"{name}_{kind}"},
                }
                config[f"{name}_{kind}_agent"] = {"responses_api_agents": {"simple_agent": agent}}
        settings: Any = {"model_name": "m", "base_urls": [url], "initial_global_config_dict": config, "branches": False}
        strict = up.enter_context(NemoGym(settings))
        assert strict._collector is not None
        head = strict._collector._client.head_server_config  # type: ignore[union-attr]
        lenient = NemoGym({"head_server": {"host": head.host, "port": head.port}})
        up.enter_context(lenient)
        yield {"strict": strict, "lenient": lenient, "tokenizer": ChatTokenizer(files)}


def collected(gym: Any, tokenizer: Any, agent: str) -> list[PromptGroupRecord | BaseException]:
    config: Any = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 400}
    config |= {"stop_strings": None, "stop_token_ids": None}
    manager = RolloutManager(
        tokenizer, {"nemo_gym": gym}, GROUP_SIZE, 4096, generation_config=config, use_nemo_gym=True
    )

    def sample(number: int) -> Any:
        params = {"input": [{"role": "user", "content": f"Question {number}?"}], "tools": [TOOL]}
        row = {"agent_ref": {"name": agent}, "responses_create_params": params}
        return {"idx": number, "message_log": [], "extra_env_info": row}

    async def main() -> list[Any]:
        tasks = (manager.run_rollout(sample(number)) for number in range(GROUPS))
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


def check(completion: Completion) -> None:
    generated = 0
    for log in completion.samples:
        for message in log:
            if message["role"] == "assistant":
                generated += 1
                ids = as_list(message["token_ids"])
                assert as_list(message["generation_logprobs"]) == pytest.approx([log_prob(token) for token in ids])
    assert generated == TURNS


@pytest.mark.parametrize("trouble", TROUBLES)
def test_every_group_survives_with_tokens_kept_and_none_without(gyms: dict[str, Any], trouble: str) -> None:
    kept = collected(gyms["strict"], gyms["tokenizer"], f"{trouble}_token_model_agent")
    anew = collected(gyms["strict"], gyms["tokenizer"], f"{trouble}_vllm_model_agent")

    survived = [group for group in kept if isinstance(group, PromptGroupRecord)]
    assert len(survived) == GROUPS, kept
    for completion in (completion for group in survived for completion in group.completions):
        assert completion.branches == []
        check(completion)
    assert [type(failure) for failure in anew] == [NonContiguousTokensError] * GROUPS


@pytest.mark.parametrize("trouble", TROUBLES)
def test_as_branches_every_group_survives_with_either(gyms: dict[str, Any], trouble: str) -> None:
    groups = collected(gyms["lenient"], gyms["tokenizer"], f"{trouble}_vllm_model_agent")
    for group in groups:
        assert isinstance(group, PromptGroupRecord), group
        for completion in group.completions:
            assert completion.branches
            check(completion)
