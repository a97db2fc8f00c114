"""Groups as arrays: what is where, checked against the messages they were made of."""

import math
from typing import Any

import numpy as np
import pytest

from nemo_gym.rl.batches import (
    StalenessPolicy,
    TooLongError,
    collate,
    collate_packed,
    importance_weights,
    mismatch_metrics,
)
from nemo_gym.rl.buffer import BufferedGroup
from nemo_gym.rl.interfaces import Completion, Message, PromptGroupRecord, torch_is_there


def user(*ids: int) -> Message:
    return {"role": "user", "content": "", "token_ids": list(ids)}


def said(*ids: int) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "token_ids": list(ids),
        "generation_logprobs": [-0.1 * token for token in ids],
    }


def group(prompt: int, *completions: Completion) -> PromptGroupRecord:
    return PromptGroupRecord(prompt, [], None, {}, list(completions), {})


ONE_TURN = Completion([user(1, 2), said(3)], None, False, 1.0)
TWO_TURNS = Completion(
    [user(1, 2), said(4, 5), user(6), said(7)], None, True, 0.0, "max_output_tokens", turn_rewards=[0.5, -0.5]
)
SILENT = Completion([user(8), said()], None, False, 0.25)


def test_a_row_per_completion_padded_on_the_right() -> None:
    batch = collate([group(11, ONE_TURN, TWO_TURNS), group(12, SILENT)], pad_to=7, pad_id=9, as_numpy=True)

    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9], [1, 2, 4, 5, 6, 7, 9], [8, 9, 9, 9, 9, 9, 9]]
    assert batch["attention_mask"].sum(axis=1).tolist() == batch["lengths"].tolist() == [3, 6, 1]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 1, 0], [0] * 7]
    assert batch["logprobs"][1] == pytest.approx([0, 0, -0.4, -0.5, 0, -0.7, 0])
    assert batch["turn_rewards"][0].tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert batch["turn_rewards"][1].tolist() == [0, 0, 0, 0.5, 0, -0.5, 0]
    assert batch["group_index"].tolist() == [0, 0, 1]
    assert batch["prompt_idx"].tolist() == [11, 11, 12]
    assert batch["rewards"].tolist() == [1.0, 0.0, 0.25]
    assert batch["advantages"] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0], rel=1e-4)
    assert batch["truncation_reasons"] == [None, "max_output_tokens", None]
    assert batch["truncated"].tolist() == [False, True, False]
    assert batch["weight_versions"].tolist() == [[-1, -1]] * 3


def test_without_a_length_the_longest_decides_and_versions_come_from_the_buffer() -> None:
    batch = collate([BufferedGroup(1, group(11, ONE_TURN, SILENT), 4, 6)], as_numpy=True)

    assert batch["input_ids"].shape == (2, 3)
    assert batch["weight_versions"].tolist() == [[4, 6], [4, 6]]


