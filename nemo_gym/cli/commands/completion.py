"""`ng_completion`: options and config files at the TAB key."""

import shlex
import sys
from collections.abc import Sequence

from nemo_gym.cli.command import command
from nemo_gym.cli.completion import PROGRAMS
from nemo_gym.cli.registry import installed_scripts
from nemo_gym.schemas.cli_config import CompletionConfig

_SCRIPTS = {
    "bash": """\
_nemo_gym_complete() {{
    local candidate
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("$candidate")
    done < <({python} -P -m nemo_gym.cli.completion bash "$1" "${{COMP_LINE:0:COMP_POINT}}" "$2" 2>/dev/null)
}}
complete -o nospace -F _nemo_gym_complete {scripts}
""",
    "zsh": """\
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
_nemo_gym_complete() {{
    local -a candidates
    local before="$words[2,CURRENT-1]"
    candidates=("${{(@f)$({python} -P -m nemo_gym.cli.completion zsh "$words[1]" "${{(Q)PREFIX}}" "" "$before" \\
        2>/dev/null)}}")
    [[ -n "$candidates" ]] && compadd -U -Q -S '' -a candidates
}}
compdef _nemo_gym_complete {scripts}
""",
}


@command(CompletionConfig, reads_config=False)
def main(config: CompletionConfig) -> None:
    """Print a script that completes the options of every command, and config files in config_paths.

    Examples:
        source <(ng_completion +shell=bash)
        ng_completion +shell=bash >> ~/.bashrc
        ng_completion +shell=zsh >> ~/.zshrc
    """
    print(shell_script(config.shell, [*PROGRAMS, *installed_scripts()]), end="")


def shell_script(shell: str, scripts: Sequence[str]) -> str:
    """A script that teaches `shell` to complete the options of `scripts`."""
    return _SCRIPTS[shell].format(python=shlex.quote(sys.executable), scripts=" ".join(scripts))
