import io
import logging
import sys
from collections.abc import Iterator

import pytest

from nemo_gym.log import LOGGER_NAME, setup_logging

logger = logging.getLogger(f"{LOGGER_NAME}.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    package = logging.getLogger(LOGGER_NAME)
    handlers, level = list(package.handlers), package.level
    yield
    package.handlers[:], package.level = handlers, level


def test_records_go_to_stderr_once_with_the_level_where_it_matters(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    setup_logging()
    logger.debug("unseen")
    logger.info("plain")
    logger.warning("%d things", 2)
    assert capsys.readouterr() == ("", "plain\nWarning: 2 things\n")


def test_verbose_shows_details_and_can_be_turned_off_again(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(verbose=True)
    logger.debug("seen")
    setup_logging()
    logger.debug("unseen")
    assert capsys.readouterr().err == "seen\n"


def test_a_redirected_stderr_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging()
    elsewhere = io.StringIO()
    monkeypatch.setattr(sys, "stderr", elsewhere)
    logger.error("hello")
    assert elsewhere.getvalue() == "Error: hello\n"


def test_handlers_of_the_surrounding_program_still_see_records(caplog: pytest.LogCaptureFixture) -> None:
    setup_logging()
    logger.info("hello")
    assert caplog.messages == ["hello"]


def test_what_a_record_quotes_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    try:
        raise ValueError("\x1b[2Jgone")
    except ValueError:
        logger.exception("%s", "\x9b31m\u202ered")
    printed = capsys.readouterr().err
    assert printed.startswith("Error: \\x9b31m\\u202ered\nTraceback")
    assert printed.endswith("ValueError: \\x1b[2Jgone\n")
