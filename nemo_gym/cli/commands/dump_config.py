"""`ng_dump_config`: the configuration as a command would see it, safe to paste."""

import sys

from nemo_gym.cli.command import command, whole_config
from nemo_gym.schemas.cli_config import DumpConfigConfig
from nemo_gym.terminal import print_line


@command(DumpConfigConfig)
def main(config: DumpConfigConfig) -> None:
    """Print the complete configuration as YAML: merged, defaults filled in, interpolations resolved, secrets masked.

    What short ways such as +model=openai:gpt-x stand for comes first, as a comment.

    Examples:
        ng_dump_config +benchmark=gsm8k +model=scripted
        ng_dump_config "+config_paths=[my_servers.yaml]"
        ng_dump_config "+config_paths=[my_servers.yaml]" +head_server.port=12000
    """
    from nemo_gym.cli.config import safe_yaml
    from nemo_gym.cli.shortcuts import shown_expansion

    expansion = shown_expansion(sys.argv[1:], DumpConfigConfig)
    if expansion is not None:
        print_line(f"# {expansion}")
    print(safe_yaml(whole_config()), end="")
