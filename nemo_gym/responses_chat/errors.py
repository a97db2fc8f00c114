"""Requests that cannot be put to a Chat Completions endpoint: the caller's to change, hence status 400."""

from starlette.exceptions import HTTPException


class UnusableRequestError(HTTPException, ValueError):
    """A request whose values do not fit together; over HTTP it is answered with 400."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)

    def __str__(self) -> str:
        return self.detail

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.detail,)


class NoChatFormError(UnusableRequestError, NotImplementedError):
    """A part of a Responses request that the Chat Completions API has no words for."""
