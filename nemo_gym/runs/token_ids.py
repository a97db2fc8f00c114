"""A run whose rollouts get token ids that were kept at the model server: before an attempt, after it, and at the end.

What earlier attempts left is deleted before a row is sent. What was kept of a finished rollout is put onto its record,
and forgotten when the record has reached the disk; of a masked one it stays, for whoever wants to look.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body
from nemo_gym.runs.record import Outcome, Result, Row, agent_name_of, outcome_of, stamp
from nemo_gym.runs.store import RolloutStore
from nemo_gym.token_id_capture.config import token_id_capture_config, token_id_capture_enabled_for_agent
from nemo_gym.token_id_capture.consumer import (
    SNAPSHOT_KEY,
    CollectorSource,
    clear_token_captures_for_rollouts,
    collector_token_source,
    token_id_capture_dirs_from_config,
)
from nemo_gym.token_id_capture.delivery import (
    MaskedFraction,
    capture_build_can_retire,
    finalize_rollout_token_capture,
    mask_rollout,
    retire_rollout_token_capture,
)

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_SHARED = "another rollout was made at the same time under the same id"
Post = Callable[[Row], Awaitable[Any]]


class _ToRetire(NamedTuple):
    line: int
    """Which line of the file has to be on the disk."""
    rollout_id: str
    built: dict[str, Any]


class TokenDelivery:
    """Goes along with the rollouts of a run: `async with` it around them."""

    def __init__(self, config: Any, found: CollectorSource, masked: MaskedFraction) -> None:
        self._config = config
        self._source, self._is_own = found
        self._folders = token_id_capture_dirs_from_config(config)
        self._masked = masked
        self._built: dict[str, Any] | None = None
        self._to_retire: deque[_ToRetire] = deque()
        self._is_kept: dict[str, bool] = {}
        self._under_way: Counter[str] = Counter()
        self._shared: set[str] = set()

    @classmethod
    def of(cls, config: Mapping[Any, Any], masked: MaskedFraction | None) -> "TokenDelivery | None":
        """As the config of a run's servers says; `masked` counts on if an earlier part of the run has begun it.

        Raises:
            ConfigError: token ids are to be put onto records, and there is no place to find them in.
        """
        found = collector_token_source(config)
        if found is None:
            return None
        return cls(config, found, masked or MaskedFraction(token_id_capture_config(config).token_id_capture))

    @property
    def masked(self) -> MaskedFraction:
        """What was delivered so far, and what could not be."""
        return self._masked

    async def __aenter__(self) -> "TokenDelivery":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After the files are closed: what was written is on the disk, unless there was an error."""
        if error is None:
            await self._retire(None)
        if self._is_own:
            async with asyncio.timeout(_PATIENCE_S):
                await self._source.close()

    def begin(self, post: Post) -> Post:
        """`post`, before which what earlier attempts have left under the same id is forgotten."""

        async def posted(row: Row) -> Any:
            rollout_id = self._id_of(row)
            if rollout_id is not None:
                if self._under_way[rollout_id]:
                    self._shared.add(rollout_id)
                self._under_way[rollout_id] += 1
                await asyncio.to_thread(clear_token_captures_for_rollouts, [row], self._folders)
            return await post(row)

        return posted

    async def put_onto(self, row: Row, record: Result) -> None:
        """Give the record of an attempt that has succeeded its token ids, or have it say why it has none."""
        self._built = None
        rollout_id = self._id_of(row)
        if rollout_id is None:
            return
        if outcome_of(record) is Outcome.SUCCESS:
            stamp(row, record)
            if rollout_id in self._shared:
                self._built = mask_rollout(record, rollout_id, _SHARED)
            else:
                self._built = await finalize_rollout_token_capture(record, self._source)
        self._under_way[rollout_id] -= 1
        if self._under_way[rollout_id] <= 0:
            del self._under_way[rollout_id]

    async def appended(self, row: Row, store: RolloutStore) -> str | None:
        """The record is in the file; in words, a reason to end the run, if too many like it are masked."""
        built = self._built
        rollout_id = self._id_of(row) if capture_build_can_retire(built) else None
        if built is not None and rollout_id is not None:
            self._to_retire.append(_ToRetire(store.num_written, rollout_id, {SNAPSHOT_KEY: built[SNAPSHOT_KEY]}))
        await self._retire(store.num_synced)
        try:
            self._masked.note(built)
        except RuntimeError as error:
            return str(error)
        return None

    def _id_of(self, row: Row) -> str | None:
        """The id that the calls for a row are kept under; None if they are not."""
        agent = agent_name_of(row) or ""
        is_kept = self._is_kept.get(agent)
        if is_kept is None:
            is_kept = self._is_kept[agent] = token_id_capture_enabled_for_agent(self._config, agent)
        try:
            return maybe_rollout_id_from_run_body(row) if is_kept else None
        except ValueError:  # the agent refuses such a row, and says why
            return None

    async def _retire(self, synced: int | None) -> None:
        """Forget what was kept of rollouts up to that line of the file; None for all of them."""
        while self._to_retire and (synced is None or self._to_retire[0].line <= synced):
            _, rollout_id, built = self._to_retire.popleft()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await retire_rollout_token_capture(rollout_id, self._source, built)
            except Exception as error:  # noqa: BLE001 - the record is whole; only its source takes up room
                logger.warning("rollout %s: what was kept of its calls stays: %r", rollout_id, error)
