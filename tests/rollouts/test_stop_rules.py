import pytest

from nemo_gym.collect.failures import Verdict
from nemo_gym.collect.stopping import Stop, StopKind, StopRules
from nemo_gym.runs.record import FailureClass, Outcome, RolloutKey


def failed(task: int, failure_class: str = "agent_error", *, agent: str = "a", is_final: bool = True) -> Verdict:
    return Verdict(agent, RolloutKey(task, 0), Outcome.FAILURE, is_final, failure_class, f"{failure_class} happened")


def succeeded(agent: str = "a") -> Verdict:
    return Verdict(agent, None, Outcome.SUCCESS, is_final=True)


def discarded() -> Verdict:
    return Verdict("a", None, Outcome.DISCARDED, is_final=True)


def kind(stop: Stop | None) -> StopKind | None:
    return None if stop is None else stop.kind


def test_three_rollouts_without_a_valid_key_end_the_run_with_one_clear_message() -> None:
    rules = StopRules()

    stops = [rules.after(failed(task, "auth", is_final=False)) for task in range(3)]

    assert [kind(stop) for stop in stops] == [None, None, StopKind.DOOMED_AGENT]
    assert stops[2] is not None
    assert "'a'" in stops[2].message
    assert "auth happened" in stops[2].message


@pytest.mark.parametrize("failure_class", [kind for kind in FailureClass if kind.dooms_agent])
def test_every_class_that_dooms_an_agent_ends_the_run_in_words_of_its_own(failure_class: FailureClass) -> None:
    words = {"auth": "the key was refused in 3", "model_not_found": "the model was not found in 3"}
    rules = StopRules()

    stop = [rules.after(failed(task, failure_class)) for task in range(3)][-1]

    assert stop is not None
    assert stop.kind is StopKind.DOOMED_AGENT
    assert stop.message.startswith(words[failure_class])


@pytest.mark.parametrize("failure_class", [kind for kind in FailureClass if not kind.tells_of_run])
def test_what_says_nothing_about_the_run_does_not_end_it(failure_class: FailureClass) -> None:
    rules = StopRules(fail_fast=True, max_failure_fraction=0.0)

    assert [rules.after(failed(task, failure_class)) for task in range(30)] == [None] * 30
    assert rules.finished == 0


def test_attempts_at_one_rollout_count_once() -> None:
    rules = StopRules()

    assert [rules.after(failed(1, "model_not_found", is_final=False)) for _ in range(10)] == [None] * 10


def test_an_agent_that_has_succeeded_is_never_doomed() -> None:
    rules = StopRules()
    rules.after(succeeded())

    assert [rules.after(failed(task, "auth")) for task in range(10)] == [None] * 10


def test_each_agent_is_judged_by_itself() -> None:
    rules = StopRules()
    rules.after(succeeded("good"))

    stops = [rules.after(failed(task, "auth", agent="bad")) for task in range(3)]

    assert kind(stops[-1]) is StopKind.DOOMED_AGENT


def test_other_failures_never_end_the_run_by_themselves() -> None:
    rules = StopRules()

    assert [rules.after(failed(task, "http_4xx")) for task in range(1_000)] == [None] * 1_000


def refused(cause: str = "no", order: int = 0) -> Verdict:
    return failed(0, "http_4xx")._replace(cause=cause, order=order)


def test_five_refusals_for_one_reason_end_a_run_in_which_nothing_has_succeeded() -> None:
    rules = StopRules()

    stops = [rules.after(refused(cause)) for cause in ["no", "never", "no", "no", "no", "no"]]

    assert [kind(stop) for stop in stops] == [None] * 5 + [StopKind.HOPELESS]


def test_refusals_end_no_run_in_which_something_succeeded_now_or_before() -> None:
    before, now = StopRules(has_succeeded=True), StopRules()
    now.after(succeeded("another agent"))

    assert [rules.after(refused()) for rules in (before, now) for _ in range(100)] == [None] * 200


def test_refusals_wait_for_what_was_started_before_them() -> None:
    rules = StopRules()

    assert [rules.after(refused(order=n), oldest=0) for n in range(1, 10)] == [None] * 9
    assert kind(rules.after(refused(order=10), oldest=6)) is StopKind.HOPELESS


def test_failure_classes_of_agents_may_be_anything() -> None:
    rules = StopRules()

    for task, odd in enumerate(["", 0, [], {}]):
        assert rules.after(Verdict("a", RolloutKey(task, 0), Outcome.FAILURE, True, odd)) is None


def test_failing_fast_waits_until_a_rollout_has_failed_for_good() -> None:
    rules = StopRules(fail_fast=True)

    assert rules.after(failed(0, is_final=False)) is None
    assert kind(rules.after(failed(0))) is StopKind.FAIL_FAST


def test_the_fraction_of_failures_is_judged_from_twenty_finished_rollouts_on() -> None:
    rules = StopRules(max_failure_fraction=0.5)
    for task in range(12):
        assert rules.after(failed(task)) is None
    for _ in range(7):
        assert rules.after(succeeded()) is None

    assert kind(rules.after(succeeded())) is StopKind.TOO_MANY_FAILURES


def test_the_fraction_must_be_crossed_not_reached() -> None:
    rules = StopRules(max_failure_fraction=0.5)
    for task in range(10):
        rules.after(succeeded())
        assert rules.after(failed(task)) is None

    stop = rules.after(failed(10))

    assert stop is not None
    assert "11 of 21" in stop.message


def test_discarded_results_and_attempts_to_be_repeated_are_not_finished_rollouts() -> None:
    rules = StopRules(fail_fast=False, max_failure_fraction=0.0)
    for task in range(100):
        assert rules.after(discarded()) is None
        assert rules.after(failed(task, is_final=False)) is None

    assert (rules.finished, rules.failed) == (0, 0)


def test_messages_are_fit_for_a_terminal() -> None:
    verdict = Verdict("a\x1b[2J", RolloutKey(0, 0), Outcome.FAILURE, True, "x", "line\n\x1b[31mred")

    stop = StopRules(fail_fast=True).after(verdict)

    assert stop is not None
    assert stop.message.isprintable()
