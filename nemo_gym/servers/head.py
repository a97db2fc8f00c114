"""The head server: tells everybody what the run's config is and which servers are up.

It runs in a thread of the launching process. Secrets in the config are masked: whoever asks needs
names and addresses only.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from omegaconf import OmegaConf
from pydantic import PrivateAttr

from nemo_gym.config.auth import auth_token
from nemo_gym.config.secrets import mask_tree
from nemo_gym.config_types import BaseServerConfig, ConfigError
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.http.seams import replaceable
from nemo_gym.http.server_client import ServerClient
from nemo_gym.http.settings import process_config
from nemo_gym.keys import RUN_ID_KEY_NAME
from nemo_gym.servers.auth import AuthMiddleware
from nemo_gym.servers.base import BaseServer
from nemo_gym.servers.listening import listen
from nemo_gym.servers.run import uvicorn_settings

START_TIMEOUT_S = 30.0


class HeadServer(BaseServer):
    """Serves the config and the list of instances of one run."""

    config: BaseServerConfig  # type: ignore[assignment]
    _server_instances: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    @classmethod
    def run_webserver(cls) -> tuple[uvicorn.Server, threading.Thread, "HeadServer"]:
        """Start the head server of the process's config in a thread and return once it answers."""
        head = cls(config=ServerClient.load_head_server_config())
        held = listen(
            head.config.host, head.config.port, "the head server", "+head_server.port=<port> (0: any free one)"
        )
        server = uvicorn.Server(uvicorn.Config(head.setup_webserver(), **uvicorn_settings()))
        thread = threading.Thread(target=server.run, args=([held],), name="head server", daemon=True)
        thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise ConfigError(f"the head server did not start on {head.config.host}:{head.config.port}")
            time.sleep(0.005)
        return server, thread, head

    def setup_webserver(self) -> FastAPI:
        """The app with the head server's routes."""
        app = FastAPI(title="head server")
        app.get("/global_config_dict_yaml")(self.global_config_dict_yaml)
        app.get("/server_instances")(self.get_server_instances)
        app.get("/health")(self.health)
        app.get("/", include_in_schema=False)(self.alive)
        if (token := auth_token(process_config())) is not None:
            app.add_middleware(AuthMiddleware, token=token, instance_name="the head server")
        return app

    async def global_config_dict_yaml(self) -> str:
        """The run's config as YAML, interpolations unresolved, secrets masked."""
        config = replaceable("get_global_config_dict", get_global_config_dict)()
        return OmegaConf.to_yaml(OmegaConf.create(mask_tree(OmegaConf.to_container(config, resolve=False))))

    async def get_server_instances(self) -> list[dict[str, Any]]:
        """Every running server."""
        return self._server_instances

    def set_server_instances(self, instances: list[dict[str, Any]]) -> None:
        """Publish the running servers."""
        self._server_instances = instances

    async def health(self) -> dict[str, Any]:
        """That the head is up, and which run it belongs to."""
        config = replaceable("get_global_config_dict", get_global_config_dict)()
        return {"status": "ok", "run_id": config.get(RUN_ID_KEY_NAME), "folder": str(Path.cwd()), "pid": os.getpid()}

    async def alive(self) -> dict[str, str]:
        """That the head is up."""
        return {"status": "ok"}
