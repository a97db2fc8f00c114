"""`ng_version`: what is installed here, and on what machine; for bug reports."""

import json
import os
import platform
import sys
from typing import Any

from nemo_gym import PARENT_DIR, __version__
from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import VersionConfig

_DEPENDENCIES = ("openai", "ray")


@command(VersionConfig, reads_config=False)
def main(config: VersionConfig) -> None:
    """Print the version of NeMo Gym, of Python and of what it may use, and facts about this machine.

    Examples:
        ng_version
        ng_version +json=true
    """
    facts = version_facts()
    print(json.dumps(facts, indent=2) if config.json_format else as_text(facts))


def version_facts() -> dict[str, Any]:
    """Everything this command prints; a package that is not installed has the version None."""
    return {
        "nemo_gym": __version__,
        "python": platform.python_version(),
        "python_path": sys.executable,
        "installation_path": str(PARENT_DIR),
        "dependencies": {name: _installed_version(name) for name in _DEPENDENCIES},
        "system": {
            "os": f"{platform.system()} {platform.release()}",
            "platform": platform.platform(),
            "architecture": platform.machine(),
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "memory_gb": _memory_gb(),
        },
    }


def as_text(facts: dict[str, Any]) -> str:
    """The facts for people."""
    dependencies, system = facts["dependencies"], facts["system"]
    return "\n".join(
        [
            f"NeMo Gym {facts['nemo_gym']}",
            f"  Python {facts['python']} ({facts['python_path']})",
            f"  installed in {facts['installation_path']}",
            "Dependencies",
            *(f"  {name}: {found or 'not installed'}" for name, found in dependencies.items()),
            "System",
            *(f"  {label}: {system[key]}{unit}" for key, label, unit in _SYSTEM_LINES),
        ]
    )


_SYSTEM_LINES = (
    ("os", "OS", ""),
    ("platform", "platform", ""),
    ("architecture", "architecture", ""),
    ("processor", "processor", ""),
    ("cpus", "CPUs", ""),
    ("memory_gb", "memory", " GB"),
)


def _installed_version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # not needed for the help page

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory_gb() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 2)
