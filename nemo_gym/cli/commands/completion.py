"""`ng_completion`: options and config files at the TAB key."""

from nemo_gym.cli.command import command
from nemo_gym.schemas.cli_config import CompletionConfig


@command(CompletionConfig, reads_config=False)
def main(config: CompletionConfig) -> None:
    """Print a script that completes the options of every command, and config files in config_paths.

    Examples:
        source <(ng_completion +shell=bash)
        ng_completion +shell=bash >> ~/.bashrc
        ng_completion +shell=zsh >> ~/.zshrc
    """
    from nemo_gym.cli.completion import shell_script
    from nemo_gym.cli.registry import installed_scripts

    print(shell_script(config.shell, installed_scripts()), end="")
