import io
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nemo_gym.log import LOGGER_NAME, SAME_AS, Repeats, setup_logging

logger = logging.getLogger(f"{LOGGER_NAME}.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    package = logging.getLogger(LOGGER_NAME)
    handlers, level = list(package.handlers), package.level
    setup_logging()  # what other tests have left to be said is said now
    package.handlers.clear()
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


def test_equal_warnings_are_counted_and_told_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("nemo_gym.log.time.monotonic", lambda: now_s)
    repeats = Repeats(quiet_s=30)

    def warned(text: str, same_as: str | None = None) -> logging.LogRecord:
        record = logging.LogRecord("nemo_gym.x", logging.WARNING, __file__, 1, text, None, None)
        return logging.makeLogRecord({**record.__dict__, **({} if same_as is None else {SAME_AS: same_as})})

    assert repeats.remark_on(warned("refused")) == ""
    assert [repeats.remark_on(warned("refused")) for _ in range(37)] == [None] * 37
    assert repeats.remark_on(warned("lost")) == ""
    now_s = 31.0
    assert repeats.remark_on(warned("refused")) == " (… 37 more like this)"
    assert repeats.remark_on(warned("try 1", "tries")) == ""
    assert repeats.remark_on(warned("try 2", "tries")) is None
    assert repeats.rest() == ["… 1 more like this: try 1"]
    assert repeats.rest() == []


def test_nothing_that_was_counted_is_lost_among_many_kinds_of_warnings() -> None:
    repeats, kinds = Repeats(quiet_s=30), 2_000
    for text in (f"kind {number}" for number in range(kinds) for _ in range(1 + number % 3)):
        repeats.remark_on(logging.LogRecord("nemo_gym.x", logging.WARNING, __file__, 1, text, None, None))

    told = repeats.rest()

    expected = [f"… {number % 3} more like this: kind {number}" for number in range(kinds) if number % 3]
    assert sorted(told) == sorted(expected)
    assert repeats.rest() == []


def test_what_was_counted_is_told_when_the_process_ends() -> None:
    program = (
        "import logging; from nemo_gym.log import setup_logging; setup_logging(); "
        "[logging.getLogger('nemo_gym.x').warning('refused') for _ in range(5)]"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert done.stderr.splitlines() == ["Warning: refused", "Warning: … 4 more like this: refused"]


def test_a_command_that_is_run_again_warns_again(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        setup_logging()
        logging.getLogger("nemo_gym.x").warning("look out")

    assert capsys.readouterr().err.splitlines() == ["Warning: look out"] * 2
