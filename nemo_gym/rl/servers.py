"""The servers of a run as a trainer needs them: sent rows, told of new weights, followed as hosts come and go.

A trainer attaches once and stays for days. Hosts that are added, or started again at another address, meanwhile are
found here: the head server is asked every second, while rows are under way, whether its list has changed. A model
server that is new hears how the weights are before it is sent anything.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeAlias

import aiohttp
from omegaconf import DictConfig
from pydantic import PrivateAttr

from nemo_gym.collect.examples import run_examples
from nemo_gym.collect.run_servers import edition_of, replicas_of
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ConfigError, GymError
from nemo_gym.http.addresses import Address, base_url
from nemo_gym.http.client import ServerClient, with_token
from nemo_gym.http.generation_gate import PAUSE_PATH, RESUME_PATH, GenerationGate
from nemo_gym.http.request import raise_for_status, send, with_json_body
from nemo_gym.keys import MODELS_TYPE
from nemo_gym.rl.calls import cancel_and_drain
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.runs.record import Result, Row

logger = logging.getLogger(__name__)

Outcome: TypeAlias = tuple[Row, Result | Exception]
_PAUSES_WITHIN_S = 120.0


class ServersOfRun(RolloutCollectionHelper):
    """Sends rows without a progress line per group, to whichever hosts the run has by then."""

    _client: ServerClient | None = PrivateAttr(None)
    _gate: GenerationGate = PrivateAttr(default_factory=GenerationGate)
    _edition: int | None = PrivateAttr(None)
    _looking: "asyncio.Task[None] | None" = PrivateAttr(None)

    def attach(self, head: BaseServerConfig, gate: GenerationGate) -> None:
        """Find out where the servers are; `gate` says whether these may generate, and with which weights."""
        self._client, self._gate = self.setup_server_client(head), gate

    @property
    def global_config_dict(self) -> Any:
        """The configuration of the run."""
        return None if self._client is None else self._client.global_config_dict

    def look_for_hosts(self) -> None:
        """Send rows to all hosts that the run has, as soon as these are known; not while nobody may generate."""
        if self._under_way() is None and not self._gate.is_shut:
            self._looking = asyncio.create_task(self._follow())

    async def tell_model_servers(self, path: str, body: dict[str, Any]) -> None:
        """Post to every model server that can be paused, each of its replicas included.

        Raises:
            ConfigError: there is none, or one of them refuses.
            ServerCallError: one does not answer.
        """
        assert self._client is not None
        client = self._client
        if (looking := self._under_way()) is not None:
            await asyncio.wait({looking})
        await self._follow()
        addresses = [(name, address) for name in self._models() for address in client.addresses_of(name)]
        told = await asyncio.gather(*(_told(client, name, base_url(at) + path, body) for name, at in addresses))
        if not any(told):
            names = ", ".join(sorted({name for name, _ in addresses})) or "none"
            raise ConfigError(
                f"no model server of this run can be paused (there is {names}); a vllm_model can, with "
                "return_token_id_information: true"
            )

    @asynccontextmanager
    async def sending(self, rows: list[Row]) -> "AsyncIterator[asyncio.Queue[Outcome]]":
        """A queue that gets the outcome of every row; what is in flight when the block ends is cancelled."""
        outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        task = asyncio.create_task(self._collect(rows, outcomes))
        try:
            yield outcomes
        finally:
            await cancel_and_drain([task])

    async def _collect(self, rows: list[Row], outcomes: "asyncio.Queue[Outcome]") -> None:
        assert self._client is not None
        client = self._client
        for awaitable in run_examples(rows, lambda row: self._post(client, row)):
            try:
                outcomes.put_nowait(await awaitable)
            except Exception as error:  # noqa: BLE001 - judged by whoever reads the queue
                outcomes.put_nowait((getattr(error, "row", rows[0]), error))

    def _under_way(self) -> "asyncio.Task[None] | None":
        """The look at the hosts that has not ended, if it is one of the running event loop."""
        looking = self._looking
        is_here = looking is not None and looking.get_loop() is asyncio.get_running_loop()
        return looking if looking is not None and is_here and not looking.done() else None

    async def _follow(self) -> None:
        """Use the hosts that the run has now; without a head server that answers, those that are known."""
        assert self._client is not None
        client = self._client
        edition = await asyncio.to_thread(edition_of, client)
        if edition is None or edition == self._edition:
            return
        found = await asyncio.to_thread(replicas_of, client)
        try:
            await self._greet({name: found[name] for name in self._models() if name in found})
        except (GymError, aiohttp.ClientError, OSError) as error:  # it may be gone again; the next look shows it
            logger.warning("a host that was added is not used yet: its model server could not be told: %s", error)
            return
        for name, addresses in found.items():
            client.set_replicas(name, addresses)
        self._edition = edition

    async def _greet(self, found: dict[str, list[Address]]) -> None:
        """Tell model servers that are new what the others were told."""
        assert self._client is not None
        client, gate = self._client, self._gate
        if not gate.is_shut and gate.version is None:
            return
        path = PAUSE_PATH if gate.is_shut else RESUME_PATH
        body = {"is_shut_only": True} if gate.is_shut else {"weight_version": gate.version}
        for name, addresses in found.items():
            known = client.addresses_of(name)
            for address in addresses:
                if address not in known:
                    await _told(client, name, base_url(address) + path, body)

    def _models(self) -> list[str]:
        assert self._client is not None
        blocks = self._client.global_config_dict.items_ex(resolve=False)
        return [str(name) for name, block in blocks if isinstance(block, DictConfig) and MODELS_TYPE in block]


async def _told(client: ServerClient, name: str, url: str, body: dict[str, Any]) -> bool:
    """Whether a model server took note; one that cannot be paused knows no such path.

    Raises:
        ConfigError: it refuses.
    """
    body_and_time = {"json": body, "timeout": aiohttp.ClientTimeout(total=_PAUSES_WITHIN_S)}
    options = with_token(with_json_body(body_and_time), client.auth_token)
    async with await send("POST", lambda: url, options, server_name=name, internal=True) as response:
        if response.status == HTTPStatus.NOT_FOUND:
            return False
        if response.status == HTTPStatus.CONFLICT:
            raise ConfigError(await response.text())
        await raise_for_status(response)
        return True
