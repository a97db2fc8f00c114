"""PUBLIC: `RolloutManager`, one prompt in, a group of completions out.

    manager = RolloutManager(tokenizer, {"math": environment}, num_generations_per_prompt=8, max_seq_len=4096,
                             policy_generation=policy)
    group = await manager.run_rollout(sample)

Two implementations stand behind it: the native path generates and steps the environment in this process, the
servers' path (`use_nemo_gym=True`) sends the attempts at a prompt as rows to an agent, through one `run_rollouts`.
A group is complete or an error; there is nothing between. `generate_and_push` puts it into a buffer from which a
trainer takes it, while the weights may change: `pause` stops what is being generated, which keeps its tokens and goes
on after `resume`.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from copy import copy, deepcopy
from typing import Any, TypeAlias

from nemo_gym.http.generation_gate import DEFAULT_GRACE_S, Abort, GenerationGate
from nemo_gym.keys import AGENT_REF_KEY_NAME, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.rl.buffer import give_place_back
from nemo_gym.rl.calls import call, deadline
from nemo_gym.rl.failures import (
    Budget,
    FailureClass,
    GymTransportError,
    RolloutDataFailure,
    RolloutOutcome,
    RolloutRedispatchExhausted,
    RolloutRetryPolicy,
    RolloutStats,
    RolloutTimeouts,
    classify_rollout_failure,
)
from nemo_gym.rl.interfaces import (
    Completion,
    DatumSpec,
    GenerationConfig,
    GenerationInterface,
    GroupBuffer,
    MessageLog,
    PromptGroupRecord,
    RolloutOverrides,
    Timer,
    Tokenizer,
    has_nan,
    mask_older_parts,
    num_tokens,
    with_tensors,
)
from nemo_gym.rl.native import UNLIMITED_TURNS, AsyncRolloutImpl
from nemo_gym.rl.rewards import Reward, gym_metrics, preload_wandb, reward_of_result
from nemo_gym.rl.samples import ROW_INDEX_KEY, completions_of, copied_log, mask_reason_of, why_over_long

logger = logging.getLogger(__name__)

TASK_NAME = "nemo_gym"
TIMER_PREFIX = "timing/rollout"
_HANGS_AFTER_S = 30.0
"""An environment that has not answered so long after `rollout_s` hangs."""
_UNSUPPORTED = ("stop_strings", "stop_token_ids", "top_k")
TokenizerType: TypeAlias = Tokenizer
"""Any tokenizer with the methods used here; those of transformers are."""


class AsyncNemoGymRolloutImpl:
    """Turns a prompt into rows, and what comes back into completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        task_to_env: dict[str, Any],
        num_generations_per_prompt: int,
        max_seq_len: int,
        generation_config: GenerationConfig,
        max_rollout_turns: int | None = None,
        timeouts: RolloutTimeouts | None = None,
        retry_policy: RolloutRetryPolicy | None = None,
        reward_weights: Mapping[str, float] | None = None,
        min_group_size: int | None = None,
        gate: GenerationGate | None = None,
        mask_interrupted: bool = False,
        mask_env_flagged_samples: bool = True,
        **kwargs: Any,
    ) -> None:
        """`task_to_env["nemo_gym"]` is a `NemoGym`, or the handle of one; `kwargs` is what the other path needs."""
        self.tokenizer = tokenizer
        self.task_to_env = task_to_env
        self.num_generations_per_prompt = num_generations_per_prompt
        self.max_seq_len = max_seq_len
        self.generation_config = generation_config
        self.max_rollout_turns = max_rollout_turns
        self.timeouts = timeouts
        self.retry_policy = retry_policy
        self.reward_weights = reward_weights
        self.min_group_size = min_group_size
        self.gate = gate or GenerationGate(0)
        self.mask_interrupted = mask_interrupted
        self.mask_env_flagged_samples = mask_env_flagged_samples
        self.overrides = RolloutOverrides()
        self._validate_init_params()

    def with_overrides(self, overrides: RolloutOverrides) -> "AsyncNemoGymRolloutImpl":
        """The same, but for what one call wants otherwise."""
        other = copy(self)
        other.overrides = overrides
        other.num_generations_per_prompt = overrides.n or self.num_generations_per_prompt
        if self.min_group_size is not None:
            other.min_group_size = min(self.min_group_size, other.num_generations_per_prompt)
        other.generation_config = dict(self.generation_config)  # type: ignore[assignment]
        if overrides.greedy or overrides.temperature is not None:
            other.generation_config["temperature"] = overrides.temperature or 0.0
        if overrides.max_new_tokens is not None:
            other.generation_config["max_new_tokens"] = overrides.max_new_tokens
        return other

    async def run_rollout(self, input_sample: DatumSpec) -> PromptGroupRecord:
        """All completions of a prompt.

        Raises:
            GymTransportError: rows never came back.
            RolloutDataFailure: a result cannot be trained on.
        """
        timer = Timer()
        with timer.time(f"{TIMER_PREFIX}/total"):
            completions, metrics = await self._run_rollouts(self._build_inputs(input_sample), timer, TIMER_PREFIX)
        return PromptGroupRecord(
            prompt_idx=input_sample["idx"],
            prompt=_prompt_of(input_sample, completions),
            extra_env_info=input_sample["extra_env_info"],
            metadata={
                "task_name": TASK_NAME,
                **({} if self.overrides.split is None else {"split": self.overrides.split}),
            },
            completions=completions,
            rollout_metrics={**metrics, **timer.get_timing_metrics(reduction_op="sum")},
        )

    async def pause(self, abort: Abort | None, grace_s: float) -> None:
        """Stop what the model servers generate."""
        self.gate.shut()
        environment = self._environment()
        if abort is not None:
            await call(environment.shut_generation)
            await abort()
        await call(environment.pause_generation, grace_s, is_aborted=abort is not None)

    async def resume(self) -> None:
        """Have the model servers go on, and tell them the version of the weights."""
        try:
            await call(self._environment().resume_generation, self.gate.version)
        finally:
            self.gate.resume()  # deadlines run again, whatever has become of the servers

    def _validate_init_params(self) -> None:
        for key in _UNSUPPORTED:
            value = self.generation_config[key]  # type: ignore[literal-required]
            assert not value, (
                f"generation_config[{key!r}] is {value!r}, which is unsupported on the NeMo-Gym path: "
                "the agent decides when to stop; set it to None"
            )
        assert self.max_rollout_turns in (None, 1), (
            f"max_rollout_turns is {self.max_rollout_turns!r}, which is unsupported on the NeMo-Gym path: "
            "the agent takes the turns; set it to None and limit the agent instead"
        )

    def _build_inputs(self, input_sample: DatumSpec) -> list[dict[str, Any]]:
        """One row per attempt, each with its index; the sample itself is left alone."""
        template = deepcopy(input_sample["extra_env_info"]) or {}
        missing = [key for key in (RESPONSES_CREATE_PARAMS_KEY_NAME, AGENT_REF_KEY_NAME) if key not in template]
        if missing:
            raise RolloutDataFailure(
                f"prompt {input_sample['idx']}: extra_env_info lacks {' and '.join(missing)}; "
                "it must be a row as an agent's /run takes it"
            )
        params = template[RESPONSES_CREATE_PARAMS_KEY_NAME]
        params["temperature"] = self.generation_config["temperature"]
        params["top_p"] = self.generation_config["top_p"]
        own_cap = params.get("max_output_tokens")
        cap = self.generation_config["max_new_tokens"]
        params["max_output_tokens"] = cap if own_cap is None else min(cap, own_cap)
        return [{**deepcopy(template), ROW_INDEX_KEY: index} for index in range(self.num_generations_per_prompt)]

    async def _run_rollouts(
        self, inputs: list[dict[str, Any]], timer: Timer, timer_prefix: str
    ) -> tuple[list[Completion], dict[str, Any]]:
        """Return completions in row order, and their metrics with what the environment measured."""
        preload_wandb()
        with timer.time(f"{timer_prefix}/run_rollouts"):
            completions, measured = await self._completions(inputs, timer_prefix)
        with timer.time(f"{timer_prefix}/compute_metrics"):
            agent = inputs[0][AGENT_REF_KEY_NAME]["name"]
            scored = [completion for completion in completions if not math.isnan(completion.reward)]
            metrics = self._compute_rollout_metrics(scored, agent) if scored else {}
            metrics = _without_row_fields(metrics, scored, inputs[0], agent)
            masked = sum(completion.mask_reason is not None for completion in completions)
            if masked or self.min_group_size is not None:
                metrics["masked_completions"] = masked
        return completions, {**metrics, **measured}

    async def _completions(
        self, inputs: list[dict[str, Any]], timer_prefix: str
    ) -> tuple[list[Completion], dict[str, Any]]:
        names = ("timeouts", "retry_policy", "min_group_size")
        options = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in options.items() if value is not None}
        began = self.gate.version
        every_row = [row[ROW_INDEX_KEY] for row in inputs]
        # The environment ends its rows at rollout_s. This bounds the wait for an environment that itself hangs.
        limit_s = self.timeouts.rollout_s if self.timeouts else None
        patience_s = None if limit_s is None else limit_s + _HANGS_AFTER_S
        hangs = f"although their time was up {_HANGS_AFTER_S:g} s ago (rollout_s={limit_s or 0:g} s): it hangs"
        async with deadline(patience_s, lambda: _never_came_back(every_row, hangs), self.gate):
            results, timing = await call(
                self._environment().run_rollouts, inputs, self.tokenizer, timer_prefix, **given
            )
        missing = [index for index in every_row if index >= len(results) or results[index] is None]
        if missing:
            raise _never_came_back(missing, "although the environment has finished")
        completions = completions_of(results, self._result_to_completion, self.min_group_size)
        for message in (it for completion in completions for log in completion.samples for it in log):
            if message["role"] == "assistant":
                message.setdefault("weight_versions", [began, self.gate.version])
        return completions, timing

    def _environment(self) -> Any:
        if TASK_NAME not in self.task_to_env:
            known = ", ".join(map(repr, self.task_to_env)) or "nothing"
            raise ValueError(f"task_to_env has {known} but no {TASK_NAME!r}; put a NemoGym there")
        return self.task_to_env[TASK_NAME]

    def _result_to_completion(self, result: dict[str, Any]) -> Completion:
        message_log: MessageLog = with_tensors(result["message_log"])
        branches = [with_tensors(log) for log in result.get("branches", ())]
        if any(map(has_nan, [message_log, *branches])):
            raise RolloutDataFailure("a completion has NaN log-probs; look for overflow in the policy's logits")
        full_result = result["full_result"]
        if not self.mask_env_flagged_samples and isinstance(full_result.get("instance_config"), dict):
            full_result["instance_config"].pop("mask_sample", None)
        if self.mask_interrupted:
            for log in (message_log, *branches):
                mask_older_parts(log)
        over_long = why_over_long(message_log, self.max_seq_len)
        reason = _why_incomplete(full_result)
        if over_long is not None or num_tokens(message_log) == self.max_seq_len:
            reason = reason or "max_seq_len"
        reward = reward_of_result(full_result, self.reward_weights) if over_long is None else Reward(math.nan, {})
        return Completion(
            message_log=message_log,
            env_extras=full_result,
            truncated=reason is not None,
            reward=reward.total,
            truncation_reason=reason,
            reward_components=reward.components,
            branches=branches,
            mask_reason=over_long or mask_reason_of(full_result),
        )

    def _compute_rollout_metrics(self, completions: list[Completion], agent_name: str) -> dict[str, Any]:
        return gym_metrics(completions, agent_name)


