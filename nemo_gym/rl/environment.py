"""PUBLIC: `NemoGym`, the environments behind the servers as one environment of a trainer.

    with NemoGym({"model_name": "policy", "base_urls": [url], "initial_global_config_dict": {...}}) as gym:
        manager = RolloutManager(tokenizer, {"nemo_gym": gym}, ..., use_nemo_gym=True)

It is a plain object. `NemoGym.as_actor(cfg)` makes the same class a Ray actor; a `RolloutManager` takes either.

The trainer's settings become the configuration of the servers it trains on.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from typing_extensions import TypedDict

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict
from nemo_gym.http.generation_gate import DEFAULT_GRACE_S, PAUSE_PATH, RESUME_PATH, GenerationGate
from nemo_gym.keys import (
    HEAD_SERVER_KEY_NAME,
    POLICY_API_KEY_KEY_NAME,
    POLICY_BASE_URL_KEY_NAME,
    POLICY_MODEL_NAME_KEY_NAME,
    PORT_RANGE_HIGH_KEY_NAME,
    PORT_RANGE_LOW_KEY_NAME,
    RAY_HEAD_NODE_ADDRESS_KEY_NAME,
)
from nemo_gym.rl.calls import deadline
from nemo_gym.rl.failures import GymTransportError, RolloutRetryPolicy, RolloutTimeouts
from nemo_gym.rl.interfaces import Timer
from nemo_gym.rl.message_log import build_message_log
from nemo_gym.rl.row_dispatch import RowDispatch, RowOutcome, ServersOfRun
from nemo_gym.rl.samples import CapturedTokens
from nemo_gym.runs.record import Row

if TYPE_CHECKING:
    from nemo_gym.launch.run_helper import RunHelper

logger = logging.getLogger(__name__)

NAN_RUNS_KEY = "rollout_max_attempts_to_avoid_lp_nan"
_CONNECTIONS_PER_HOST = 16_384
_CONNECTIONS = 65_536
_POLL_EVERY_S = 1.0


class NemoGymConfig(TypedDict, total=False):
    """Settings of a `NemoGym`."""

    model_name: str
    """Becomes `policy_model_name`."""
    base_urls: list[str]
    """Where the policy answers; becomes `policy_base_url`."""
    initial_global_config_dict: Any
    """Everything else that `ng_run` would be told: `config_paths`, server blocks, settings."""
    head_server: dict[str, Any]
    """`host` and `port` of the head server of a run to attach to; nothing is started then. Of the settings above,
    those of the HTTP client and `auth_token` still count."""
    port_range_low: int
    port_range_high: int
    invalid_tool_call_patterns: list[str] | None
    thinking_tags: list[str] | None
    rollout_max_attempts_to_avoid_lp_nan: int
    """How often a row may be run until its log-probs are numbers; 1 when unset."""
    branches: bool
    """Make several samples of a rollout whose conversation was rewritten on the way, which is what happens when unset;
    false makes that a `NonContiguousTokensError`."""


def head_server_of(cfg: NemoGymConfig) -> BaseServerConfig | None:
    """The head server to attach to; None when servers are to be started."""
    head = cfg.get("head_server")
    return None if head is None else BaseServerConfig(host=head["host"], port=head["port"])


def adopt_settings(cfg: NemoGymConfig) -> None:
    """Make what the trainer gave the config of this process, if it has none: clients look there for the run's token."""
    get_global_config_dict(_parser_config(OmegaConf.create(_server_settings(cfg))))


def max_nan_runs_of(cfg: NemoGymConfig) -> int:
    """How often a row with NaN log-probs is run; also read from among the settings of the servers."""
    runs: Any = cfg.get(NAN_RUNS_KEY, _initial(cfg).get(NAN_RUNS_KEY, 1))
    is_sound = isinstance(runs, int) and runs >= 1
    assert is_sound, f"{NAN_RUNS_KEY} is {runs!r}; it must be a whole number >= 1"
    count: int = runs
    return count


def parser_config_of(cfg: NemoGymConfig) -> GlobalConfigDictParserConfig:
    """What `RunHelper.start` wants: a configuration, and not to look at this process's arguments."""
    return _parser_config(global_config_of(cfg))


