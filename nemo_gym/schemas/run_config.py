"""Arguments of the commands that start servers and ask after them."""

from pydantic import Field

from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig


class RunConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_run`: how servers are started and watched."""

    dry_run: bool = False
    """Prepare environments and check that every server can be built, then exit; nothing listens."""
    num_replicas: int = Field(1, ge=1)
    """Identical host processes; the collector spreads rollouts over them."""
    restart_crashed_servers: bool = False
    """Start a server again when it crashes, at most 5 times in 10 minutes, instead of ending the run."""
    server_start_timeout_s: float = Field(300.0, gt=0)
    """How long a server may take from the start of its process until it answers."""
    server_stop_timeout_s: float = Field(3.0, ge=0)
    """How long a server may take to stop before it is killed."""
    environment_timeout_s: float = Field(3600.0, gt=0)
    """How long installing the requirements of one server may take."""
    nemo_gym_log_dir: str | None = None
    """Write each server's output to <name>.log in this folder instead of the terminal."""
    skip_venv_if_present: bool = False
    """Use the .venv in a server's folder as it is, without looking at requirements."""
    uv_venv_dir: str | None = None
    """Folder for the environments of servers that need their own."""
    uv_cache_dir: str | None = None
    """Folder of uv's download cache."""
    uv_pip_set_python: bool = False
    """Accepted for compatibility: uv is always told which environment to install into."""
    pip_install_verbose: bool = False
    """Show what the installer does."""
    python_version: str | None = None
    """Python of servers that get an environment of their own; the running one when unset."""


class StatusConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_status`."""

    json_format: bool = Field(False, alias="json")  # `json` itself is a method of every pydantic model
    """Print the servers as one JSON list instead of a table."""