def _prompt_of(sample: DatumSpec, completions: Sequence[Completion]) -> MessageLog:
    """Return the prompt of a sample; the one that the policy saw, where the sample has no tokens of it."""
    own = sample["message_log"]
    has_tokens = any(len(message.get("token_ids", ())) for message in own)
    return own if has_tokens else copied_log(completions[0].message_log[:1])


def _why_incomplete(result: Mapping[str, Any]) -> str | None:
    """What the model server says about an answer that was cut off; None when it was not."""
    response = result.get("response")
    if not isinstance(response, Mapping):
        return None
    details = response.get("incomplete_details")
    if isinstance(details, Mapping):
        return str(details.get("reason") or "incomplete")
    return "incomplete" if response.get("status") == "incomplete" else None


def _without_row_fields(
    metrics: dict[str, Any], completions: Sequence[Completion], row: Mapping[str, Any], agent: str
) -> dict[str, Any]:
    """The metrics less those of fields that only came back as the row had them, such as its index or id."""
    results = [completion.env_extras or {} for completion in completions]
    told = {
        key for key, value in row.items() if key == ROW_INDEX_KEY or all(it.get(key) == value for it in results)
    } - {"reward"}
    prefixes = tuple(f"{agent}/{key}/" for key in told)
    return {key: value for key, value in metrics.items() if not (prefixes and key.startswith(prefixes))}


