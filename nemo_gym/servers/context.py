"""Which server instance the running code belongs to.

Alone in its process a server is named by the environment; hosted with others, by a context
variable, which also tells whose output a printed line is.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from nemo_gym.errors import ConfigError
from nemo_gym.keys import NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME
from nemo_gym.process_inputs import instance_name

_INSTANCE_NAME: ContextVar[str | None] = ContextVar("nemo_gym_instance_name", default=None)


def current_instance() -> str | None:
    """The instance this code runs for, if it runs for one."""
    return _INSTANCE_NAME.get() or instance_name()


def require_instance() -> str:
    """The instance this code runs for."""
    name = current_instance()
    if name is None:
        raise ConfigError(
            f"this process does not know which server it is: set {NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME} to the name of an "
            "instance in the config, or start servers with ng_run"
        )
    return name


enter_instance = _INSTANCE_NAME.set
leave_instance = _INSTANCE_NAME.reset


@contextmanager
def running_as(name: str) -> Iterator[None]:
    """Run a block of code as the instance `name`."""
    token = enter_instance(name)
    try:
        yield
    finally:
        leave_instance(token)


class PrefixedStream:
    """A text stream that puts `(instance) ` in front of every line written for an instance."""

    def __init__(self, stream: TextIO, fallback: str) -> None:
        self._stream = stream
        self._fallback = fallback
        self._at_line_start = True

    def write(self, text: str) -> int:
        """Write `text`, each of its lines prefixed."""
        if text:
            prefix = f"({_INSTANCE_NAME.get() or self._fallback}) "
            body = text.removesuffix("\n").replace("\n", f"\n{prefix}")
            start = prefix if self._at_line_start else ""
            self._at_line_start = text.endswith("\n")
            self._stream.write(f"{start}{body}{text[len(text.removesuffix(chr(10))) :]}")
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def prefix_output(fallback: str) -> None:
    """Attribute everything this process prints to the instance it was printed for."""
    sys.stdout = PrefixedStream(sys.stdout, fallback)
    sys.stderr = PrefixedStream(sys.stderr, fallback)
