"""`ng_view`: runs, rollouts and conversations in a browser, or as one file to send."""

import json
import os
import sys
import webbrowser
from pathlib import Path
from urllib.parse import quote

from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.runs.files import Kind, refuse_to_replace, require_rollouts
from nemo_gym.schemas.cli_config import ViewConfig
from nemo_gym.view.export import export_page
from nemo_gym.view.library import Library

_DEFAULT_FOLDER = "results"


def view(config: ViewConfig) -> None:
    """`ng_view`."""
    roots = _roots(config)
    library = Library(roots, _cache_folder())
    try:
        if config.export is not None:
            _export(config, library)
        elif config.json_format:
            library.read_all()
            print(json.dumps({"runs": library.summaries()}))
        else:
            _check_runs(library)
            _serve(config, library)
    finally:
        library.close()


def _roots(config: ViewConfig) -> list[Path]:
    if config.path is None:
        return [Path(_DEFAULT_FOLDER) if Path(_DEFAULT_FOLDER).is_dir() else Path()]
    given = [config.path] if isinstance(config.path, str) else config.path
    roots = [Path(path).expanduser() for path in given]
    for root in roots:
        if not root.exists():
            raise ConfigPathNotFoundError(f"+path={root} does not exist (looked in {Path.cwd()})")
        if root.is_file():
            require_rollouts(root, "path")
    return roots


def _cache_folder() -> Path:
    """Where indexes are kept: `XDG_CACHE_HOME`, else ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if given and Path(given).is_absolute() else Path("~/.cache").expanduser()
    return base / "nemo_gym" / "view"


def _check_runs(library: Library) -> None:
    if not library.find():
        print(f"There is no run in {library.name} yet; those that begin there will appear.", file=sys.stderr)


def _export(config: ViewConfig, library: Library) -> None:
    assert config.export is not None
    target = Path(config.export).expanduser()
    refuse_to_replace(target, "export", Kind.PAGE)
    runs = library.read_all()
    if not runs:
        raise ConfigError(f"there is no run in {library.name}; name a rollouts file or a folder with +path")
    count = export_page(runs, library.name, config.where, config.limit, target)
    if config.json_format:
        print(json.dumps({"export": str(target), "rollouts": count, "runs": len(runs)}))
    else:
        print(f"{count} rollouts of {len(runs)} {'run' if len(runs) == 1 else 'runs'} are in {target}")


def _serve(config: ViewConfig, library: Library) -> None:
    from nemo_gym.view.api import is_loopback, serve  # with FastAPI, which a page for a file does not need

    def started(address: str) -> None:
        address += fragment
        print(f"Runs in {library.name}: {address}", flush=True)
        if not is_loopback(config.host):
            print("Whoever has this address can read these runs.", file=sys.stderr)
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)
        if _is_to_open(config):
            _open(address)

    fragment = _fragment(config.where, library)
    try:
        serve(library, config.host, config.port, started)
    except OSError as error:
        raise ConfigError(f"cannot listen on +host={config.host} +port={config.port}: {error.strerror}") from error


def _fragment(where: str | None, library: Library) -> str:
    """What leads from the first page to the rollouts that a condition is about.

    Raises:
        ConfigError: it is not an expression, or it is not clear which run is meant.
    """
    if where is None:
        return ""
    runs = library.read_all()
    if len(runs) != 1:
        raise ConfigError(f"+where is about the rollouts of one run, and there are {len(runs)} in {library.name}")
    runs[0].table.understand(where)
    return f"#/runs/{runs[0].id}?where={quote(where, safe='')}"


def _is_to_open(config: ViewConfig) -> bool:
    """Whether a browser is to be opened: by default on a terminal with a display."""
    if config.open is not None:
        return config.open
    has_display = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return has_display and sys.stdout.isatty() and not os.environ.get("SSH_CONNECTION")


def _open(address: str) -> None:
    if not webbrowser.open(address):
        print("No browser could be opened; open the address yourself.", file=sys.stderr)
