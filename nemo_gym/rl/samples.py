"""From the turns of a rollout to what is trained on: one sample, or several where the conversation was rewritten.

A turn whose prompt begins with everything said before it goes on with that sample. One whose prompt does not (thoughts
were dropped, the history was compacted, a sub-agent began) starts a sample of its own, in which its whole prompt is
context. So every token that the policy generated is trained on in exactly one sample, after exactly the tokens it
was sampled after. All samples of a rollout share its reward.

    completion = completion_of_capture(await source.freeze(rollout_id), reward=1.0)

makes the same of what was captured of an agent that knows no tokens.

A run whose configuration has `token_id_capture` enabled keeps the tokens of every call. Rows get an id of their own to
keep them under, and what model servers have captured is put onto the results. A record of such a rollout may hold one
conversation only; here every one of them becomes a sample.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple
from uuid import uuid4

from nemo_gym.keys import AGENT_REF_KEY_NAME, ROLLOUT_ID_KEY_NAME
from nemo_gym.rl.failures import NoGenerationDataError, RolloutDataFailure
from nemo_gym.rl.interfaces import Completion, Message, MessageLog, as_list, num_tokens, with_tensors
from nemo_gym.runs.record import Result, Row
from nemo_gym.token_id_capture.builder import BuildOutput, Chain, ChainLink, project_chain_to_output_items, run_builder
from nemo_gym.token_id_capture.config import token_id_capture_config, token_id_capture_enabled_for_agent
from nemo_gym.token_id_capture.consumer import NO_RECORDS, collector_token_source
from nemo_gym.token_id_capture.delivery import MASK_SAMPLE_KEY, TOKEN_CAPTURE_KEY, rollout_carries_token_ids
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot, TokenSource
from nemo_gym.token_id_capture.records import TokenEntry, weights_of

logger = logging.getLogger(__name__)

ROW_INDEX_KEY = "_rowidx"
"""In a row: its place in its group."""
MASK_REASON = "mask_reason"
"""In place of a result: why a row of a group has none."""


class _Sample(NamedTuple):
    """One sample in the making."""

    log: MessageLog
    seen: list[int]
    """All its tokens so far."""


class Samples:
    """The samples that the turns of a rollout make, given in their order."""

    def __init__(self) -> None:
        self._samples: list[_Sample] = []

    @property
    def logs(self) -> list[MessageLog]:
        """The message logs; the first has the first turn."""
        return [sample.log for sample in self._samples]

    def goes_on(self, prompt: list[int]) -> bool:
        """Whether the prompt begins with all tokens of a sample, or is the first of all."""
        return not self._samples or self._sample_before(prompt) is not None

    def seen_last(self) -> list[int]:
        """The tokens of the sample that was begun last."""
        return self._samples[-1].seen if self._samples else []

    def add(self, prompt: list[int], generated: Message) -> None:
        """Add a turn; `generated` is the message with the tokens that followed the prompt."""
        sample = self._sample_before(prompt)
        if sample is None:
            sample = _Sample([], [])
            self._samples.append(sample)
        new = prompt[len(sample.seen) :]
        sample.log.append({"role": "user", "content": "", "token_ids": new})
        sample.log.append(generated)
        sample.seen.extend(new)
        sample.seen.extend(generated["token_ids"])

    def _sample_before(self, prompt: list[int]) -> _Sample | None:
        """The longest sample that the prompt begins with; of equal ones the latest."""
        found = None
        for sample in reversed(self._samples):
            length = len(sample.seen)
            is_longer = found is None or length > len(found.seen)
            # the last token tells most of those apart that differ, without a copy of the prompt
            if is_longer and length <= len(prompt) and prompt[length - 1] == sample.seen[-1]:
                found = sample if prompt[:length] == sample.seen else found
        return found


def completion_of_capture(
    captured: TokenCaptureSnapshot | Sequence[TokenEntry],
    reward: float,
    *,
    env_extras: dict[str, Any] | None = None,
    truncation_reason: str | None = None,
) -> Completion:
    """The completion that the captured calls of one rollout amount to, with a sample per conversation among them.

    Of calls that were tried again only those count that the agent went on with. Where nobody knows which these are, or
    where a call is missing, the completion is masked.

    Raises:
        NoGenerationDataError: there is no token of the policy among them.
        ValueError: they belong to several rollouts.
    """
    entries = list(captured.entries) if isinstance(captured, TokenCaptureSnapshot) else list(captured)
    rollouts = sorted({entry.rollout_id for entry in entries})
    if len(rollouts) > 1:
        raise ValueError(f"the calls belong to several rollouts ({', '.join(rollouts[:5])}); give those of one")
    built = run_builder(entries)
    if not built.chains:
        words = f"{len(entries)} calls were captured, and no conversation can be made of them"
        raise NoGenerationDataError(f"rollout {rollouts[0] if rollouts else '?'} has no generation data: {words}")
    samples = Samples()
    for entry in calls_in_order(built):
        samples.add(list(entry.prompt_token_ids), _generated(entry))
    is_incomplete = isinstance(captured, TokenCaptureSnapshot) and captured.incomplete
    first, *others = [with_tensors(log) for log in samples.logs]
    return Completion(
        message_log=first,
        env_extras=env_extras,
        truncated=truncation_reason is not None,
        reward=reward,
        truncation_reason=truncation_reason,
        branches=others,
        mask_reason=why_masked(built, is_incomplete=is_incomplete),
    )


def mask_reason_of(result: Mapping[str, Any]) -> str | None:
    """Why a result says that it is not to be trained on; None when it does not say so."""
    instance = result.get("instance_config")
    if result.get("mask_sample"):
        told = result.get("_ng_token_capture")
        return str((told.get("error") if isinstance(told, Mapping) else None) or "mask_sample")
    return "instance_config.mask_sample" if isinstance(instance, Mapping) and instance.get("mask_sample") else None


def why_over_long(message_log: MessageLog, max_seq_len: int) -> str | None:
    """Return why a prompt is too long to be trained on; None when it is not."""
    prompt = takewhile(lambda message: message["role"] != "assistant", message_log)
    length = num_tokens(list(prompt))
    return f"the prompt has {length} tokens, more than max_seq_len={max_seq_len}" if length > max_seq_len else None


def copied_log(message_log: MessageLog) -> MessageLog:
    """Return messages of their own, with tensors of their own."""
    return with_tensors([{**message, "token_ids": as_list(message["token_ids"])} for message in message_log])


def masked_completion(reason: str, prompt: MessageLog, truncation_reason: str | None = None) -> Completion:
    """What stands in a group for an attempt without a result: the prompt, no reward, and nothing to train on."""
    return Completion(
        copied_log(prompt),
        env_extras=None,
        truncated=truncation_reason is not None,
        reward=math.nan,
        truncation_reason=truncation_reason,
        mask_reason=reason,
    )


def completions_of(
    results: Sequence[Mapping[str, Any]],
    completion_of: Callable[[dict[str, Any]], Completion],
    min_group_size: int | None,
) -> list[Completion]:
    """The completions of a group's results; those that failed are masked, if enough are left.

    Raises:
        RolloutDataFailure: too many failed, or one did and `min_group_size` is None.
    """
    made: list[Completion | RolloutDataFailure] = []
    for result in results:
        if result.get(MASK_REASON) is not None:
            made.append(RolloutDataFailure(result[MASK_REASON]))
            continue
        try:
            made.append(completion_of(dict(result)))
        except RolloutDataFailure as error:
            made.append(error)
    failures = [each for each in made if isinstance(each, RolloutDataFailure)]
    if failures and (min_group_size is None or len(made) - len(failures) < min_group_size):
        raise failures[0]
    prompt: MessageLog = next(
        (result["input_message_log"] for result in results if result.get(MASK_REASON) is None), []
    )
    return [masked_completion(str(each), prompt) if isinstance(each, RolloutDataFailure) else each for each in made]


def calls_in_order(built: BuildOutput) -> list[TokenEntry]:
    """Every call of the chains once, parents first, the main chain before others."""
    calls: dict[str, TokenEntry] = {}
    for chain in built.chains:
        for link in chain.links:
            calls.setdefault(link.entry.model_call_id, link.entry)
    return list(calls.values())


def _generated(entry: TokenEntry) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "token_ids": list(entry.generation_token_ids),
        "generation_logprobs": list(entry.generation_log_probs),
        **weights_of(entry.model_extra or {}),
    }


def why_masked(built: BuildOutput, *, is_incomplete: bool) -> str | None:
    """What is in doubt about a rollout's calls; None when nothing is. Several conversations are no doubt here."""
    if is_incomplete:
        return "a call of the rollout was not captured"
    if built.notes.unresolved_retries:
        return "calls were tried again, and it is not known which answer counted"
    return f"{len(built.quarantined)} calls could go on from several others" if built.quarantined else None


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
