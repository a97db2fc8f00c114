"""Where things are, how a relative path is looked up, and files that appear whole and are never somebody else's.

Components of users come before ours: a relative path is looked for in the folders of
`NEMO_GYM_EXTRA_ROOTS`, then in the current folder, then beside the installed package.

A file is on disk when its content was synced, and the folder that names it, too. What is written beside other files
has a name that nobody can guess, or is never followed if it turns out to be a symbolic link: in a folder that others
may write to, such a link would send what is written anywhere.
"""

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import BinaryIO

from nemo_gym.errors import ConfigError, similar_names
from nemo_gym.process_inputs import extra_roots

OWN_NAME = "nemo-gym"
ROOT_DIR = Path(__file__).absolute().parent
"""The `nemo_gym` package."""
PARENT_DIR = ROOT_DIR.parent
"""The install root: the checkout, or site-packages."""
WORKING_DIR = PARENT_DIR if (PARENT_DIR / "pyproject.toml").exists() else Path.cwd()
OWN_PACKAGE_FIRST = ROOT_DIR / "first_on_path"
"""On a search path it makes `nemo_gym` mean this package, whatever other folders hold."""
CACHE_DIR = WORKING_DIR / "cache"
RESULTS_DIR = WORKING_DIR / "results"
_STEP = r"(?!\.{1,2}(?:/|\Z))[^/\\\x00]+"
_PATH_INSIDE = re.compile(f"{_STEP}(?:/{_STEP})*")
_BUFFER_BYTES = 1 << 20
_TOKEN_BYTES = 6
_ASIDE = re.compile(r"(?P<name>.+)\.~[\w-]{8}\.tmp", re.ASCII)
"""The name of what is written aside for the file of that name."""
_ASIDE_LENGTH = len(".~12345678.tmp")
_TRIES = 100
_LONGEST_NAME = 255
_MOST_NAMES = 2_000
_WHILE_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.EBADF, errno.ENOSYS}

_FILE_TYPES = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class PathTraversalError(ConfigError, ValueError):
    """A name that leads somewhere else than names do."""


def require_path_inside(path: str, what: str) -> None:
    """Refuse a relative path that is absolute after all, or steps out of the folder it is relative to."""
    if not _PATH_INSIDE.fullmatch(path):
        raise PathTraversalError(f"{what} {path!r} must be a path below its folder: relative, and without `..`")


@cache
def own_roots() -> tuple[Path, ...]:
    """Return the folders that hold our servers: the install root, and the checkout that it is a copy of.

    Who installs a checkout without `-e` goes on working in it, so what it holds is ours as much as the copy.
    """
    if (PARENT_DIR / "pyproject.toml").exists():
        return (PARENT_DIR,)
    # Only copies need these, and importing them takes a while.
    import json
    from importlib.metadata import distributions
    from urllib.parse import unquote, urlsplit

    found = next(iter(distributions(name=OWN_NAME, path=[str(PARENT_DIR)])), None)
    origin = json.loads((found and found.read_text("direct_url.json")) or "{}")
    if "dir_info" not in origin:
        return (PARENT_DIR,)
    return PARENT_DIR, Path(unquote(urlsplit(origin["url"]).path))


def component_search_roots(*, sys_path: list[Path] | None = None) -> list[Path]:
    """The folders a relative path is looked for in, first match wins, without repetition.

    `sys_path` holds further folders, to come after the extra roots.
    """
    unique: dict[Path, Path] = {}
    for root in [*_named_roots(), *(sys_path or ()), Path.cwd(), PARENT_DIR]:
        unique.setdefault(root.resolve(), root)
    return list(unique.values())


def is_own_root(root: Path) -> bool:
    """Whether a search root holds our servers, and not only some of the same names."""
    return root.resolve() in {own.resolve() for own in own_roots()}


