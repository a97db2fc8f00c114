"""Logging is set up here and nowhere else: diagnostics go to stderr, stdout carries the product."""

import logging
import sys

LOGGER_NAME = "nemo_gym"


class _LevelPrefixFormatter(logging.Formatter):
    """Plain text for information, the level's name in front of anything that needs attention."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname.capitalize()}: {text}"


def setup_logging(*, verbose: bool = False) -> None:
    """Send this package's log records to stderr; safe to call more than once."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    if not any(getattr(handler, "set_up_by_nemo_gym", False) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_LevelPrefixFormatter())
        handler.set_up_by_nemo_gym = True  # type: ignore[attr-defined]
        logger.addHandler(handler)
        logger.propagate = False
