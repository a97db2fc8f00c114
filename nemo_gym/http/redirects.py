"""Where a redirect leads, for answers that came without aiohttp: what follows is what aiohttp would do.

The request that was redirected has been carried out, so it is not sent again to have aiohttp follow the redirect.
"""

from typing import Any, NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from nemo_gym.http.local_response import LocalResponse

REDIRECTS = frozenset({301, 302, 303, 307, 308})

_OF_ONE_ORIGIN = ("Authorization", "Cookie", "Proxy-Authorization")


class Redirect(NamedTuple):
    """The request to go on with."""

    method: str
    url: str
    kwargs: dict[str, Any]


def redirect_of(answer: LocalResponse, kwargs: dict[str, Any]) -> Redirect | None:
    """What to ask next, after `kwargs` were answered with a redirect; None if the caller is to have that answer.

    Method and body go along as far as the status allows, what proves who is calling only within the same origin.
    """
    location = answer.headers.get("Location") or answer.headers.get("URI")
    if location is None or not kwargs.get("allow_redirects", True):
        return None
    try:
        url = answer.url.join(URL(location))
        is_same_origin = url.origin() == answer.url.origin()
    except ValueError as error:
        raise aiohttp.InvalidUrlRedirectClientError(location, "The server redirects to what is no URL") from error
    method, dropped = answer.method, {"params"}
    if (answer.status == 303 and method != "HEAD") or (answer.status in (301, 302) and method == "POST"):
        method = "GET"
        dropped.add("data")
    if not is_same_origin:
        dropped.add("cookies")
    kept = {name: value for name, value in kwargs.items() if name not in dropped}
    if not is_same_origin and kept.get("headers"):
        kept["headers"] = CIMultiDict(kept["headers"])
        for name in _OF_ONE_ORIGIN:
            kept["headers"].popall(name, None)
    return Redirect(method, str(url), kept)
