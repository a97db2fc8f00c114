"""How a child process finds this nemo-gym: what goes on its PYTHONPATH, and what must not."""

import os
import site
from collections.abc import Sequence
from pathlib import Path

from nemo_gym.paths import PARENT_DIR


def running_site_packages() -> list[Path]:
    """The folders of installed packages of this interpreter."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [path for folder in folders if (path := Path(folder)).is_dir()]


def own_root_for_path() -> Path | None:
    """The folder to put on PYTHONPATH so that a child finds this nemo-gym; None when it lies in site-packages.

    There it is found anyway, and on PYTHONPATH it would come before the packages of an environment.
    """
    return None if PARENT_DIR.resolve() in {path.resolve() for path in running_site_packages()} else PARENT_DIR


def search_path(entries: Sequence[Path | str | None]) -> str:
    """Folders as the value of PATH or PYTHONPATH, without gaps and repetitions."""
    return os.pathsep.join(dict.fromkeys(str(entry) for entry in entries if entry))
