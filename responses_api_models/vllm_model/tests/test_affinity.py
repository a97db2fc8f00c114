"""Sessions stay where they began, and begin where there is least to do."""

from hashlib import sha256

import pytest

from responses_api_models.vllm_model.affinity import SessionAffinity, runs_in_several_processes


def use(affinity: SessionAffinity, session_id: str, num_endpoints: int = 2) -> int:
    with affinity.endpoint_for(session_id, num_endpoints) as endpoint:
        return endpoint


def test_sessions_that_come_one_after_the_other_take_turns_and_stay() -> None:
    affinity = SessionAffinity(by_hash=False)

    first = [use(affinity, session) for session in "abcd"]

    assert first == [0, 1, 0, 1]
    assert [use(affinity, session) for session in "dcba"] == [1, 0, 1, 0]


def test_a_new_session_goes_where_the_fewest_requests_are_under_way() -> None:
    affinity = SessionAffinity(by_hash=False)
    with affinity.endpoint_for("long", 3), affinity.endpoint_for("longer", 3):
        assert [use(affinity, f"short {number}", 3) for number in range(4)] == [2, 2, 2, 2]

    assert use(affinity, "afterwards", 3) == 0


def test_a_request_that_fails_is_no_longer_under_way() -> None:
    affinity = SessionAffinity(by_hash=False)
    with pytest.raises(ValueError, match="boom"), affinity.endpoint_for("a", 2):
        raise ValueError("boom")

    with affinity.endpoint_for("b", 2):
        assert use(affinity, "c") == 0


def test_sessions_nobody_uses_are_forgotten_and_do_not_count() -> None:
    now = 0.0
    affinity = SessionAffinity(ttl_s=10, by_hash=False, clock=lambda: now)
    use(affinity, "left")
    now = 6.0
    use(affinity, "stays")
    now = 11.0
    use(affinity, "stays")

    assert affinity.num_sessions == 1
    assert use(affinity, "new") == 0
    now = 1000.0
    use(affinity, "newest")
    assert affinity.num_sessions == 1


def test_several_processes_agree_by_hash_and_remember_nothing() -> None:
    here, there = SessionAffinity(by_hash=True), SessionAffinity(by_hash=True)
    sessions = [f"session {number}" for number in range(200)]

    chosen = [use(here, session, 3) for session in sessions]

    assert chosen == [use(there, session, 3) for session in reversed(sessions)][::-1]
    assert chosen == [int.from_bytes(sha256(name.encode()).digest()[:8], "big") % 3 for name in sessions]
    assert set(chosen) == {0, 1, 2}
    assert here.num_sessions == 0


@pytest.mark.parametrize("variable", ["NEMO_GYM_FASTAPI_NUM_WORKERS", "NEMO_GYM_NUM_REPLICAS"])
def test_workers_and_replicas_are_several_processes(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert not runs_in_several_processes()

    monkeypatch.setenv(variable, "4")
    assert runs_in_several_processes()
    assert SessionAffinity().by_hash


def test_a_session_whose_endpoint_is_gone_gets_another() -> None:
    affinity = SessionAffinity(by_hash=False)
    use(affinity, "a", 3)
    use(affinity, "b", 3)
    assert use(affinity, "c", 3) == 2

    assert use(affinity, "c", 2) in (0, 1)