def global_config_of(cfg: NemoGymConfig) -> DictConfig:
    """The configuration of the servers: what the trainer gave, and the policy it trains."""
    config = _server_settings(cfg)
    for source, key in (("model_name", POLICY_MODEL_NAME_KEY_NAME), ("base_urls", POLICY_BASE_URL_KEY_NAME)):
        if source not in cfg:
            raise ConfigError(
                f"NemoGym needs {source!r} to start servers; to attach to running ones give 'head_server'"
            )
        config[key] = cfg[source]  # type: ignore[literal-required]
    config[POLICY_API_KEY_KEY_NAME] = "dummy_key"
    for key in (PORT_RANGE_LOW_KEY_NAME, PORT_RANGE_HIGH_KEY_NAME):
        if key in cfg:
            config[key] = cfg[key]  # type: ignore[literal-required]
    config.setdefault("global_aiohttp_connector_limit_per_host", _CONNECTIONS_PER_HOST)
    config.setdefault("global_aiohttp_connector_limit", _CONNECTIONS)
    config.setdefault(HEAD_SERVER_KEY_NAME, {"port": 0})
    address = _ray_address()
    if address is not None:
        config.setdefault(RAY_HEAD_NODE_ADDRESS_KEY_NAME, address)
    return OmegaConf.create(config)


def _parser_config(config: DictConfig) -> GlobalConfigDictParserConfig:
    return GlobalConfigDictParserConfig(
        dotenv_path=Path("nemo_gym_env.yaml"), initial_global_config_dict=config, skip_load_from_cli=True
    )


def _server_settings(cfg: NemoGymConfig) -> dict[str, Any]:
    return {key: value for key, value in _initial(cfg).items() if key != NAN_RUNS_KEY}


def _initial(cfg: NemoGymConfig) -> Mapping[str, Any]:
    given = cfg.get("initial_global_config_dict") or {}
    plain: Any = OmegaConf.to_container(given, resolve=False) if OmegaConf.is_config(given) else given
    return plain  # type: ignore[no-any-return]


