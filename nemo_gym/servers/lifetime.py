"""What begins and ends with an app: processes, pools, files that a server holds while it serves."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI


def while_serving(app: FastAPI, *, end: Callable[[], object], begin: Callable[[], object] | None = None) -> FastAPI:
    """Call `begin` when the app starts and `end` when it stops, around whatever else it does then; the same app."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(served: Any) -> AsyncIterator[Any]:
        async with inner(served) as state:
            if begin is not None:
                begin()
            try:
                yield state
            finally:
                end()

    app.router.lifespan_context = lifespan
    return app
