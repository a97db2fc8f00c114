"""Every error this package raises on purpose.

`ConfigError` and its children are the user's to fix: commands print the message
without a traceback and exit 2. Each also keeps the built-in parent that existing
code catches.

Those of starting and watching servers are also `RuntimeError`s, which programs that embed `RunHelper` catch.
"""

import errno
import os
from collections.abc import Iterable


class GymError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(GymError):
    """The user can fix this: the message names the value, the place and the remedy."""


class ConfigPathNotFoundError(ConfigError, FileNotFoundError):
    """A file named by the user does not exist in any place it was looked for."""


class MalformedConfigPathsError(ConfigError, ValueError):
    """`config_paths` is something other than a list of paths."""


class NoServerInstancesError(ConfigError, ValueError):
    """The config defines no server, so there is nothing to start."""


class ConfigMissingValuesError(ConfigError, ValueError):
    """Values marked `???` were never supplied."""


class ConfigInterpolationError(ConfigError, ValueError):
    """A `${...}` refers to something that is not there."""


class ServerRefNotFoundError(ConfigError, AssertionError, ValueError):
    """A server reference names a server that is not configured."""


class InheritPathNotFoundError(ConfigError, ValueError):
    """`_inherit_from` or `_copy` names a path that does not exist, or refers to itself."""


class AlmostServerError(ConfigError, ValueError):
    """A block looks like a server but does not validate as one."""


class DuplicateInstanceError(ConfigError, ValueError):
    """Two files define one instance name as two different servers."""


class UnknownOptionError(ConfigError, ValueError):
    """An option on the command line that nothing reads."""


class OverrideSyntaxError(ConfigError, ValueError):
    """A `+key=value` argument that cannot be read."""


class NoOpenPortError(ConfigError, RuntimeError):
    """No free port was found in the range that servers may use."""


def listed(names: Iterable[object], limit: int = 10) -> str:
    """`a, b, c and 7 more`, or `nothing`."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return (", ".join(texts[:limit]) or "nothing") + more


def similar_names(name: str, known: Iterable[object], limit: int = 1) -> list[str]:
    """The known names that are spelled most like `name`, the best first."""
    from difflib import get_close_matches

    return get_close_matches(name, sorted({str(other) for other in known}), n=limit, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[object]) -> str:
    """`; did you mean 'x'?` when something known is spelled similarly, else nothing."""
    return "".join(f"; did you mean {other!r}?" for other in similar_names(name, known))


class UnknownArgumentError(ConfigError, TypeError):
    """A config was made with an argument that its class does not have."""


class ServerFolderError(ConfigError, RuntimeError):
    """A server's folder or entrypoint is not what a server needs."""


class EnvironmentBuildError(ConfigError, RuntimeError):
    """The requirements of a server cannot be installed."""


class ServerStartError(GymError, RuntimeError):
    """A server did not come up."""


class ServerBlockError(ConfigError, ServerStartError):
    """A server refuses its own block of the configuration."""


class ServerCrashedError(GymError, RuntimeError):
    """A process that should run on has ended."""


class HeadServerStoppedError(GymError, RuntimeError):
    """The head server, which runs in this process, has ended."""


class FileProblemError(GymError, OSError):
    """The system refuses to open, read or write a file; the message names the file."""


class FileAccessError(ConfigError, FileProblemError):
    """The same where the user can correct it: permissions, a folder in place of a file, a path that leads nowhere."""


_USERS_TO_CORRECT = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)


def names_a_file(error: OSError) -> bool:
    """Return whether it is about a file, and says about which."""
    return isinstance(error.filename, str | bytes | os.PathLike)


def file_problem(error: OSError, doing: str = "use", path: object = None, remedy: str = "") -> FileProblemError:
    """Return the one-line error for a file that the system refuses.

    Args:
        error: What the system said.
        doing: What was to be done with the file, as a verb.
        path: The file, where the system does not name it.
        remedy: What to do about it.
    """
    name = os.fsdecode(error.filename) if names_a_file(error) else path
    kind = FileAccessError if error.errno in _USERS_TO_CORRECT else FileProblemError
    what = remedy or "check the path, its permissions and the disk, and run the command again"
    return kind(f"cannot {doing} {name}: {error.strerror or error}; {what}")