def _ray_address() -> str | None:
    """The cluster this process belongs to, if it does; Ray is neither imported nor started to find out."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address


def setup_nemo_gym_config(config: Any, tokenizer: Any = None) -> None:
    """Set what a trainer's configuration must say for rollouts on the servers' path; it is changed in place.

    The policy's vLLM answers over HTTP, asynchronously, and stops where the agent wants it to. `config` has
    `policy.generation`, as attributes or as keys.
    """
    generation = _part(_part(config, "policy"), "generation")
    vllm = _part(generation, "vllm_cfg")
    for part, key, value in (
        (vllm, "async_engine", True),
        (vllm, "expose_http_server", True),
        (generation, "stop_strings", None),
        (generation, "stop_token_ids", None),
    ):
        if isinstance(part, Mapping):
            part[key] = value  # type: ignore[index]
        else:
            setattr(part, key, value)


def _part(config: Any, key: str) -> Any:
    found = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    if found is None:
        raise ConfigError(f"the trainer's configuration has no {key!r}, where the settings of the policy belong")
    return found


__all__ = ["NemoGym", "NemoGymConfig", "setup_nemo_gym_config"]


class _TimeIsUp(Exception):  # noqa: N818
    """The rows of a group have had the time of `rollout_s`."""


class NemoGym:
    """Starts the servers of a configuration, or attaches to running ones, and runs rollouts on them."""

    def __init__(self, cfg: NemoGymConfig) -> None:
        self.cfg = cfg
        self._run_helper: RunHelper | None = None
        self._collector: ServersOfRun | None = None
        self._captured: CapturedTokens | None = None
        self._polled_s = 0.0
        self._gate = GenerationGate()
        self._totals = {
            "rollout/gym_row_redispatch_total": 0.0,
            "rollout/lp_nan_retry_total": 0.0,
            "rollout/branched_total": 0.0,
        }

    @classmethod
    def as_actor(cls, cfg: NemoGymConfig, **options: Any) -> Any:
        """The handle of a Ray actor of this class; `options` are Ray's."""
        import ray

        actor_class: Any = ray.remote(cls)
        return actor_class.options(**options).remote(cfg) if options else actor_class.remote(cfg)

    def start(self) -> None:
        """Start the servers and return when all of them answer; with `head_server`, attach to a run instead.

        Raises:
            ConfigError: something the user can fix; among them a head server that does not answer.
            RuntimeError: a server could not be started.
        """
        max_nan_runs_of(self.cfg)
        head = head_server_of(self.cfg)
        if head is None:
            from nemo_gym.launch.run_helper import RunHelper

            helper = RunHelper()
            helper.start(parser_config_of(self.cfg))
            self._run_helper = helper
            head = helper._server_client.head_server_config
        else:
            adopt_settings(self.cfg)
        collector = ServersOfRun()
        collector.attach(head, self._gate)
        self._collector = collector
        self._captured = CapturedTokens.of_run(collector.global_config_dict)

    def _spinup(self) -> None:
        self.start()

    def health_check(self) -> bool:
        """True when the servers run.

        Raises:
            RuntimeError: one of them has ended; the message names it.
        """
        if self._run_helper is not None:
            self._run_helper.poll()
        return self._collector is not None

    def shutdown(self) -> None:
        """Stop what `start` has started; servers it attached to go on."""
        helper, self._run_helper, self._collector = self._run_helper, None, None
        if helper is not None:
            helper.shutdown()

    def __enter__(self) -> "NemoGym":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def run_rollouts(
        self,
        examples: list[Row],
        tokenizer: Any,
        timer_prefix: str,
        *,
        timeouts: RolloutTimeouts | None = None,
        retry_policy: RolloutRetryPolicy | None = None,
        min_group_size: int | None = None,
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Run every row at its agent; results in row order, each with its message log, and timings and counters.

        Each row's `_rowidx` is its position. Every result is there, or an error is raised. With `min_group_size`, so
        many are enough: the others, such as a row that is not back within `rollout_s`, have a `mask_reason` and no
        messages.

        Raises:
            GymTransportError: rows never came back, within their dispatches or within `rollout_s`.
            RolloutDataFailure: a result cannot be trained on.
        """
        if self._collector is None:
            raise RuntimeError("the servers are not started; call start() first")
        policy = retry_policy or RolloutRetryPolicy.single_attempt()
        dispatch = RowDispatch(
            examples,
            lambda result: self._postprocess_nemo_gym_to_nemo_rl_result(result, tokenizer),
            max_sends=policy.max_gym_row_attempts,
            max_nan_runs=max_nan_runs_of(self.cfg),
            min_rows=min_group_size,
        )
        timer = Timer()
        limit_s = timeouts.rollout_s if timeouts is not None else None
        try:
            with timer.time("total"):
                async with deadline(limit_s, _TimeIsUp, self._gate):
                    await self._run(dispatch, policy, timer, timer_prefix)
        except _TimeIsUp:
            dispatch.end(f"within rollout_s={limit_s or 0:g} s")
        finally:
            self._totals["rollout/gym_row_redispatch_total"] += dispatch.redispatches
            self._totals["rollout/lp_nan_retry_total"] += dispatch.nan_retries
        return dispatch.results(), _measured(timer, timer_prefix, dispatch)

    async def shut_generation(self) -> None:
        """Have the model servers of the policy ask for nothing more; what they have asked for goes on.

        Raises:
            ConfigError: none of them can be paused.
        """
        self._gate.shut()
        await self._tell_model_servers(PAUSE_PATH, {"is_shut_only": True})

    async def pause_generation(self, grace_s: float = DEFAULT_GRACE_S, *, is_aborted: bool = False) -> None:
        """The same, and return when nothing is generated any more.

        `is_aborted` says that the engine was told to end what it generates, for which that has `grace_s`.
        """
        self._gate.shut()
        await self._tell_model_servers(PAUSE_PATH, {"grace_s": grace_s, "is_aborted": is_aborted})

    async def resume_generation(self, weight_version: int | None = None) -> None:
        """Have the model servers go on, with weights of that version."""
        try:
            await self._tell_model_servers(RESUME_PATH, {"weight_version": weight_version})
        finally:
            self._gate.resume(weight_version)

    async def _tell_model_servers(self, path: str, body: dict[str, Any]) -> None:
        if self._collector is None:
            raise RuntimeError("the servers are not started; call start() first")
        await self._collector.tell_model_servers(path, body)

    def metrics(self) -> dict[str, float]:
        """Counters over the life of this object."""
        return dict(self._totals)

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        """Not how this environment is used: its agents take the steps."""
        raise NotImplementedError("NemoGym runs whole rollouts; call run_rollouts")

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        """Not how this environment is used."""
        raise NotImplementedError("NemoGym reports metrics with each group; call run_rollouts")

    async def _run(self, dispatch: RowDispatch, policy: RolloutRetryPolicy, timer: Timer, prefix: str) -> None:
        """Send every row, a lost one again as soon as its pause is over, until none is pending."""
        assert self._collector is not None
        captured = self._captured
        async with self._collector.sending() as rows_sent:
            rows_sent.send(captured.named(dispatch.owed) if captured else dispatch.owed)
            while dispatch.owed:
                with timer.time(f"{prefix}/await_results"):
                    row, outcome = await self._next(rows_sent.outcomes)
                if isinstance(outcome, Exception):
                    dispatch.failed(row, outcome)
                else:
                    with timer.time(f"{prefix}/postprocess_results"):
                        if captured is not None:
                            await captured.put_onto(row, outcome)
                        dispatch.arrived(row, outcome)
                if dispatch.is_owed(row):
                    losses = dispatch.losses_of(row)
                    pause_s = policy.backoff_s(losses) if losses else 0.0
                    rows_sent.send(captured.named([row]) if captured else [row], pause_s)

    async def _next(self, outcomes: "asyncio.Queue[RowOutcome]") -> RowOutcome:
        """Wait for a rollout, but not for servers of ours that have ended; hosts come and go meanwhile."""
        while True:
            self._poll()
            try:
                async with asyncio.timeout(_POLL_EVERY_S):
                    return await outcomes.get()
            except TimeoutError:
                continue

    def _poll(self) -> None:
        now_s = time.monotonic()
        if self._collector is None or now_s - self._polled_s < _POLL_EVERY_S:
            return
        self._polled_s = now_s
        self._collector.look_for_hosts()
        if self._run_helper is None:
            return
        try:
            self._run_helper.poll()
        except RuntimeError as error:
            raise GymTransportError(f"a server of this run has ended: {error}") from error

    def _postprocess_nemo_gym_to_nemo_rl_result(self, nemo_gym_result: dict[str, Any], tokenizer: Any) -> Any:
        is_counting = isinstance(self, NemoGym)  # trainers' tests call it with an object that has a `cfg` alone
        built = build_message_log(
            nemo_gym_result,
            tokenizer,
            self.cfg.get("invalid_tool_call_patterns"),
            self.cfg.get("thinking_tags"),
            branches=self.cfg.get("branches", True),
            explains=not is_counting or not self._totals["rollout/branched_total"],
        )
        if is_counting and built.get("branches"):
            self._note_branches(built)
        return built

    def _note_branches(self, built: dict[str, Any]) -> None:
        self._totals["rollout/branched_total"] += 1
        if self._totals["rollout/branched_total"] == 1:
            logger.warning(
                "a rollout became %d samples, because its conversation was rewritten on the way (the first such is "
                "shown, all are counted as rollout/branched_total). %s",
                1 + len(built["branches"]),
                built["drift"],
            )


def _measured(timer: Timer, prefix: str, dispatch: RowDispatch) -> dict[str, float]:
    seconds = timer.get_timing_metrics(reduction_op="sum")
    total_s = seconds.pop("total")
    share = 100 * seconds[f"{prefix}/postprocess_results"] / total_s if total_s else 0.0
    return {
        **seconds,
        f"{prefix}/postprocess_results_pct": share,
        "gym_row_redispatches": float(dispatch.redispatches),
        "lp_nan_retries": float(dispatch.nan_retries),
    }
