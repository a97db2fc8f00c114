"""Every instruction by its id, made from what a row says."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from nemo_gym.config_types import did_you_mean
from resources_servers.instruction_following.form import FORM
from resources_servers.instruction_following.instructions import Instruction
from resources_servers.instruction_following.lengths import LENGTHS
from resources_servers.instruction_following.wording import WORDING

INSTRUCTIONS: dict[str, type[Instruction]] = {kind.ID: kind for kind in (*WORDING, *FORM, *LENGTHS)}


def instructions_of(ids: Sequence[str], arguments: Sequence[Mapping[str, Any] | None]) -> list[Instruction]:
    """The instructions of a row; arguments that are null count as not given.

    Raises:
        ValueError: naming the id or the argument that is wrong.
    """
    if len(ids) != len(arguments):
        raise ValueError(f"instruction_id_list has {len(ids)} entries and kwargs {len(arguments)}")
    return [_instruction(name, given or {}) for name, given in zip(ids, arguments, strict=True)]


def _instruction(name: str, given: Mapping[str, Any]) -> Instruction:
    kind = INSTRUCTIONS.get(name)
    if kind is None:
        raise ValueError(f"there is no instruction {name!r}{did_you_mean(name, INSTRUCTIONS)}")
    try:
        return kind.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ValueError(f"the kwargs of {name!r} do not fit: {wrong}") from error
