"""The script behind `nemo_gym.launch.warden`: waits until the launcher is gone, then stops its process groups.

Run as `python -I -S warden_process.py <launcher pid> <grace in s>`. It imports next to nothing, which
keeps it at a few MB and 20 ms. Orders on stdin, one per line: `watch <group>`, `forget <group>`, `remove <file>`.
"""

import os
import select
import signal
import sys
import time

_CHECK_PARENT_EVERY_S = 1.0


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def _stop(groups: set[int], grace_s: float) -> None:
    alive = {group for group in groups if _signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_s
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = {group for group in alive if _signal_group(group, 0)}
    for group in alive:
        _signal_group(group, signal.SIGKILL)


def _wait_until_gone(launcher: int) -> tuple[set[int], set[str]]:
    """Take orders until the launcher is gone; what is then to be stopped and deleted."""
    groups: set[int] = set()
    files: set[str] = set()
    unread = b""
    while True:
        readable, _, _ = select.select([0], [], [], _CHECK_PARENT_EVERY_S)
        received = os.read(0, 65536) if readable else b""
        *orders, unread = (unread + received).split(b"\n")
        for order in orders:
            verb, _, what = order.decode().partition(" ")
            if verb == "watch":
                groups.add(int(what))
            elif verb == "forget":
                groups.discard(int(what))
            elif verb == "remove":
                files.add(what)
        if (readable and not received) or os.getppid() != launcher:
            return groups, files


def _main(launcher: int, grace_s: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups, files = _wait_until_gone(launcher)
    _stop(groups, grace_s)
    for file in files:
        try:  # noqa: SIM105 - contextlib would double the start-up time
            os.unlink(file)  # noqa: PTH108 - so would pathlib
        except OSError:
            pass


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]))