def _never_came_back(rows: list[int], when: str) -> GymTransportError:
    return GymTransportError(f"rows {rows} never came back from the environment {when}")


__all__ = [
    "AsyncNemoGymRolloutImpl",
    "AsyncRolloutImpl",
    "RolloutManager",
    "RolloutOutcome",
    "RolloutRetryPolicy",
    "RolloutStats",
    "RolloutTimeouts",
    "TokenizerType",
]


def _check_group_sizes(wanted: int, enough: int | None, *, use_nemo_gym: bool) -> None:
    assert wanted >= 1, f"num_generations_per_prompt must be >= 1, but is {wanted}"
    assert enough is None or (use_nemo_gym and 1 <= enough <= wanted), (
        f"min_group_size is {enough}; it must be between 1 and num_generations_per_prompt={wanted}, and works with "
        "use_nemo_gym=True"
    )


class RolloutManager:
    """Runs groups; as many at once as the caller awaits."""

    def __init__(
        self,
        tokenizer: TokenizerType,
        task_to_env: dict[str, Any],
        num_generations_per_prompt: int,
        max_seq_len: int,
        max_rollout_turns: int | None = None,
        policy_generation: GenerationInterface | None = None,
        generation_config: GenerationConfig | None = None,
        use_nemo_gym: bool = False,
        *,
        tq_buffer: GroupBuffer | None = None,
        timeouts: RolloutTimeouts | None = None,
        retry_policy: RolloutRetryPolicy | None = None,
        reward_weights: Mapping[str, float] | None = None,
        min_group_size: int | None = None,
        mask_interrupted: bool = False,
        mask_env_flagged_samples: bool = True,
    ) -> None:
        """`retry_policy` says how often a failed group is tried again: not at all when it is None.

        `tq_buffer` is where `generate_and_push` puts groups; a `RolloutBuffer` will do. `reward_weights` is for
        environments with several rewards, by name: their weighted sum is the reward of a completion. On the servers'
        path, `min_group_size` good completions are enough for a group; the others stand in it masked. With
        `mask_interrupted`, what a turn said before the last pause in it is not to be trained on. Without
        `mask_env_flagged_samples`, an environment's mark `instance_config.mask_sample` is taken out of results.
        """
        _check_group_sizes(num_generations_per_prompt, min_group_size, use_nemo_gym=use_nemo_gym)
        assert use_nemo_gym or policy_generation is not None, (
            "policy_generation is required on the native path; pass a generator, or use_nemo_gym=True"
        )
        assert not use_nemo_gym or generation_config is not None, (
            "generation_config is required on the NeMo-Gym path: it holds temperature, top_p and max_new_tokens"
        )
        self.stats = RolloutStats()
        self.gate = GenerationGate(0)
        self._buffer = tq_buffer
        self._retry_policy = retry_policy or RolloutRetryPolicy.single_attempt()
        options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "task_to_env": task_to_env,
            "num_generations_per_prompt": num_generations_per_prompt,
            "max_seq_len": max_seq_len,
            "max_rollout_turns": max_rollout_turns,
            "policy_generation": policy_generation,
            "generation_config": generation_config,
            "timeouts": timeouts,
            "retry_policy": retry_policy,
            "reward_weights": reward_weights,
            "min_group_size": min_group_size,
            "gate": self.gate,
            "mask_interrupted": mask_interrupted,
            "mask_env_flagged_samples": mask_env_flagged_samples,
        }
        if not use_nemo_gym and max_rollout_turns is None:
            options["max_rollout_turns"] = UNLIMITED_TURNS
        self._impl = AsyncNemoGymRolloutImpl(**options) if use_nemo_gym else AsyncRolloutImpl(**options)

    async def run_rollout(
        self, input_sample: DatumSpec, overrides: RolloutOverrides | None = None
    ) -> PromptGroupRecord:
        """All completions of a prompt, tried again within the budgets of the retry policy.

        `overrides` says what this call wants otherwise: fewer completions, other sampling.

        Raises:
            RolloutFailure: the last attempt's failure, or whatever an environment of the native path raised.
        """
        budget = Budget(self._retry_policy)
        impl = self._impl if overrides is None else self._impl.with_overrides(overrides)
        while True:
            try:
                record = await impl.run_rollout(input_sample)
            except Exception as error:  # noqa: BLE001 - raised again unless a budget allows another attempt
                await self._pause_or_give_up(error, budget, input_sample)
            else:
                self.stats.completed += 1
                self.stats.gym_row_redispatches += int(record.rollout_metrics.get("gym_row_redispatches", 0))
                return record

    @property
    def weight_version(self) -> int:
        """The version of the weights that the policy has now."""
        return self.gate.version or 0

    def set_weight_version(self, version: int) -> None:
        """From now on the policy has these weights; groups and turns are stamped with them.

        The servers learn of it with the next `resume`, which does no harm where nothing was paused.
        """
        self.gate.version = int(version)

    async def pause(self, abort: Abort | None = None, *, grace_s: float = DEFAULT_GRACE_S) -> None:
        """Have nothing generated until `resume`, and return when nothing is: the weights may change then.

        What is being generated keeps its tokens, and goes on from them later. `abort` is called once no generation can
        begin; it tells the engine to end those under way with what they have, for which they get `grace_s`. What runs
        longer is cancelled, and keeps what it had told by then. Environments and agents go on.

        Raises:
            TimeoutError: a generation could not be stopped.
            ConfigError: no model server of the servers' path can be paused.
        """
        await self._impl.pause(abort, grace_s)

    async def resume(self) -> None:
        """Go on, with the weights of `set_weight_version`."""
        await self._impl.resume()

    @asynccontextmanager
    async def paused(self, abort: Abort | None = None, *, grace_s: float = DEFAULT_GRACE_S) -> AsyncIterator[None]:
        """`pause` for the time of a block, and `resume` however it ends."""
        try:
            await self.pause(abort, grace_s=grace_s)
            yield
        finally:
            await self.resume()

    async def generate_and_push(
        self,
        input_sample: DatumSpec,
        *,
        target_step: int | None = None,
        inflight_registry: MutableMapping[Any, tuple[asyncio.Task[Any] | None, int]] | None = None,
    ) -> RolloutOutcome:
        """Make the group of a prompt and commit it to the buffer, or leave the prompt out as the policy allows.

        While a group is made, `inflight_registry` has the task that makes it and the version it began with, under
        the id of its place; cancelling that task gives the place back.

        Raises:
            RolloutDataFailure: more prompts would be left out than `max_skipped_prompts`.
            RolloutRedispatchExhausted: more in a row than `max_consecutive_dropped_prompts`.
        """
        assert self._buffer is not None, "tq_buffer is required to push groups; pass one to the manager"
        budget = Budget(self._retry_policy)
        while True:
            try:
                await self._push_one(self._buffer, input_sample, target_step, inflight_registry)
            except Exception as error:  # noqa: BLE001 - raised again unless the policy says otherwise
                try:
                    await self._pause_or_give_up(error, budget, input_sample)
                except Exception as final:  # noqa: BLE001 - the same
                    return self._skip_or_raise(final)
            else:
                self.stats.commit()
                return RolloutOutcome.COMMITTED

    async def _push_one(
        self,
        buffer: GroupBuffer,
        sample: DatumSpec,
        target_step: int | None,
        registry: MutableMapping[Any, tuple[asyncio.Task[Any] | None, int]] | None,
    ) -> None:
        if hasattr(buffer, "wait_for_room"):
            await buffer.wait_for_room()
        start = self.weight_version
        group_id = buffer.reserve(weight_version=start, target_step=target_step)
        in_flight = {} if registry is None else registry
        in_flight[group_id] = (asyncio.current_task(), start)
        try:
            record = await self._impl.run_rollout(sample)
            del in_flight[group_id]  # before the commit, which must not be cancelled half way
            await buffer.commit(group_id, record, start_weight_version=start, end_weight_version=self.weight_version)
        except BaseException:
            in_flight.pop(group_id, None)
            await give_place_back(buffer, group_id)
            raise

    def _skip_or_raise(self, error: Exception) -> RolloutOutcome:
        policy, stats = self._retry_policy, self.stats
        if classify_rollout_failure(error) is FailureClass.DATA:
            if stats.skipped < policy.max_skipped_prompts:
                stats.skipped += 1
                return RolloutOutcome.SKIPPED
            if policy.max_skipped_prompts == 0:
                raise error
            raise RolloutDataFailure(
                f"more than max_skipped_prompts={policy.max_skipped_prompts} prompts failed; the last: {error}"
            ) from error
        stats.drop(error)
        if stats.consecutive_drops > policy.max_consecutive_dropped_prompts:
            raise RolloutRedispatchExhausted(
                f"{stats.consecutive_drops} prompts in a row failed in the infrastructure; the last: {error}"
            ) from error
        return RolloutOutcome.SKIPPED

    async def _pause_or_give_up(self, error: Exception, budget: Budget, sample: DatumSpec) -> None:
        """Wait before the next attempt, or raise the error when the budget of its class is used up."""
        kind = classify_rollout_failure(error)
        pause_s = budget.pause_after(kind)
        if pause_s is None:
            self.stats.given_up[kind][type(error).__name__] += 1
            raise error
        self.stats.retries[kind][type(error).__name__] += 1
        logger.warning("prompt %s is tried again in %g s: %s failure: %s", sample["idx"], pause_s, kind.value, error)
        await asyncio.sleep(pause_s)
