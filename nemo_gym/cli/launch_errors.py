"""What can go wrong while servers are started and watched.

Each is also a `RuntimeError`, which programs that embed `RunHelper` catch.
"""

from nemo_gym.errors import ConfigError, GymError


class ServerFolderError(ConfigError, RuntimeError):
    """A server's folder or entrypoint is not what a server needs."""


class EnvironmentBuildError(ConfigError, RuntimeError):
    """The requirements of a server cannot be installed."""


class ServerStartError(GymError, RuntimeError):
    """A server did not come up."""


class ServerCrashedError(GymError, RuntimeError):
    """A process that should run on has ended."""


class HeadServerStoppedError(GymError, RuntimeError):
    """The head server, which runs in this process, has ended."""
