"""Finding the part of a text that a regular expression is about."""

import logging
import re

from nemo_gym.workers import PatternMatcher, captured

logger = logging.getLogger(__name__)


async def extracted(text: str, pattern: str | None, matcher: PatternMatcher) -> str:
    """The first non-empty group of the pattern's last match, or the whole match; without a match `text` itself.

    Raises:
        PatternTimeoutError: the pattern takes too long.
    """
    if pattern is None:
        return text
    try:
        found = await matcher.last_match(pattern, text, re.MULTILINE | re.DOTALL)
    except re.error as error:
        logger.warning("the regular expression %r is ignored: %s", pattern, error)
        return text
    return text if found is None else captured(found).strip()
