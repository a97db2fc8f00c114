import logging
import time

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.http.settings import HTTP_CONFIG_KEYS, GlobalAIOHTTPAsyncClientConfig
from nemo_gym.retry import RetryPolicy, Tries


def test_pauses_grow_to_their_bound_and_stay_random() -> None:
    policy = RetryPolicy(first_delay_s=1, max_delay_s=8)

    longest = {failures: max(policy.delay_s(failures) for _ in range(500)) for failures in (1, 2, 3, 4, 50, 5000)}

    assert 0.5 < longest[1] <= 1
    assert 1 < longest[2] <= 2
    assert 2 < longest[3] <= 4
    assert 4 < longest[4] <= 8
    assert 4 < longest[50] <= 8
    assert 4 < longest[5000] <= 8
    assert min(policy.delay_s(4) for _ in range(500)) < 1


def test_tries_end_with_their_number() -> None:
    tries = Tries(RetryPolicy(max_tries=3))

    pauses = [tries.pause_after_failure() for _ in range(3)]

    assert [pause is None for pause in pauses] == [False, False, True]
    assert tries.failures == 3


def test_tries_end_with_their_time_counted_from_the_first_failure() -> None:
    slow_call = Tries(RetryPolicy(max_elapsed_s=60), started_s=time.monotonic() - 1000)

    assert slow_call.pause_after_failure() is not None
    slow_call._first_failure_s = time.monotonic() - 61
    assert slow_call.pause_after_failure() is None
    assert slow_call.elapsed_s >= 1000


def test_what_the_peer_asks_for_is_granted_within_the_remaining_time() -> None:
    policy = RetryPolicy(max_elapsed_s=10, first_delay_s=0.1)

    granted = Tries(policy).pause_after_failure(at_least_s=5)
    cut = Tries(policy).pause_after_failure(at_least_s=3600)

    assert granted is not None
    assert 5 <= granted <= 5.1
    assert cut is not None
    assert 9 < cut <= 10


def test_only_the_first_failure_is_logged_and_a_place_is_not_named_again_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(50):
        tries = Tries(RetryPolicy())
        for _ in range(3):
            tries.pause_after_failure()
            tries.warn_of_first("http://there", "Cannot connect")

    assert [record.getMessage() for record in caplog.records] == [
        "Cannot connect. Trying again, up to 199 times within 600 s"
    ]


def test_settings_come_from_the_config_and_feed_the_policies() -> None:
    settings = GlobalAIOHTTPAsyncClientConfig.from_config(
        {"http_retry_max_elapsed_s": 5, "model_retry_max_tries": 7, "http_total_timeout_s": None, "other": 1}
    )

    assert settings.retry_between_servers.max_elapsed_s == 5
    assert settings.retry_model_calls.max_tries == 7
    assert settings.http_total_timeout_s > 6 * 3600


def test_an_impossible_setting_is_named_with_its_value() -> None:
    with pytest.raises(ConfigError, match=r"`http_total_timeout_s: 0`.*greater than 0"):
        GlobalAIOHTTPAsyncClientConfig.from_config({"http_total_timeout_s": 0})


def test_every_setting_is_a_known_config_key() -> None:
    assert {"global_aiohttp_connector_limit", "http_retry_max_elapsed_s", "model_retry_max_tries"} <= HTTP_CONFIG_KEYS
