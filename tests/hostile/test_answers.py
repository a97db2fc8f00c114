"""No answer gets more of its verifier than it deserves, leaves the score, or keeps another session waiting."""

from collections.abc import Iterator

import pytest

from nemo_gym.server_utils import ServerClient
from tests.hostile.answers import ANSWERS, MARKDOWN, ROWS
from tests.hostile.verifiers import ATTACKED, problem_with, verifiers


@pytest.fixture(scope="module")
def client() -> Iterator[ServerClient]:
    with verifiers() as client:
        yield client


def test_every_bundled_verifier_is_attacked_with_many_answers() -> None:
    assert {ROWS[answer.row].instance for answer in ANSWERS.values()} == {*ATTACKED, MARKDOWN}
    assert len(ANSWERS) >= 200


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_gets_what_it_deserves_and_keeps_nobody_waiting(name: str, client: ServerClient) -> None:
    assert problem_with(client, ANSWERS[name]) is None