def test_the_packed_form_says_the_same_without_padding() -> None:
    groups = [group(11, ONE_TURN, TWO_TURNS), group(12, SILENT)]
    padded, packed = collate(groups, as_numpy=True), collate_packed(groups, as_numpy=True)

    assert packed["cu_seqlens"].tolist() == [0, 3, 9, 10]
    assert packed["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 0]
    is_token = padded["attention_mask"] == 1
    for key in ("input_ids", "loss_mask", "logprobs", "turn_rewards"):
        assert packed[key].tolist() == padded[key][is_token].tolist(), key
    assert packed["advantages"].tolist() == padded["advantages"].tolist()


def test_advantages_may_be_of_ones_own() -> None:
    batch = collate([group(1, ONE_TURN, SILENT)], advantages=lambda record: [7.0, 8.0], as_numpy=True)
    assert batch["advantages"].tolist() == [7.0, 8.0]


def test_tensors_where_torch_is_installed() -> None:
    batch = collate([group(1, ONE_TURN)])
    assert type(batch["input_ids"]).__name__ == ("Tensor" if torch_is_there() else "ndarray")
    assert batch["input_ids"].tolist() == [[1, 2, 3]]


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(TooLongError, match="a completion of prompt 12 has 6 tokens, and pad_to=5 has no room"):
        collate([group(11, ONE_TURN), group(12, TWO_TURNS)], pad_to=5)
    with pytest.raises(ValueError, match="no groups"):
        collate([])


def test_importance_weights_are_ratios_within_the_mask_and_below_the_cap() -> None:
    new, old = np.log([0.2, 0.9, 0.5]), np.log([0.1, 0.1, 0.5])

    weights: Any = importance_weights(new, old, np.array([1.0, 1.0, 0.0]), cap=3.0)

    assert weights == pytest.approx([2.0, 3.0, 0.0])


def test_equal_policies_do_not_mismatch_and_uneven_weights_are_worth_less() -> None:
    old, mask = np.log([0.5, 0.25, 0.1, 0.9]), np.array([1, 1, 1, 0])
    same = mismatch_metrics(old, old, mask)
    moved = mismatch_metrics(old + np.array([math.log(4), 0, 0, 9.9]), old, mask, cap=2.0)

    assert (same["mismatch/logprob_abs_max"], same["mismatch/effective_sample_size"]) == (0.0, 1.0)
    assert moved["mismatch/logprob_abs_max"] == pytest.approx(math.log(4))
    assert moved["mismatch/ratio_mean"] == pytest.approx(2.0)
    assert moved["mismatch/effective_sample_size"] == pytest.approx((2 + 1 + 1) ** 2 / (3 * (4 + 1 + 1)))
    assert moved["mismatch/clipped_fraction"] == pytest.approx(1 / 3)
    assert mismatch_metrics(old, old, np.zeros(4)) == {}


def test_groups_of_the_right_age_are_admitted() -> None:
    policy = StalenessPolicy(max_age=1)
    groups = [BufferedGroup(index, group(1), version, version) for index, version in enumerate((3, 4, 5))]

    assert [policy.admits(each, 5) for each in groups] == [False, True, True]
    assert policy.ages(groups, 5) == {"staleness/mean": 1.0, "staleness/max": 2.0}
    assert policy.ages([], 5) == {}


def test_the_samples_of_a_rewritten_conversation_are_rows_that_share_reward_and_rollout() -> None:
    branched = Completion([user(1), said(2)], None, False, 1.0, branches=[[user(1, 9, 3), said(4, 5)]])
    other = Completion([user(1), said(6)], None, False, 0.0)

    batch = collate([group(11, branched, other)], as_numpy=True)

    assert batch["rollout_index"].tolist() == [0, 0, 1]
    assert batch["rewards"].tolist() == [1.0, 1.0, 0.0]
    assert batch["advantages"][0] == batch["advantages"][1] == -batch["advantages"][2]
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0, 0], [1, 9, 3, 4, 5], [1, 6, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]
    assert collate_packed([group(11, branched, other)], as_numpy=True)["cu_seqlens"].tolist() == [0, 2, 7, 9]


def test_masked_completions_have_no_loss_and_do_not_count_for_the_others() -> None:
    flagged = Completion([user(1), said(2)], {}, False, 5.0, mask_reason="flagged")
    lost = Completion([user(1)], None, False, math.nan, mask_reason="lost")
    good, bad = (Completion([user(1), said(3)], None, False, reward) for reward in (1.0, 0.0))

    batch = collate([group(11, flagged, good, lost, bad)], as_numpy=True)

    assert batch["sample_mask"].tolist() == [0, 1, 0, 1]
    assert batch["loss_mask"].sum(axis=1).tolist() == [0, 1, 0, 1]
    assert batch["advantages"].tolist()[::2] == [0, 0]
    assert batch["advantages"][1] == -batch["advantages"][3] > 0
    assert np.isfinite(batch["turn_rewards"]).all()
    assert batch["turn_rewards"].sum() == 1.0
