"""Training on agents that know no tokens: what model servers have captured of their calls is put onto their results.

A run whose configuration has `token_id_capture` enabled keeps the tokens of every call. Rows get an id of their own to
keep them under. A record of such a rollout may hold one conversation only; here every one of them becomes a sample.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from nemo_gym.keys import AGENT_REF_KEY_NAME, ROLLOUT_ID_KEY_NAME
from nemo_gym.rl.samples import calls_in_order, why_masked
from nemo_gym.runs.record import Result, Row
from nemo_gym.token_id_capture.builder import Chain, ChainLink, project_chain_to_output_items, run_builder
from nemo_gym.token_id_capture.config import token_id_capture_config, token_id_capture_enabled_for_agent
from nemo_gym.token_id_capture.consumer import NO_RECORDS, collector_token_source
from nemo_gym.token_id_capture.delivery import MASK_SAMPLE_KEY, TOKEN_CAPTURE_KEY, rollout_carries_token_ids
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot, TokenSource
from nemo_gym.token_id_capture.records import TokenEntry

logger = logging.getLogger(__name__)


class CapturedTokens:
    """Where the tokens of a run's rollouts are found."""

    def __init__(self, source: TokenSource, config: Any) -> None:
        self._source = source
        self._config = config
        self._wanted: dict[str, bool] = {}

    @classmethod
    def of_run(cls, global_config_dict: Any) -> "CapturedTokens | None":
        """What a run keeps; None when it keeps nothing.

        Raises:
            ValueError: it does, and there is no place to find it in.
        """
        if not token_id_capture_config(global_config_dict).enabled:
            return None
        found = collector_token_source(global_config_dict)
        return None if found is None else cls(found.source, global_config_dict)

    def named(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, each with an id under which its calls are kept, other than that of any earlier attempt."""
        return [{**row, ROLLOUT_ID_KEY_NAME: f"rl-{uuid4().hex}"} if self._is_kept(row) else row for row in rows]

    async def put_onto(self, row: Row, result: Result) -> None:
        """Give a result without tokens those of its rollout's calls; what is in doubt masks it.

        Raises:
            ValueError: what was kept cannot be read.
        """
        if not self._is_kept(row) or not isinstance(result, dict) or rollout_carries_token_ids(result):
            return
        snapshot = await self._source.freeze(row[ROLLOUT_ID_KEY_NAME])
        _deliver(result, snapshot)
        if MASK_SAMPLE_KEY not in result:
            identity: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
            await self._source.drop(snapshot.rollout_id, **identity)

    def _is_kept(self, row: Row) -> bool:
        agent = row.get(AGENT_REF_KEY_NAME)
        name = str(agent.get("name")) if isinstance(agent, Mapping) else ""
        if name not in self._wanted:
            self._wanted[name] = token_id_capture_enabled_for_agent(self._config, name)
        return self._wanted[name]


def _deliver(result: Result, snapshot: TokenCaptureSnapshot) -> None:
    response = result.get("response")
    if not isinstance(response, dict):
        return
    built = run_builder(list(snapshot.entries))
    if not built.chains:
        logger.warning("rollout %s: %s", snapshot.rollout_id, NO_RECORDS)
        return
    response["output"] = [item for entry in calls_in_order(built) for item in _items(entry)]
    reason = why_masked(built, is_incomplete=snapshot.incomplete)
    if reason is not None:
        result[MASK_SAMPLE_KEY] = True
        result[TOKEN_CAPTURE_KEY] = {"error": reason}


def _items(entry: TokenEntry) -> list[dict[str, Any]]:
    return project_chain_to_output_items(Chain(entry.model_call_id, [ChainLink(entry, [])], entry.prompt_token_ids))
