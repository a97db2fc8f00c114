"""Which fault strikes a request, decided without randomness.

Chance comes from the request and its seed, and from how often an equal request has been seen: the
same run fails in the same places, and trying again can still help.
"""

from collections import OrderedDict

from responses_api_models.scripted_model.conversation import Conversation
from responses_api_models.scripted_model.draws import Draws
from responses_api_models.scripted_model.script_faults import Fault

_REMEMBERED_REQUESTS = 100_000


class FaultPlan:
    """Counts requests against the faults of a script; belongs to one process."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._matched = [0] * len(faults)
        self._struck = [0] * len(faults)
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def strike(self, conversation: Conversation, draws: Draws) -> Fault | None:
        """The first fault that is due for this request, if any."""
        if not self._faults:
            return None
        arrival = self._count_arrival(f"{conversation.seed}\0".encode() + conversation.fingerprint)
        for number, fault in enumerate(self._faults):
            if self._is_due(number, fault, conversation, draws, arrival):
                self._struck[number] += 1
                return fault
        return None

    def _is_due(self, number: int, fault: Fault, conversation: Conversation, draws: Draws, arrival: int) -> bool:
        if fault.match.variables(conversation) is None:
            return False
        self._matched[number] += 1
        if fault.every is not None and self._matched[number] % fault.every:
            return False
        if fault.times is not None and self._struck[number] >= fault.times:
            return False
        if fault.times_per_request is not None and arrival > fault.times_per_request:
            return False
        return draws.happens(f"fault {number}, arrival {arrival}", fault.probability)

    def _count_arrival(self, request: bytes) -> int:
        """How often an equal request has arrived, this time included."""
        arrival = self._seen.pop(request, 0) + 1
        self._seen[request] = arrival
        if len(self._seen) > _REMEMBERED_REQUESTS:
            self._seen.popitem(last=False)
        return arrival
