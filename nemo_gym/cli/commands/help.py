"""`ng_help`: every installed command with one line, grouped."""

from nemo_gym.cli.command import command
from nemo_gym.cli.registry import COMMANDS, GROUPS, OTHER, find_command, installed_scripts
from nemo_gym.cli.tree import spelled_as_gym
from nemo_gym.schemas.cli_config import HelpConfig


@command(HelpConfig, reads_config=False)
def main(config: HelpConfig) -> None:
    """List the commands of this installation.

    Examples:
        ng_help
    """
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
