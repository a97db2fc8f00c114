"""Finding the part of a text that a regular expression is about."""

import logging
import re

logger = logging.getLogger(__name__)


def extracted(text: str, pattern: str | None) -> str:
    """The first non-empty group of the pattern's last match, or the whole match; without a match `text` itself."""
    if pattern is None:
        return text
    try:
        matches = list(re.finditer(pattern, text, re.MULTILINE | re.DOTALL))
    except re.error as error:
        logger.warning("the regular expression %r is ignored: %s", pattern, error)
        return text
    if not matches:
        return text
    groups = [group for group in matches[-1].groups() if group]
    return (groups[0] if groups else matches[-1][0]).strip()
