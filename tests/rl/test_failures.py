import pickle

import aiohttp
import pytest

from nemo_gym.http.errors import ERROR_STATUS_HEADER, ServerResponseError, ServerUnreachableError
from nemo_gym.rl import failures
from nemo_gym.rl.failures import Budget, FailureClass, RolloutRetryPolicy, RolloutStats, classify_rollout_failure


def caused_by(cause: BaseException, error: BaseException | None = None) -> BaseException:
    error = error or RuntimeError("outer")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        failures.GymTransportError("x"),
        failures.RolloutTimeout("x"),
        failures.GenerationUnavailable("x"),
        TimeoutError(),
        ConnectionResetError(),
        ServerUnreachableError("x"),
        aiohttp.ClientPayloadError(),
        ServerResponseError("http://a/run", 500),
        ServerResponseError("http://a/run", 503),
        ServerResponseError("http://a/run", 408),
        ServerResponseError("http://a/run", 429),
        caused_by(caused_by(ConnectionRefusedError())),
    ],
)
def test_what_may_turn_out_well_another_time_is_infrastructure(error: BaseException) -> None:
    assert classify_rollout_failure(error) is FailureClass.INFRA


@pytest.mark.parametrize(
    "error",
    [
        failures.RolloutDataFailure("x"),
        ValueError(),
        ServerResponseError("http://a/run", 422),
        caused_by(TimeoutError(), failures.RolloutDataFailure("x")),
        ServerResponseError("http://a/run", 500, headers=[(ERROR_STATUS_HEADER, "400")]),
    ],
)
def test_everything_else_is_data(error: BaseException) -> None:
    assert classify_rollout_failure(error) is FailureClass.DATA


def test_a_circle_of_causes_comes_to_an_end() -> None:
    one, other = RuntimeError("a"), RuntimeError("b")
    one.__cause__, other.__cause__ = other, one
    assert classify_rollout_failure(one) is FailureClass.DATA


@pytest.mark.parametrize("name", ["ActorDiedError", "RpcError"])
def test_what_breaks_in_ray_is_infrastructure_without_ray_being_installed(name: str) -> None:
    died = type(name, (Exception,), {"__module__": "ray.exceptions"})
    other = type(name, (Exception,), {"__module__": "theatre"})
    assert classify_rollout_failure(died()) is FailureClass.INFRA
    assert classify_rollout_failure(other()) is FailureClass.DATA


@pytest.mark.parametrize(
    "kind",
    [failures.GymTransportError, failures.NonContiguousTokensError, failures.IncompleteTokenDataError],
)
def test_failures_survive_the_way_between_processes(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("rows [3] never came back")))
    assert type(again) is kind
    assert str(again) == "rows [3] never came back"


def test_budgets_are_used_up_independently_and_pauses_double_up_to_a_bound() -> None:
    policy = RolloutRetryPolicy(4, 2, 1, backoff_base_s=1.0, max_backoff_s=3.0)
    budget = Budget(policy)

    pauses = [budget.pause_after(FailureClass.INFRA) for _ in range(2)]
    assert budget.pause_after(FailureClass.DATA) == 0.0
    pauses += [budget.pause_after(FailureClass.INFRA) for _ in range(2)]
    assert pauses == [1.0, 2.0, 3.0, None]
    assert budget.pause_after(FailureClass.DATA) is None


@pytest.mark.parametrize("name", ["max_infra_attempts", "max_data_attempts", "max_gym_row_attempts"])
def test_there_is_at_least_one_attempt(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        RolloutRetryPolicy.single_attempt(**{name: 0})


def test_counters_go_out_as_totals_and_by_exception() -> None:
    stats = RolloutStats(completed=2, gym_row_redispatches=3)
    stats.retries[FailureClass.INFRA].update(["RolloutTimeout", "RolloutTimeout", "GymTransportError"])
    stats.given_up[FailureClass.DATA].update(["RolloutDataFailure"])

    assert stats.as_metrics() == {
        "rollout/completed_total": 2.0,
        "rollout/committed_total": 0.0,
        "rollout/skipped_total": 0.0,
        "rollout/max_consecutive_infra_drops": 0.0,
        "rollout/infra_drops_total": 0.0,
        "rollout/gym_row_redispatch_total": 3.0,
        "rollout/redispatch_total": 3.0,
        "rollout/redispatch_total/GymTransportError": 1.0,
        "rollout/redispatch_total/RolloutTimeout": 2.0,
        "rollout/data_retry_total": 0.0,
        "rollout/infra_failures_total": 0.0,
        "rollout/data_failures_total": 1.0,
        "rollout/data_failures_total/RolloutDataFailure": 1.0,
    }
