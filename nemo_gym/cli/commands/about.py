"""This installation: `ng_help` lists its commands, `ng_version` says what it is, and on what machine.

A checkout can also be tested (`ng_dev_test`) and installed again.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

from nemo_gym import PARENT_DIR, __version__
from nemo_gym.cli.pages import GROUPS, OTHER
from nemo_gym.cli.registry import COMMANDS, find_command, installed_scripts
from nemo_gym.cli.tree import spelled_as_gym
from nemo_gym.errors import ConfigError
from nemo_gym.schemas.cli_config import DevTestConfig, HelpConfig, VersionConfig

_DEPENDENCIES = ("openai", "ray")


def help(config: HelpConfig) -> None:
    """`ng_help`."""
    scripts = [script for script in installed_scripts() if script.startswith("ng_")]
    print(command_list(scripts), end="")


def command_list(scripts: list[str]) -> str:
    """The page: scripts by group, in the order of the registry."""
    known = {script: find_command(script) for script in scripts}
    ordered = sorted(known.items(), key=lambda item: COMMANDS.index(item[1]) if item[1] else len(COMMANDS))
    column = max(map(len, scripts), default=0) + 2
    others = {script: spelled_as_gym(info.name) if info else "" for script, info in ordered}
    other = max(map(len, others.values()), default=0) + 2
    parts = ["Available CLI scripts (each is also installed as nemo_gym_<name>, and typed as in the second column)"]
    for group in GROUPS:
        lines = [
            f"  {script:<{column}}{others[script]:<{other}}{info.summary if info else 'see its --help'}"
            for script, info in ordered
            if (info.group if info else OTHER) == group
        ]
        if lines:
            parts.append("\n".join([f"{group}:", *lines]))
    parts.append("Options are written +name=value. `<command> --help` shows what a command does and takes.")
    return "\n\n".join(parts) + "\n"


def version(config: VersionConfig) -> None:
    """`ng_version`."""
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
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _memory_gb() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 2)


def dev_test(config: DevTestConfig) -> int:
    """`ng_dev_test`."""
    if not (PARENT_DIR / "tests").is_dir() or not (PARENT_DIR / "pyproject.toml").is_file():
        raise ConfigError(f"{PARENT_DIR} is an installation without tests: run this in a checkout")
    sys.stdout.flush()
    tests = [sys.executable, "-m", "pytest", "--cov=.", "--durations=10"]
    return subprocess.run(tests, cwd=PARENT_DIR, check=False).returncode


def reinstall() -> None:
    """Install this checkout again, with its development tools, into the running environment."""
    if not (PARENT_DIR / "pyproject.toml").is_file():
        raise ConfigError(f"{PARENT_DIR} is an installation, not a checkout: install nemo-gym as you did before")
    uv = shutil.which("uv")
    installer = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    done = subprocess.run([*installer, "-e", f"{PARENT_DIR}[dev]"], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
