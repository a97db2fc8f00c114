"""Rows on their way to the agents and back: what is sent again, how often, when it is given up, and to which servers.

A row whose request failed in the infrastructure is sent again, up to its budget, without its siblings and without
waiting for them. So is one that came back with NaN log-probs, up to a budget of its own. A failure of any other kind
dooms the group at once, unless a group may be partial: then the row is left out as long as enough others remain.

A trainer attaches to the servers of a run once and stays for days. Hosts that are added, or started again at another
address, meanwhile are found here: the head server is asked every second, while rows are under way, whether its list has
changed. A model server that is new hears how the weights are before it is sent anything.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
from nemo_gym.rl.failures import (
    FailureClass,
    GymTransportError,
    RolloutDataFailure,
    RolloutFailure,
    classify_rollout_failure,
)
from nemo_gym.rl.interfaces import has_nan
from nemo_gym.rl.samples import MASK_REASON, ROW_INDEX_KEY
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.runs import record
from nemo_gym.runs.record import Outcome, Result, Row, outcome_of

logger = logging.getLogger(__name__)

RowOutcome: TypeAlias = tuple[Row, Result | Exception]
_PAUSES_WITHIN_S = 120.0


class RowDispatch:
    """The rows of one group: those that are back, and those still owed."""

    def __init__(
        self,
        rows: Sequence[Row],
        post_process: Callable[[Result], dict[str, Any]],
        *,
        max_sends: int,
        max_nan_runs: int,
        min_rows: int | None = None,
    ) -> None:
        """`min_rows` are to come back; without a number, all of them."""
        self._rows = list(rows)
        self._post_process = post_process
        self._max_sends = max_sends
        self._max_nan_runs = max_nan_runs
        self._min_rows = len(self._rows) if min_rows is None else min_rows
        self._left_out = 0
        self._results: dict[int, dict[str, Any]] = {}
        self._lost: Counter[int] = Counter()
        self._nan_runs: Counter[int] = Counter()
        self._losses: dict[int, Exception] = {}
        """What each lost row failed with the last time."""
        _check_indices(self._rows)

    @property
    def owed(self) -> list[Row]:
        """The rows that are not back yet."""
        return [row for row in self._rows if self.is_owed(row)]

    def is_owed(self, row: Row) -> bool:
        """Return whether a row is not back yet; after `arrived` or `failed`, whether it is to be sent again."""
        return row[ROW_INDEX_KEY] not in self._results

    def losses_of(self, row: Row) -> int:
        """Return how often a row was lost."""
        return self._lost[row[ROW_INDEX_KEY]]

    @property
    def redispatches(self) -> int:
        """Rows sent again because they never came back."""
        return sum(min(count, self._max_sends - 1) for count in self._lost.values())

    @property
    def nan_retries(self) -> int:
        """Rows sent again because of NaN log-probs."""
        return self._nan_runs.total()

    def arrived(self, row: Row, result: Result) -> None:
        """Take a result in.

        Raises:
            RolloutFailure: it cannot be used, and the row is not to be sent again.
        """
        failure = _reported_failure(row, result)
        if failure is not None:
            self.failed(row, failure)
            return
        try:
            processed = self._post_process(result)
        except RolloutDataFailure as error:
            self._leave_out(row, type(error)(f"row {row[ROW_INDEX_KEY]}: {error}"), error)
            return
        if any(map(has_nan, [processed["message_log"], *processed.get("branches", ())])):
            self._note_nan(row)
        else:
            self._results[row[ROW_INDEX_KEY]] = processed

    def failed(self, row: Row, error: Exception) -> None:
        """Note that a row did not come back.

        Raises:
            RolloutFailure: it is not to be sent again.
        """
        if classify_rollout_failure(error) is FailureClass.DATA:
            failure = RolloutDataFailure(f"row {row[ROW_INDEX_KEY]} failed: {_words(error)}")
            self._leave_out(row, failure, error)
            return
        index = row[ROW_INDEX_KEY]
        self._lost[index] += 1
        self._losses[index] = error
        if self._lost[index] >= self._max_sends:
            self._leave_out(row, self._never_came_back([row], f"after {self._lost[index]} dispatches"), error)
            return
        logger.warning("row %d did not come back and is sent again: %s", index, _words(error))

    def end(self, when: str) -> None:
        """Leave out every row that is not back yet.

        Raises:
            GymTransportError: too few would be left; the message names every one of these rows.
        """
        missing = self.owed
        if len(self._rows) - self._left_out - len(missing) < self._min_rows:
            raise self._never_came_back(missing, when)
        for row in missing:
            self._leave_out(row, self._never_came_back([row], when))

    def _never_came_back(self, rows: Sequence[Row], when: str) -> GymTransportError:
        indices = [row[ROW_INDEX_KEY] for row in rows]
        last = next((f"; the last time with {_words(self._losses[it])}" for it in indices if it in self._losses), "")
        return GymTransportError(f"rows {indices} of {len(self._rows)} never came back {when}{last}")

    def results(self) -> list[dict[str, Any]]:
        """What came back, in row order."""
        return [self._results[index] for index in range(len(self._rows))]

    def _note_nan(self, row: Row) -> None:
        index = row[ROW_INDEX_KEY]
        if self._nan_runs[index] + 1 >= self._max_nan_runs:
            failure = RolloutDataFailure(
                f"row {index} came back with NaN log-probs {self._nan_runs[index] + 1} times; look for overflow in the "
                "policy's logits, or raise rollout_max_attempts_to_avoid_lp_nan"
            )
            self._leave_out(row, failure)
            return
        self._nan_runs[index] += 1
        logger.warning("row %d came back with NaN log-probs and is sent again", index)

    def _leave_out(self, row: Row, failure: RolloutFailure, cause: Exception | None = None) -> None:
        """Go on without a row.

        Raises:
            RolloutFailure: too few would be left.
        """
        self._left_out += 1
        if len(self._rows) - self._left_out < self._min_rows:
            raise failure from cause
        logger.warning("a row is left out of its group, which may do without it: %s", failure)
        empty: dict[str, Any] = {"message_log": [], "input_message_log": [], "full_result": None}
        self._results[row[ROW_INDEX_KEY]] = {**empty, MASK_REASON: str(failure)}


def _check_indices(rows: Sequence[Row]) -> None:
    if not rows:
        raise ValueError("there are no rows to run; pass at least one")
    indices = [row.get(ROW_INDEX_KEY) for row in rows]
    if indices != list(range(len(rows))):
        raise ValueError(f"the rows have the {ROW_INDEX_KEY} {indices}; it must be each row's own position")


def _reported_failure(row: Row, result: Mapping[str, Any]) -> RolloutFailure | None:
    """The failure that an agent reports in place of a result."""
    if not isinstance(result, dict):
        return RolloutDataFailure(f"the agent answered with {type(result).__name__}, not with an object")
    outcome = outcome_of(result)
    if outcome is Outcome.SUCCESS:
        return None
    name = result.get(record.NG_FAILURE_CLASS_KEY)
    words = f"the agent reported {name!r}: {result.get(record.FAILURE_MESSAGE_KEY) or 'no message'}"
    if outcome is Outcome.DISCARDED:
        return GymTransportError(f"the agent was cut short from outside; {words}")
    known = {kind.value: kind for kind in record.FailureClass}
    is_infra = name in known and known[name].is_infrastructure
    return GymTransportError(words) if is_infra else RolloutDataFailure(words)


def _words(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError | RolloutFailure):
        return str(error)
    return f"{type(error).__name__}: {error}"


class RowsSent:
    """Rows on their way: `outcomes` gets the outcome of every one."""

    def __init__(self, collect: Callable[[list[Row], "asyncio.Queue[RowOutcome]"], Awaitable[None]]) -> None:
        self.outcomes: asyncio.Queue[RowOutcome] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []
        self._collect = collect

    def send(self, rows: list[Row], after_s: float = 0.0) -> None:
        """Send rows, at once or after a pause."""
        self.tasks.append(asyncio.create_task(self._send(rows, after_s)))

    async def _send(self, rows: list[Row], after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._collect(rows, self.outcomes)


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
    async def sending(self) -> "AsyncIterator[RowsSent]":
        """Send rows; what is in flight when the block ends is cancelled."""
        rows_sent = RowsSent(self._collect)
        try:
            yield rows_sent
        finally:
            await cancel_and_drain(rows_sent.tasks)

    async def _collect(self, rows: list[Row], outcomes: "asyncio.Queue[RowOutcome]") -> None:
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
