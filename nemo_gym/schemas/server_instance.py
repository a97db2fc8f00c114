"""What is known about a running server, as the head server tells it."""

from typing import Literal

from pydantic import BaseModel

ServerStatus = Literal["success", "connection_error", "timeout", "unknown_error"]


class ServerInstanceDisplayConfig(BaseModel):
    """One running server; `process_name` and `config_path` are its instance name, `name` its implementation."""

    config_path: str | None = None
    dir_path: str | None = None
    entrypoint: str | None = None
    host: str | None = None
    name: str | None = None
    pid: int | None = None
    port: int | None = None
    process_name: str | None = None
    server_type: str | None = None
    start_time: float | None = None
    status: ServerStatus | None = None
    uptime_seconds: float | None = None
    url: str | None = None
    isolation: str | None = None
    """`hosted` with others in one process, `process` of its own, or a `venv` of its own."""
    replica: int | None = None
    """Which of the identical hosts it belongs to, from 0."""
