"""Everything a configuration comes from, and how the sources become one.

Precedence, low to high: config files < env.yaml < what a program passed in < the command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_gym.config.checks import unknown_options
from nemo_gym.config.conflicts import warn_of_differing_definitions
from nemo_gym.config.defaults import truth_value
from nemo_gym.config.files import ConfigFile, ConfigFiles, config_paths_in, load_config_files, load_env_file
from nemo_gym.config.interpolations import plain_tree
from nemo_gym.config.overrides import CommandLine, change_tree
from nemo_gym.config.settings import GlobalConfigDictParserConfig
from nemo_gym.config.trees import Tree, merge_trees
from nemo_gym.errors import ConfigError
from nemo_gym.keys import ALLOW_UNKNOWN_KEYS_KEY_NAME, CONFIG_PATHS_KEY_NAME


@dataclass
class Sources:
    """The sources of one configuration, read but not yet merged."""

    config_files: ConfigFiles
    env_file: ConfigFile | None
    initial: Tree
    command_line: CommandLine

    @property
    def problems(self) -> list[ConfigError]:
        """What was wrong with reading them."""
        return self.config_files.problems

    @property
    def files(self) -> list[ConfigFile]:
        """Every YAML file, lowest precedence first."""
        return self.config_files.files + ([self.env_file] if self.env_file else [])

    def merged(self) -> Tree:
        """All sources in one; `config_paths` names every file that was read."""
        warn_of_differing_definitions(self.config_files.files)
        tree = merge_trees([*(file.tree for file in self.files), self.initial])
        change_tree(tree, self.command_line.changes)
        if self.config_files.given:
            tree[CONFIG_PATHS_KEY_NAME] = self.config_files.given
        return tree

    def unknown_options(self, merged: Mapping[str, Any]) -> list[ConfigError]:
        """One error per option on the command line that nothing reads."""
        if truth_value(merged, ALLOW_UNKNOWN_KEYS_KEY_NAME):
            return []
        defined = {str(key) for source in (*(file.tree for file in self.files), self.initial) for key in source}
        return unknown_options(self.command_line.changes, merged, self.command_line.known_options | defined)


def read_sources(settings: GlobalConfigDictParserConfig) -> Sources:
    """Read whatever `settings` names."""
    command_line = (None if settings.skip_load_from_cli else settings.command_line) or CommandLine()
    env_file = None if settings.skip_load_from_dotenv else load_env_file(settings.dotenv_path)
    initial = plain_tree(settings.initial_global_config_dict)
    context = merge_trees([env_file.tree if env_file else {}, initial])
    where = "the config passed in" if CONFIG_PATHS_KEY_NAME in initial or not env_file else str(env_file.path)
    for change in command_line.changes:
        if change.top_level_key == CONFIG_PATHS_KEY_NAME:
            where = "the command line"
        elif change.delete:
            continue  # what is deleted may stand in a file not yet read
        change_tree(context, [change])
    files = load_config_files(config_paths_in(context, where), where, context)
    return Sources(files, env_file, initial, command_line)
