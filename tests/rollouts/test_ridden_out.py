"""What model servers tell of their retries becomes the numbers of one run."""

from typing import Any

import pytest

from nemo_gym.collect.server_health import RetryLedger, retried_text

X = "\N{MULTIPLICATION SIGN}"
URL = "http://10.0.0.1/v1"


def told(asked_s_ago: float | None = 1.0, cost_s: float = 0.0, **counts: int) -> list[dict[str, Any]]:
    """`n429=3` is three times 429."""
    ridden_out = {kind.lstrip("n"): count for kind, count in counts.items()}
    return [
        {
            "url": URL,
            "asked_s_ago": asked_s_ago,
            "ridden_out": ridden_out,
            "ridden_out_cost_s": cost_s,
            "pausing": {"429": 2} if counts.get("n429") else {},
        }
    ]


def test_counts_grow_with_what_is_told_and_are_shown_with_their_cost() -> None:
    ledger = RetryLedger()
    for seconds, state in enumerate([told(None), told(n429=2, cost_s=5.0), told(n429=37, timeout=1, cost_s=130.0)], 1):
        ledger.note("policy_model", 1, state, run_for_s=seconds)

    assert ledger.lines() == [
        f"Retries: {URL}: tried again after 37 {X} 429, 1 {X} timeout, at a cost of 2.2 min over all calls"
    ]
    assert ledger.as_json() == {URL: {"tried_again": {"429": 37, "timeout": 1}, "cost_s": 130.0}}
    assert retried_text(ledger, {"connect": 3}) == (
        f"tried again after 37 {X} 429, 1 {X} timeout in 2.2 min, calls waiting: 2 {X} 429, "
        f"rollouts waiting to be tried again: 3 {X} connect"
    )


def test_what_was_counted_before_the_run_is_left_out() -> None:
    ledger = RetryLedger()
    ledger.note("policy_model", 1, told(900.0, 60.0, n429=50), run_for_s=1)
    assert ledger.lines() == []

    ledger.note("policy_model", 1, told(903.0, 64.0, n429=52), run_for_s=4)

    assert ledger.as_json() == {URL: {"tried_again": {"429": 2}, "cost_s": 4.0}}


def test_processes_are_added_up_and_one_that_was_started_again_counts_on() -> None:
    ledger = RetryLedger()
    for process, state in [
        (1, told(n429=10, cost_s=10.0)),
        (2, told(n503=5, cost_s=1.0)),
        (1, told(n429=3, cost_s=2.0)),
    ]:
        ledger.note("policy_model", process, state, run_for_s=5)

    assert ledger.as_json() == {URL: {"tried_again": {"429": 13, "503": 5}, "cost_s": 13.0}}


@pytest.mark.parametrize(
    "odd",
    [
        None,
        "text",
        {},
        [None],
        [{}],
        [{"url": URL, "has_answered": True, "asked_s_ago": 1.0}],  # as servers without these counts tell
        [{**told(n429=1)[0], "ridden_out": 3}],
        [{**told(n429=1)[0], "ridden_out_cost_s": None}],
        [{**told(n429=1)[0], "ridden_out": {"429": "many"}}],
    ],
)
def test_servers_that_tell_nothing_or_nonsense_have_had_no_retries(odd: Any) -> None:
    ledger = RetryLedger()

    ledger.note("policy_model", 1, odd, run_for_s=5)

    assert (ledger.lines(), ledger.notice(), retried_text(ledger, {})) == ([], "", "")


def test_waiting_for_the_pace_is_told_beside_what_was_ridden_out() -> None:
    ledger = RetryLedger()
    paced = [{**told()[0], "paced_s": 0.001, "pacing": 0}]
    ledger.note("policy_model", 1, paced, run_for_s=2)
    assert (ledger.lines(), ledger.notice(), ledger.as_json()) == ([], "", {})

    ledger.note("policy_model", 1, [{**told()[0], "paced_s": 90.0, "pacing": 7}], run_for_s=4)
    ledger.note("policy_model", 2, [{**told(900.0)[0], "paced_s": 500.0, "pacing": 0}], run_for_s=4)  # before the run
    ledger.note("policy_model", 2, [{**told(902.0)[0], "paced_s": 530.0, "pacing": 1}], run_for_s=6)

    assert ledger.lines() == [f"Pace: {URL}: waited 2.0 min for the pace over all calls"]
    assert retried_text(ledger, {}) == "waited 2.0 min for the pace over all calls (8 waiting now)"
    assert ledger.as_json() == {URL: {"tried_again": {}, "cost_s": 0.0, "paced_s": 120.0}}

    ledger.note("policy_model", 1, [{**told(n429=1, cost_s=2.0)[0], "paced_s": 3.0, "pacing": 0}], run_for_s=8)

    assert ledger.as_json() == {URL: {"tried_again": {"429": 1}, "cost_s": 2.0, "paced_s": 123.0}}
    waited = "waited 2.0 min for the pace over all calls (1 waiting now)"
    assert ledger.notice() == f"tried again after 1 {X} 429 in 2.0 s, calls waiting: 2 {X} 429, {waited}"


def test_with_a_judge_beside_the_policy_it_is_told_whose_retries_they_are() -> None:
    ledger = RetryLedger()
    ledger.note("policy_model", 1, told(None), run_for_s=1)
    ledger.note("judge_model", 1, told(n429=3, cost_s=6.0), run_for_s=2)
    ledger.note("judge_model", 2, [{**told(n429=1, cost_s=1.0)[0], "paced_s": 30.0, "pacing": 4}], run_for_s=2)

    assert ledger.lines() == [
        f"Retries: judge_model at {URL}: tried again after 4 {X} 429, at a cost of 7.0 s over all calls",
        f"Pace: judge_model at {URL}: waited 30.0 s for the pace over all calls",
    ]
    of_judge = f"tried again after 4 {X} 429 in 7.0 s, calls waiting: 4 {X} 429"
    assert ledger.notice() == f"judge_model: {of_judge}, waited 30.0 s for the pace over all calls (4 waiting now)"
    assert ledger.pausing_in("judge_model") == {"429": 4}
    assert not ledger.pausing_in("policy_model")

    ledger.note("policy_model", 1, told(n503=2, cost_s=1.0), run_for_s=3)

    of_both = {"tried_again": {"503": 2, "429": 4}, "cost_s": 8.0, "paced_s": 30.0}
    assert ledger.as_json() == {
        URL: {
            **of_both,
            "by_server": {
                "policy_model": {"tried_again": {"503": 2}, "cost_s": 1.0},
                "judge_model": {"tried_again": {"429": 4}, "cost_s": 7.0, "paced_s": 30.0},
            },
        }
    }
