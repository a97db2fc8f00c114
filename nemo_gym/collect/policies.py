"""What may go along with the rollouts of a run and steer them: budgets, caps that adapt, stragglers, repeats, a person.

A policy sees every attempt start and end. It may hold back what has not started, leave out rollouts that are not needed
any more, ask for the run to end, and act in the meantime: through the dispatcher it can change caps and give up on
rollouts in flight. None of them knows of the others; the dispatcher asks them one after another.
"""

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

from nemo_gym.collect.failures import Attempt, PendingAttempt
from nemo_gym.collect.stopping import Stop
from nemo_gym.runs.options import RolloutCollectionConfig
from nemo_gym.runs.record import Row

if TYPE_CHECKING:
    from nemo_gym.collect.dispatch import Dispatch
    from nemo_gym.collect.progress import Progress


class Policy:
    """Goes along with one run; every method may be left as it is, and then has no effect."""

    options: frozenset[str] = frozenset()
    """Names of options that it obeys and that may be changed while it goes along."""

    def follow(self, progress: "Progress") -> None:
        """What shows how the run is doing; told before the run begins."""

    def begin(self, dispatch: "Dispatch") -> None:
        """The run begins, steered through `dispatch`, whose event loop runs."""

    async def act(self) -> None:
        """Runs beside the rollouts, and is cancelled when they have ended."""
        await asyncio.Event().wait()

    def holds_back(self) -> bool:
        """Whether nothing may start now; `Dispatch.look_again` says that this may have changed.

        A policy that holds back while nothing is in flight has to see to it that the run goes on, or ends.
        """
        return False

    def leaves_out(self, row: Row) -> bool:
        """Whether a rollout that would start now is not needed any more; then it is not sent, and not recorded."""
        return False

    def started(self, pending: PendingAttempt) -> None:
        """An attempt was sent."""

    def ended(self, pending: PendingAttempt, attempt: Attempt) -> Stop | None:
        """An attempt ended, well or not; a reason to start no more, if there is one. What is in flight then ends."""
        return None

    def change(self, config: RolloutCollectionConfig, changed: Collection[str]) -> None:
        """A person has changed options of the run: those named in `changed`, at least one of them in `options`.

        Raises:
            ConfigError: that cannot be done now; nothing has changed then.
        """

    def notice(self) -> str:
        """A few words for the progress line; empty for nothing."""
        return ""