def install_command(extra: str) -> str:
    """Return the command that adds an extra of ours, for a person who has the checkout.

    The name nemo-gym belongs to somebody else on an index, and without `-e` an editable installation becomes a copy.
    """
    checkout = next((root for root in own_roots() if (root / "constraints.txt").is_file()), None)
    where = Path() if checkout is None or checkout.resolve() == Path.cwd() else checkout
    command = f"pip install -c {quote(str(where / 'constraints.txt'))} -e {quote(f'{where}[{extra}]')}"
    return command if checkout else f"{command} (in a checkout of this project)"


def _named_roots() -> list[Path]:
    return [Path(entry).expanduser().absolute() for entry in extra_roots()]


def install_root_of(file: str | None) -> Path:
    """Return the extra root, or the checkout of our own, that holds a program's file; else the install root.

    Programs of a checkout that is an extra root find their data below `nemo_gym.PARENT_DIR`.
    """
    place = None if file is None else Path(file).resolve()
    roots = [root for root in (*own_roots(), *_named_roots()) if place and place.is_relative_to(root.resolve())]
    return max(roots, key=lambda root: len(root.resolve().parts), default=PARENT_DIR)


def search_servers_in_all_roots() -> None:
    """Let this process import servers from the search roots: ours first, not their namesakes elsewhere."""
    roots = component_search_roots()
    sys.path[:0] = [str(root) for root in roots if is_own_root(root)]
    sys.path.extend(str(root) for root in roots if str(root) not in sys.path)


def candidates(path: str | Path) -> list[Path]:
    """Every place `path` may be, in search order."""
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:  # `~name` of nobody: then it is a name like any other
        expanded = Path(path)
    if expanded.is_absolute():
        return [expanded]
    return [root / expanded for root in component_search_roots()]


def resolve_for_reading(path: str | Path, accept: Callable[[Path], bool] = Path.exists) -> Path:
    """Where to read `path` from: the first candidate that `accept` likes.

    Without any, the candidate in the first root, so that the error names a place the user controls.
    Never use this to choose where to write.
    """
    places = candidates(path)
    return next((place for place in places if accept(place)), places[0])


def _resolve_under_cwd_or_install(rel_path: str | Path, *, validator: Callable[[Path], bool] | None = None) -> Path:
    return resolve_for_reading(rel_path, validator or Path.exists)


def near_files(path: str | Path, limit: int = 3) -> list[str]:
    """Files that may be meant by a path that leads nowhere, the likeliest first, written as `path` was.

    The first step that is missing is spelled almost like that; or the file is in a folder beside it; or there is one of
    almost that name where the path breaks off.
    """
    is_relative = not Path(path).is_absolute()
    found: list[tuple[int, str]] = []
    for place in candidates(path):
        depth = len(Path(path).parts)
        root = place.parents[depth - 1] if is_relative and place.parts[-depth:] == Path(path).parts else None
        for likelihood, near in _near(place):
            shown = near if root is None or not near.is_relative_to(root) else near.relative_to(root)
            found.append((likelihood, str(shown)))
    best = [name for likelihood, name in found if likelihood == min(found)[0]]
    return list(dict.fromkeys(best))[:limit]


def _near(place: Path) -> Iterator[tuple[int, Path]]:
    folder = next(each for each in place.parents if each.is_dir())
    names = _names_in(folder)
    step, *rest = place.relative_to(folder).parts
    for name in _similar(step, (name for name in names if folder.joinpath(name, *rest).is_file())):
        yield 0, folder.joinpath(name, *rest)
    for near in (*(folder / name / place.name for name in sorted(names)), folder / place.name):
        if near.is_file():
            yield 1, near
    if (folder.parent / place.name).is_file():
        yield 1, folder.parent / place.name
    for name in _similar(place.name, (name for name in names if rest and (folder / name).is_file())):
        yield 2, folder / name


def _similar(name: str, names: Iterable[str]) -> list[str]:
    """Names that are like `name` also without their endings, which make any two files look alike."""
    return [near for near in similar_names(name, names) if similar_names(Path(name).stem, [Path(near).stem])]


