"""What every command is, without what it does: its group and summary, its options, the words of its help page.

A page is printed without loading the work, which lies elsewhere: in the function of the same name in `module`, loaded
when the command is run. So modules of commands import what they need at their top, and pages stay quick. The modules
here are text alone; `nemo_gym.cli.registry` puts them together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SERVERS = "Servers"
ROLLOUTS = "Rollouts"
DATA = "Data sets and benchmarks"
AUTHORING = "Writing environments"
CONFIGURATION = "Configuration"
HELP = "Help"
OTHER = "Other"
GROUPS = (SERVERS, ROLLOUTS, DATA, AUTHORING, CONFIGURATION, HELP, OTHER)
"""The order in which `ng_help` lists the groups."""


@dataclass(frozen=True)
class Loading:
    """How a command comes to its configuration."""

    needs_model: bool = True
    """False puts a stand-in model under the configuration, for commands that call no model."""
    initial: Mapping[str, Any] | None = None
    """Configuration below the command line and above config files and env.yaml."""
    offline: bool = False
    """Probe no port and look up no host name."""
    reads_config: bool = True
    """False for commands that depend on nothing but their options: no file is read."""
    starts_servers: bool = False
    """Whether it starts the configured servers, or answers for whoever will."""
    takes_over: bool = True
    """False leaves aside a configuration that a launcher hands over."""
    further_checks: str | None = None
    """`module:function` of what else is to be checked while the configuration is read (`FurtherChecks`)."""


OFFLINE = Loading(needs_model=False, offline=True)
"""Of commands that want to know the configuration, and start nothing."""
NO_CONFIG = Loading(reads_config=False)


@dataclass(frozen=True)
class CommandInfo:
    """One command."""

    name: str
    """Without the `ng_` in front."""
    group: str
    summary: str
    config: str
    """`module:Class` of its arguments."""
    module: str
    """Where the function of its name does the work."""
    loading: Loading
    words: str
    """What it does, and examples, for its help page."""

    @property
    def body(self) -> str:
        """`module:function` of what does the work."""
        return f"{self.module}:{self.name}"
