import random
from dataclasses import replace

import pytest

from nemo_gym.token_id_capture.builder import (
    BuildOutput,
    assert_prefix_contiguity,
    project_chain_to_output_items,
    project_main_chain_response,
    run_builder,
)
from nemo_gym.token_id_capture.records import TokenEntry
from tests.token_id_capture.calls import call, message


def ids(out: BuildOutput) -> list[list[str]]:
    return [[link.entry.model_call_id for link in chain.links] for chain in out.chains]


def test_calls_that_go_on_from_each_other_are_one_chain_in_whatever_order_they_came() -> None:
    calls = [call("a", [1], [2]), call("b", [1, 2, 3], [4, 5]), call("c", [1, 2, 3, 4, 5], [6])]
    for _ in range(6):
        random.shuffle(calls)
        out = run_builder(calls)
        assert ids(out) == [["a", "b", "c"]]
        chain = out.chains[0]
        assert chain.root_prompt == [1]
        assert [link.interstitial for link in chain.links] == [[], [3], []]
        assert (out.notes.roots, out.notes.chains, out.notes.delivered_fraction) == (1, 1, 1.0)


def test_a_rewritten_history_and_a_sub_agent_begin_chains_of_their_own_the_first_call_is_the_main_one() -> None:
    calls = [
        call("main", [1], [2], created_at=1.0),
        call("sub", [9], [8], created_at=2.0),
        call("on", [1, 2, 3], [4], created_at=3.0),
        call("compacted", [1, 7], [6], created_at=4.0),
    ]
    out = run_builder(calls)
    assert ids(out) == [["main", "on"], ["sub"], ["compacted"]]
    assert [chain.chain_id for chain in out.chains] == ["main", "branch-1", "branch-2"]
    assert out.notes.roots == 3
    assert out.notes.delivered_fraction == 0.5


def test_the_longest_beginning_is_the_parent() -> None:
    out = run_builder(
        [call("a", [1], [2]), call("b", [1, 2], [3]), call("c", [1, 2, 3, 4], [5]), call("d", [1, 2, 9], [5])]
    )
    assert sorted(ids(out)) == [["a", "b", "c"], ["a", "d"]]
    shorter_but_later = [call("a", [1], [2, 3, 4, 5]), call("b", [1, 2], [3]), call("c", [1, 2, 3, 4, 5, 6], [7])]
    assert sorted(ids(run_builder(shorter_but_later))) == [["a", "c"], ["b"]]


def test_of_tries_of_one_call_those_that_were_gone_on_with_count() -> None:
    out = run_builder([call("a", [1], [2]), call("b", [1], [3]), call("c", [1, 3, 4], [5])])
    assert ids(out) == [["b", "c"]]
    assert (out.notes.roots, out.notes.unresolved_retries) == (1, [])


def test_tries_none_of_which_was_gone_on_with_are_unresolved() -> None:
    out = run_builder([call("b", [1], [2]), call("a", [1], [3])])
    assert ids(out) == [["a"]]
    assert out.notes.unresolved_retries == ["a", "b"]


def test_a_call_that_could_go_on_from_two_is_in_quarantine() -> None:
    out = run_builder([call("a", [1], [2]), call("b", [1], [2]), call("c", [1, 2, 3], [4])])
    assert out.quarantined == ["c"]
    assert ids(out) == []


def test_calls_without_a_generated_token_are_set_aside() -> None:
    out = run_builder([call("a", [1], [2]), call("b", [1, 2, 3], [])])
    assert ids(out) == [["a"]]
    assert out.notes.empty_generation_calls == ["b"]


def test_per_request_is_for_looking_only() -> None:
    out = run_builder([call("a", [1], [2]), call("b", [1, 2], [3])], "per_request")
    assert ids(out) == [["a"], ["b"]]
    with pytest.raises(ValueError, match="per_request makes no conversation"):
        project_main_chain_response("3-1", out)
    with pytest.raises(ValueError, match="there is no builder 'other'; these are known: prefix_merging, per_request"):
        run_builder([], "other")


def test_the_tokens_go_to_the_item_they_were_on() -> None:
    reasoning = {"type": "reasoning", "summary": []}
    calls = [
        call("a", [1], [2], output_items=[message("x"), reasoning], token_item_index=0),
        call("b", [1, 2], [3], output_items=[reasoning, message("y")], token_item_index=None),
        call("c", [1, 2, 3], [4], output_items=[], token_item_index=None, routed_experts="abc"),
    ]
    response = project_main_chain_response("3-1", run_builder(calls))

    items = response["output"]
    assert [item.get("generation_token_ids") for item in items] == [[2], None, None, [3], [4]]
    assert [item["prompt_token_ids"] for item in items if "prompt_token_ids" in item] == [[1], [1, 2], [1, 2, 3]]
    assert items[-1]["routed_experts"] == "abc"
    assert items[-1]["role"] == "assistant"
    assert (response["id"], response["model"], response["usage"]) == (
        "proj-3-1",
        "m",
        {"input_tokens": 6, "output_tokens": 3},
    )
    assert calls[0].output_items == [message("x"), reasoning], "what was kept stays as it is"


def test_items_that_do_not_go_on_from_each_other_are_found() -> None:
    items = [message("a", prompt_token_ids=[1], generation_token_ids=[2]), message("b")]
    assert_prefix_contiguity({"output": items})
    items.append(message("c", prompt_token_ids=[1, 3], generation_token_ids=[2]))
    with pytest.raises(ValueError, match="output item 3 does not go on from the 2 tokens before it"):
        assert_prefix_contiguity({"output": items})


def test_a_chain_that_does_not_hold_together_is_refused() -> None:
    chain = run_builder([call("a", [1], [2]), call("b", [1, 2, 3], [4])]).chains[0]
    chain.links[1] = replace(chain.links[1], interstitial=[9])
    with pytest.raises(ValueError, match="call b does not go on"):
        chain.validate()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_conversations_there_were_every_chain_holds_every_token_of_its_calls(seed: int) -> None:
    draw = random.Random(seed)
    calls: list[TokenEntry] = []
    ends: list[list[int]] = [[draw.randrange(50)] for _ in range(draw.randrange(1, 4))]
    for number in range(draw.randrange(1, 25)):
        prompt = [*draw.choice(ends), 100 + number]
        entry = call(f"{number:02}", prompt, [draw.randrange(50) for _ in range(draw.randrange(1, 5))])
        calls.append(entry)
        ends.append(entry.prompt_token_ids + entry.generation_token_ids)
    given = list(calls)
    draw.shuffle(calls)

    out = run_builder(calls)

    assert not out.quarantined
    assert {link.entry.model_call_id for chain in out.chains for link in chain.links} == {
        entry.model_call_id for entry in given
    }
    for chain in out.chains:
        items = project_chain_to_output_items(chain)
        assert_prefix_contiguity({"output": items})
        assert len(items) == len(chain.links)
