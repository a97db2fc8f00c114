"""Rows that the agents would refuse are found before the first of them is sent: one of each shape is put before them.

Agents, and the environments behind them, hold it against the types that they read anyway. Those that do not know the
question, as servers written elsewhere may not, are not asked twice: their rows are sent as they are.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from nemo_gym.data.row_shapes import Objections, RowShapes, Shape
from nemo_gym.http.client import ServerClient
from nemo_gym.keys import RESPONSES_CREATE_PARAMS_KEY_NAME, ROLLOUT_INDEX_KEY_NAME
from nemo_gym.runs.input_check import InputRowsError
from nemo_gym.runs.record import Row, agent_name_of
from nemo_gym.schemas.row_faults import ROW_CHECK_PATH, CheckedRows, RowFault, RowsToCheck

logger = logging.getLogger(__name__)

_TIMEOUT_S = 15.0
_AT_ONCE = 20
_REMEDY = "Correct or remove them, or pass +keep_offending_rows=true to send them all the same."


def shapes_of(rows: Iterable[Row]) -> RowShapes:
    """The shapes of materialized rows, numbered by task from 1; rows that a program made may lack parameters."""
    shapes = RowShapes()
    firsts = (row for row in rows if not row.get(ROLLOUT_INDEX_KEY_NAME))
    for number, row in enumerate(firsts, 1):
        if isinstance(row.get(RESPONSES_CREATE_PARAMS_KEY_NAME), dict):
            shapes.note(agent_name_of(row) or "", row, number)
    return shapes


async def refuse_unfit_rows(client: ServerClient, shapes: RowShapes, where: str, *, keep: bool) -> None:
    """Ask every agent about the shapes of its rows; `where` says what their numbers count, as in `in.jsonl, line`.

    With `keep`, rows are sent all the same, after a warning.

    Raises:
        InputRowsError: rollouts of some rows are bound to fail; the first are named.
    """
    found = Objections()
    for agent, of_agent in shapes.by_agent().items():
        for start in range(0, len(of_agent), _AT_ONCE):
            batch = of_agent[start : start + _AT_ONCE]
            faults = await _ask(client, agent, batch)
            if faults is None:
                break
            found.add(where, batch, faults)
    found.settle(InputRowsError, _REMEDY, keep=keep)


async def _ask(client: ServerClient, agent: str, batch: Sequence[Shape]) -> list[list[RowFault]] | None:
    """What an agent says about the first row of each shape; None when it does not say."""
    body: dict[str, Any] = RowsToCheck(rows=[shape.row for shape in batch]).model_dump()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await client.post(server_name=agent, url_path=ROW_CHECK_PATH, json=body)
            content = await answer.read()
        checked = CheckedRows.model_validate_json(content) if answer.status == HTTPStatus.OK else None
    except Exception as error:  # noqa: BLE001 - whether it is well shows when rows are sent
        logger.debug("rows are not checked by %r: %r", agent, error)
        return None
    return checked.faults if checked is not None and len(checked.faults) == len(batch) else None
