"""Arguments of the commands for people who write servers."""

from typing import Literal

from pydantic import Field

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig


class InitResourcesServerConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_init_resources_server`."""

    entrypoint: str = Field(min_length=1)
    """The folder to make, resources_servers/<name>, below the current one."""


class ServerTestsConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_test`."""

    entrypoint: str = Field(min_length=1)
    """The folder of the server to test, such as resources_servers/my_env."""
    should_validate_data: bool = False
    """Check the example data of a resources server, too."""


class AllServerTestsConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_test_all`."""

    fail_on_total_and_test_mismatch: bool = False
    """Fail when a server has no README.md, without which it is not tested."""
    delete_venvs_after_each_test: bool = False
    """Remove the environment that a server needed, to save space."""
    num_shards: int = Field(1, ge=1)
    """Into how many parts the servers are divided, for several machines."""
    shard_index: int = Field(0, ge=0)
    """Which part to test, counted from 0."""


class DevTestConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_dev_test`."""


class PipListConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_pip_list`."""

    entrypoint: str = Field(min_length=1)
    """The folder of a server, such as resources_servers/my_env."""
    format: Literal["columns", "freeze", "json"] | None = None
    """How to print the list."""
    outdated: bool = False
    """List only packages of which there is a newer version."""
