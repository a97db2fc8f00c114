"""The program of a worker that matches regular expressions, for `PatternMatcher`."""

import re
from typing import Any

from nemo_gym.workers.loop import serve


def last_match(request: dict[str, Any]) -> dict[str, Any]:
    """The last match and its groups; none without a match."""
    found = None
    for match in re.finditer(request["pattern"], request["text"], request["flags"]):
        found = match
    return {"found": None if found is None else [found[0], *found.groups()]}


if __name__ == "__main__":
    serve(lambda: last_match)
