"""How many files and sockets this process may have open: one per rollout in flight, and more."""

import logging
import os
import resource

logger = logging.getLogger(__name__)

TARGET = 65_535


_RESERVE = 128
"""Descriptors kept back for files, logs and the questions asked of servers beside the rollouts."""


def connections_that_fit() -> int | None:
    """How many connections this process may have at once beside what it has open now; None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(1, soft - len(os.listdir("/dev/fd")) - _RESERVE)  # noqa: PTH208 - each is a name, not a path


def raise_open_file_limit(target: int = TARGET) -> None:
    """Allow as many open files as `target`, or as many as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target if hard == resource.RLIM_INFINITY else min(target, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:
        logger.warning("the open-file limit stays at %d (%s); raise it with `ulimit -n %d`", soft, error, wanted)
