"""Records that could not be used in full: how many there are, why, and which ones."""

from typing import Any

NOT_AN_OBJECT = "record is not an object"
INDICES_UNUSABLE = "_ng_task_index or _ng_rollout_index is missing or not an integer"
DUPLICATE_KEY = "rollout key occurred before; the first record was kept"
REWARD_NOT_A_NUMBER = "reward is not a number"
RESPONSE_NOT_AN_OBJECT = "response is not an object"
USAGE_NOT_AN_OBJECT = "response.usage is not an object"

BAD_RECORDS_KEY = "bad_records"
BAD_RECORDS_BY_REASON_KEY = "bad_records_by_reason"


class BadRecords:
    """Counts every bad record and names the first `named` of each reason, so that memory stays bounded."""

    def __init__(self, named: int = 20) -> None:
        self.count = 0
        self._named = named
        self._counts: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}

    def note(self, name: str, *reasons: str) -> None:
        """Count one record, called `name` (`task:rollout` when it has a key), under each of `reasons`."""
        self.count += 1
        for reason in reasons:
            self._counts[reason] = self._counts.get(reason, 0) + 1
            names = self._names.setdefault(reason, [])
            if len(names) < self._named:
                names.append(name)

    def copy(self) -> "BadRecords":
        """An independent copy."""
        twin = BadRecords(self._named)
        twin.count, twin._counts = self.count, dict(self._counts)
        twin._names = {reason: list(names) for reason, names in self._names.items()}
        return twin

    def summary(self) -> dict[str, Any]:
        """Entries for `agent_metrics`; empty when every record was good.

        `bad_records` is the number of records; `bad_records_by_reason` maps each reason to its `count` and to the
        names of the first `records`. A record with two faults is listed under both.
        """
        if not self.count:
            return {}
        by_reason = {
            reason: {"count": count, "records": list(self._names[reason])} for reason, count in self._counts.items()
        }
        return {BAD_RECORDS_KEY: self.count, BAD_RECORDS_BY_REASON_KEY: by_reason}
