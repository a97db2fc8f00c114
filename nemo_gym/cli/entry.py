"""Where every console script begins: `nemo_gym.cli.entry:run` is the command `run` of `nemo_gym.cli.pages`, and so on.

Loading a command takes a few tenths of a second, in which Ctrl-C would end it with a traceback out of whatever is
being imported. Nothing has been done by then that would have to be undone, so it ends on the spot, until the command
takes over. For that this module, and the two packages it lies in, import next to nothing.

What a command loads stays until it ends, so nobody looks for garbage in it meanwhile; a page that has been printed
leaves nothing to be put away, and its process ends on the spot, too. Commands that start servers have a host process
load its libraries meanwhile (`launch/waiting_host.py`).

All of this is for the script's own process: the file that Python runs as `__main__` has the name of the script. A
program that loads or calls one of these functions keeps its signals, its garbage collector and its exit to itself.
`sys.argv[0]` does not decide, because programs set it before they call a command.
"""

import _signal as signal  # type: ignore[import-not-found]  # the C module: `signal` itself loads `enum` first
import gc
import os
import sys

_EXIT_CTRL_C = 130
_STDERR = 2
_STARTS_SERVERS = frozenset({"run", "e2e_collect_rollouts"})
_NEEDS_NO_SERVERS = ("help", "-h", "dry_run", "plan", "executor")
"""In an argument: the command will most likely start none."""


def _end_at_once(signal_number: int, frame: object) -> None:
    try:
        os.write(_STDERR, b"\nInterrupted.\n")
    finally:
        os._exit(_EXIT_CTRL_C)


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _is_main_script(name):
        become_script()
        if name in _STARTS_SERVERS and _will_start_servers():
            from nemo_gym.launch import waiting_host

            waiting_host.start()
    from importlib import import_module

    if name == "gym":
        return import_module("nemo_gym.cli.commands.gym").main
    return import_module("nemo_gym.cli.command").command_named(name)


def _is_main_script(name: str) -> bool:
    """Return whether this process runs the console script of a command."""
    main = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "")  # noqa: PTH119 - loads nothing
    return main in (("gym", "ng") if name == "gym" else (f"ng_{name}", f"nemo_gym_{name}"))


def become_script() -> None:
    """Treat this process as that of a console script, which does nothing else."""
    _process.is_script = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started it wants it otherwise
        signal.signal(signal.SIGINT, _end_at_once)
        gc.disable()
    if sys.stdout is None or sys.stderr is None:
        _open_what_was_closed()


def is_script() -> bool:
    """Return whether this process is that of a console script."""
    return _process.is_script


def _open_what_was_closed() -> None:
    """Give a command that was started without stdout or stderr (`>&-`) a place for what nobody wants to read."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - loads nothing, stays open


def end_after_a_page() -> None:
    """End the process if it is a console script that has printed, and flushed, all that it was asked for."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        os._exit(0)


def _will_start_servers() -> bool:
    """Return whether the arguments of this process ask for servers."""
    return not any(word in given for given in sys.argv[1:] for word in _NEEDS_NO_SERVERS)


class _Process:
    """What is known about this process."""

    is_script = False


_process = _Process()


class _Interruptible:
    """`with interruptible:` makes Ctrl-C an exception in what a console script started, and changes nothing elsewhere.

    Afterwards it ends the process on the spot again: no traceback out of Python's own ending either.
    """

    _is_ours = False

    def __enter__(self) -> None:
        self._is_ours = signal.getsignal(signal.SIGINT) is _end_at_once
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            gc.enable()

    def __exit__(self, *error: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, _end_at_once)


interruptible = _Interruptible()
