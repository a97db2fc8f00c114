"""From turns to samples: a sample per conversation, each generated token in exactly one of them."""

import random
from typing import Any

import pytest

from nemo_gym.rl import completion_of_capture
from nemo_gym.rl.failures import NoGenerationDataError
from nemo_gym.rl.interfaces import MessageLog, as_list
from nemo_gym.rl.message_log import build_message_log
from nemo_gym.rl.samples import Samples
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot
from nemo_gym.token_id_capture.records import TokenEntry


class Letters:
    def batch_decode(self, sequences: list[list[int]]) -> list[str]:
        return ["".join(chr(96 + token % 26) for token in sequence) for sequence in sequences]


def item(prompt: list[int], generation: list[int]) -> dict[str, Any]:
    return {
        "type": "message",
        "content": [],
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-float(token) for token in generation],
    }


def shape(log: MessageLog) -> list[tuple[str, list[int]]]:
    return [(message["role"], as_list(message["token_ids"])) for message in log]


def built(*turns: tuple[list[int], list[int]]) -> dict[str, Any]:
    items = [item(prompt, generation) for prompt, generation in turns]
    return build_message_log({"response": {"output": items}, "reward": 1.0}, Letters())


def test_dropped_thoughts_make_a_sample_per_turn_with_the_whole_prompt_as_context() -> None:
    made = built(([1], [8, 2]), ([1, 2, 3], [8, 4]), ([1, 2, 3, 4, 5], [8, 6]))

    assert shape(made["message_log"]) == [("user", [1]), ("assistant", [8, 2])]
    assert [shape(log) for log in made["branches"]] == [
        [("user", [1, 2, 3]), ("assistant", [8, 4])],
        [("user", [1, 2, 3, 4, 5]), ("assistant", [8, 6])],
    ]
    assert "the prompt of turn 2 (3 tokens) does not begin with the 3 tokens" in made["drift"]
    assert [as_list(log[1]["generation_logprobs"]) for log in made["branches"]] == [[-8, -4], [-8, -6]]


def test_a_sub_agent_has_a_sample_of_its_own_and_the_main_conversation_goes_on() -> None:
    made = built(([1], [2]), ([50], [51]), ([50, 51, 52], [53]), ([1, 2, 3], [4]))

    assert shape(made["message_log"]) == [
        ("user", [1]),
        ("assistant", [2]),
        ("user", [3]),
        ("assistant", [4]),
    ]
    assert [shape(log) for log in made["branches"]] == [
        [("user", [50]), ("assistant", [51]), ("user", [52]), ("assistant", [53])]
    ]


def test_a_conversation_that_was_never_rewritten_has_no_branches() -> None:
    assert "branches" not in built(([1], [2]), ([1, 2, 3], [4]))


def test_going_back_to_an_earlier_turn_does_not_train_it_again() -> None:
    made = built(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 9], [5]))
    assert [shape(log) for log in made["branches"]] == [[("user", [1, 2, 9]), ("assistant", [5])]]


@pytest.mark.parametrize("seed", range(30))
def test_every_generated_token_is_trained_on_once_after_exactly_its_prompt(seed: int) -> None:
    draw = random.Random(seed)
    ends: list[list[int]] = [[]]
    turns = []
    for number in range(draw.randrange(1, 20)):
        before = draw.choice(ends[-3:]) if draw.random() < 0.7 else draw.choice(ends)[: draw.randrange(1, 9)]
        prompt = [*before, *(draw.randrange(5) for _ in range(draw.randrange(1, 3)))]
        generation = [1000 + number, *(draw.randrange(5) for _ in range(draw.randrange(3)))]
        turns.append((prompt, generation))
        ends.append(prompt + generation)

    samples = Samples()
    for prompt, generation in turns:
        samples.add(prompt, {"role": "assistant", "token_ids": generation})

    trained: dict[int, list[int]] = {}
    for log in samples.logs:
        before = []
        for message in log:
            if message["role"] == "assistant":
                assert message["token_ids"][0] not in trained
                trained[message["token_ids"][0]] = list(before)
            before += message["token_ids"]
    assert trained == {generation[0]: prompt for prompt, generation in turns}


def call(call_id: str, prompt: list[int], generation: list[int], **more: Any) -> TokenEntry:
    return TokenEntry(
        rollout_id=more.pop("rollout_id", "3-1"),
        model_call_id=call_id,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.5] * len(generation),
        **more,
    )


def test_captured_calls_become_samples_that_share_the_reward() -> None:
    calls = [
        call("c", [50], [51], created_at=3.0),
        call("b", [1, 2, 3], [4], created_at=2.0),
        call("a", [1], [2], created_at=1.0),
        call("d", [1, 2, 7], [8], created_at=4.0),
    ]
    completion = completion_of_capture(calls, reward=0.5, env_extras={"id": 3})

    assert [shape(log) for log in completion.samples] == [
        [("user", [1]), ("assistant", [2]), ("user", [3]), ("assistant", [4])],
        [("user", [1, 2, 7]), ("assistant", [8])],
        [("user", [50]), ("assistant", [51])],
    ]
    assert (completion.reward, completion.env_extras, completion.mask_reason) == (0.5, {"id": 3}, None)


def test_of_calls_tried_again_only_the_one_gone_on_with_is_trained_on() -> None:
    completion = completion_of_capture([call("a", [1], [2]), call("b", [1], [3]), call("c", [1, 3], [4])], reward=1.0)
    assert [shape(log) for log in completion.samples] == [
        [("user", [1]), ("assistant", [3]), ("user", []), ("assistant", [4])]
    ]


def test_doubt_masks_the_completion() -> None:
    tried = completion_of_capture([call("a", [1], [2]), call("b", [1], [3])], reward=1.0)
    assert tried.mask_reason == "calls were tried again, and it is not known which answer counted"
    snapshot = TokenCaptureSnapshot("3-1", (call("a", [1], [2]),), True, "s", 1)
    assert completion_of_capture(snapshot, reward=1.0).mask_reason == "a call of the rollout was not captured"
    whole = TokenCaptureSnapshot("3-1", (call("a", [1], [2]),), False, "s", 1)
    assert completion_of_capture(whole, reward=1.0).mask_reason is None


def test_captures_without_tokens_or_of_several_rollouts_are_errors() -> None:
    with pytest.raises(NoGenerationDataError, match="rollout 3-1 has no generation data: 1 calls were captured"):
        completion_of_capture([call("a", [1], [])], reward=1.0)
    with pytest.raises(ValueError, match="several rollouts"):
        completion_of_capture([call("a", [1], [2]), call("b", [1], [2], rollout_id="4-1")], reward=1.0)