def _names_in(folder: Path) -> list[str]:
    """The first thousands of names in a folder; none where they cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, _MOST_NAMES)]
    except OSError:
        return []


class NotAFolderError(ConfigError, NotADirectoryError):
    """A folder that cannot be made, because a file has its name, or that of a folder above it."""


class SymbolicLinkError(ConfigError, OSError):
    """A file that a command writes itself is a symbolic link."""


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a file that is nobody else's business.

    Raises:
        SymbolicLinkError: there is a symbolic link in its place.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise SymbolicLinkError(
            f"{path} is a symbolic link, so what is written there would go elsewhere; remove it or name another output"
        ) from error


def odd_file(path: Path) -> str | None:
    """What stands in the way at `path` if it is no regular file, in words; None for a file, and for nothing at all."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else _FILE_TYPES.get(stat.S_IFMT(mode), "no regular file")


def refuse_odd_file(path: Path, option: str) -> None:
    """Leave alone what cannot be replaced by a file as if it were one: a link, a device, a pipe, a folder.

    Raises:
        ConfigError: naming it, and the option that says where to write.
    """
    found = odd_file(path)
    if found is not None:
        raise ConfigError(f"{path} is {found} and is left as it is; name another +{option}, or remove it yourself")


def append_own(path: Path) -> BinaryIO:
    """A file of ours to be continued, made if there is none; raises as `open_own`."""
    return os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def refuse_long_names(option: str, *paths: Path) -> None:
    """Say that a name is too long while nothing has been written yet; `option` is what they all were derived from.

    Raises:
        ConfigError: a file system takes no such name.
    """
    for path in paths:
        longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
        most = _longest_name(path)
        if longest > most:
            raise ConfigError(
                f"+{option} is too long by {longest - most}: files that are named after it would have names of "
                f"{longest} bytes ({path.name[:40]}…), and the file system takes {most} (NAME_MAX); shorten it"
            )


def _longest_name(path: Path) -> int:
    """The most bytes of a name where `path` is, or will be."""
    for folder in path.parents:
        try:
            return os.pathconf(folder, "PC_NAME_MAX")
        except (OSError, ValueError):
            continue
    return _LONGEST_NAME


@contextmanager
def write_aside(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and vanishes when it does not.

    Readers see the old content or the new, never a part; and the new one is on disk when the block has ended.
    """
    descriptor, aside = _create_aside(path)
    try:
        with os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # the error that is there already is the one to show
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _WHILE_WRITING and error.filename is None:
            error.filename = str(path)  # the system names no file when it cannot write to one
        raise


def _create_aside(path: Path) -> tuple[int, Path]:
    is_long = len(os.fsencode(path.name)) + _ASIDE_LENGTH > _LONGEST_NAME
    for _ in range(_TRIES):
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        aside = path.with_name(f"{'' if is_long else path.name}.~{token}.tmp")
        try:
            return open_own(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL), aside
        except FileExistsError:
            continue
        except OSError as error:
            error.filename = str(path)  # the name that people know
            raise
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path.parent))


def remove_debris(paths: Iterable[Path]) -> None:
    """Remove what killed processes wrote aside for these files; for whoever alone may write them."""
    wanted = {path.name: path.parent for path in paths}
    for folder in set(wanted.values()):
        for found in folder.glob("*.tmp"):
            aside = _ASIDE.fullmatch(found.name)
            if aside is not None and wanted.get(aside["name"]) == folder:
                found.unlink(missing_ok=True)


def require_possible_folder(folder: Path) -> None:
    """Say that there can be no such folder while nothing has been written yet.

    Raises:
        NotAFolderError: it, or one above it, is a file.
    """
    file = next((each for each in (folder, *folder.parents) if each.exists() and not each.is_dir()), None)
    if file is not None:
        raise NotAFolderError(f"{file} is a file, so there can be no folder {folder}; name another place")


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that a power failure does not take them back.

    Raises:
        NotAFolderError: one of them is a file.
    """
    require_possible_folder(folder)
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Bring names that were made, changed or removed in a folder to the disk, where its file system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder that may be written to and not be listed
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)
