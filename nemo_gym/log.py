"""Logging is set up here and nowhere else: diagnostics go to stderr, stdout carries the product."""

import logging
import sys
from typing import TextIO

from nemo_gym.terminal import harmless

LOGGER_NAME = "nemo_gym"


class _LevelPrefixFormatter(logging.Formatter):
    """Plain text for information, the level's name in front of anything that needs attention; no escape sequences."""

    def format(self, record: logging.LogRecord) -> str:
        text = harmless(super().format(record))
        return text if record.levelno <= logging.INFO else f"{record.levelname.capitalize()}: {text}"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is at that moment, so that a redirected stderr is respected."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def setup_logging(*, verbose: bool = False) -> None:
    """Send this package's log records to stderr; safe to call more than once.

    Records still reach the root logger: a program that has handlers of its own there keeps seeing them.
    """
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(_LevelPrefixFormatter())
        logger.addHandler(handler)
