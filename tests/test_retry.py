"""One formula of pauses, and what each of its users makes of it."""

import pytest

from nemo_gym.collect.failures import RetryPauses
from nemo_gym.launch.fleet import RestartBudget
from nemo_gym.retry import Backoff, RetryPolicy
from nemo_gym.rl.failures import RolloutRetryPolicy


def test_pauses_double_up_to_their_bound() -> None:
    pauses = [Backoff(1, 8).after(failures) for failures in (1, 2, 3, 4, 5, 5000)]

    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert all(isinstance(pause, float) for pause in pauses)


@pytest.mark.parametrize("certain", [0.0, 0.5, 0.9])
def test_what_is_not_certain_is_drawn(certain: float) -> None:
    drawn = [Backoff(1, 8, certain).after(4) for _ in range(500)]

    assert all(8 * certain <= pause <= 8 for pause in drawn)
    assert len(set(drawn)) > 1


def test_every_user_keeps_its_own_pauses() -> None:
    restarts, times_s = RestartBudget(max_restarts=9), range(9)

    assert [restarts.next_pause(float(at)) for at in times_s] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert [RolloutRetryPolicy.single_attempt().backoff_s(n) for n in (1, 2, 6, 99)] == [1.0, 2.0, 30.0, 30.0]
    assert RetryPauses() == RetryPauses(first_s=2.0, longest_s=60.0, certain=0.5)
    assert all(30 <= RetryPauses().after(99) <= 60 for _ in range(50))
    assert all(0 <= RetryPolicy().delay_s(99) <= 10 for _ in range(50))
