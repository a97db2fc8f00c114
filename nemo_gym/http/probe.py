"""Synchronous GETs for start-up and status: one short, bounded question, asked without an event loop.

Proxies of the environment are never used: servers of a run are asked directly.
"""

import http.client
import socket

from nemo_gym.config.auth import bearer
from nemo_gym.http.addresses import Address
from nemo_gym.schemas.server_instance import ServerStatus


def fetch(address: Address, path: str, timeout_s: float, token: str | None = None) -> tuple[int, bytes]:
    """Status and body of `GET path`, asked with the run's token if one is given.

    Raises:
        OSError: nothing answers there in time.
        http.client.HTTPException: what answers does not speak HTTP.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Accept": "*/*", **bearer(token)})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def probe(address: Address, timeout_s: float = 5.0) -> ServerStatus:
    """Whether anything at all answers HTTP there."""
    try:
        fetch(address, "/", timeout_s)
    except TimeoutError:
        return "timeout"
    except (ConnectionError, socket.gaierror, http.client.RemoteDisconnected):
        return "connection_error"
    except (OSError, http.client.HTTPException, ValueError):
        return "unknown_error"
    return "success"
