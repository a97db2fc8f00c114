"""Making rollouts: `ng_collect_rollouts`, `ng_e2e_collect_rollouts`, `ng_slurm`; runs that nobody sits in front of.

`ng_aggregate_rollouts` makes one run of shards, `ng_reverify` has the responses of a run scored again; `gym eval
submit` hands in a job of services and benchmarks.

What leaves its terminal is a process of its own, in a session of its own, with the same arguments; the command that was
typed waits until it has begun, or has said what is wrong, and then says where to find it.
"""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from nemo_gym import runtime
from nemo_gym.cli.command import EXIT_FAILED_RUN, exit_code_of
from nemo_gym.cli.config import whole_config
from nemo_gym.cli.shortcuts import expand
from nemo_gym.cli.show import print_aggregation, print_resume_hint, print_summary, run_and_show, show_plan
from nemo_gym.cli.workloads import SubmitConfig
from nemo_gym.collect.summary import RunSummary
from nemo_gym.errors import ConfigError, GymError
from nemo_gym.executors.base import Job, executor_named, job_writer_named
from nemo_gym.http.addresses import server_names
from nemo_gym.keys import RESOURCES_TYPE
from nemo_gym.paths import append_own, make_folder
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.runs.lock import address_in
from nemo_gym.runs.options import (
    E2ERolloutCollectionConfig,
    RolloutAggregationConfig,
    RolloutCollectionConfig,
    RowOptions,
    words_of,
)
from nemo_gym.runs.options.reverify import RolloutReverificationConfig
from nemo_gym.runs.options.sharding import SlurmConfig
from nemo_gym.runs.sockets import ask, run_id
from nemo_gym.terminal import harmless, harmless_json, print_line

if TYPE_CHECKING:
    from nemo_gym.combine.shard_metrics import MetricsSource

logger = logging.getLogger(__name__)

_PROGRAM = """
import sys
from nemo_gym.cli import entry
entry.become_script()
main = entry.{name}
sys.argv[0] = {script!r}
main()
"""
_BEGUN_WITHIN_S = 20.0
_STEP_S = 0.1
_MOST_LOG_BYTES = 20_000
_ON_END_WITHIN_S = 60.0
_OPTION = "detach"


def collect_rollouts(config: RolloutCollectionConfig) -> int:
    """`ng_collect_rollouts`."""
    if config.plan:
        return show_plan(runtime.run(RolloutCollectionHelper().plan(config)), as_json=config.json_format)
    if config.detach:
        return detach("collect_rollouts", config, sys.argv)

    job = Job(whole_config(), sys.argv)
    run = partial(executor_named(config.executor).collect, config, job)
    return run_and_show(partial(telling_of_end, run, config), job.command, as_json=config.json_format)


def e2e_collect_rollouts(config: E2ERolloutCollectionConfig) -> int:
    """`ng_e2e_collect_rollouts`."""
    if config.plan:
        from nemo_gym.launch.end_to_end import plan_end_to_end  # with FastAPI, which collecting alone does not need

        return show_plan(plan_end_to_end(config, whole_config()), as_json=config.json_format)

    if config.detach:
        return detach("e2e_collect_rollouts", config, sys.argv)

    job = Job(whole_config(), sys.argv, expand(sys.argv[1:], E2ERolloutCollectionConfig))
    run = partial(executor_named(config.executor).collect_prepared, config, job)
    return run_and_show(partial(telling_of_end, run, config), job.command, as_json=config.json_format)


def slurm(config: SlurmConfig) -> None:
    """`ng_slurm`."""
    written = job_writer_named("slurm").write(config, Job(whole_config(), sys.argv))
    for path, text in written.items():
        print(f"# ==> {path}")
        print(text)
    print(f"Submit with: bash {list(written)[-1]}", file=sys.stderr)


def submit(config: SubmitConfig) -> None:
    """`gym eval submit`."""
    from nemo_gym.executors.submission import hand_in, read_submission, sbatch_script  # seldom wanted

    path = Path(config.submission)
    submission = read_submission(path, config.changes)
    script = sbatch_script(submission, path.stem)
    if config.dry_run:
        print(script, end="")
        return
    print(f"Slurm job {hand_in(submission, script)}: {', '.join(submission.benchmarks)}")


async def aggregate_rollouts(config: RolloutAggregationConfig) -> None:
    """`ng_aggregate_rollouts`."""
    from nemo_gym.combine.aggregation import RolloutAggregationHelper, track  # seldom wanted, and not by collectors

    summary = await RolloutAggregationHelper(loader=_classes_from_config_paths).aggregate(config)
    track(summary, whole_config())
    if config.json_format:
        print(json.dumps(summary.as_json()))
    else:
        print_aggregation(summary)


def _classes_from_config_paths() -> "MetricsSource":
    from nemo_gym.launch.offline_metrics import OfflineAgents  # with FastAPI

    return OfflineAgents(whole_config())


def reverify(config: RolloutReverificationConfig) -> int:
    """`ng_reverify`."""
    runtime.raise_open_file_limit()
    whole = whole_config()
    if any(RESOURCES_TYPE in whole[name] for name in server_names(whole)):
        from nemo_gym.launch.end_to_end import reverify_with_servers  # with FastAPI

        summary = reverify_with_servers(config, whole, sys.argv)
    else:
        from nemo_gym.rollout_reverification import RolloutReverificationHelper  # seldom wanted, either

        summary = runtime.run(RolloutReverificationHelper().reverify(config, sys.argv))
    if config.json_format:
        print(harmless_json(orjson.dumps(summary.as_json(), option=orjson.OPT_NON_STR_KEYS).decode()))
    else:
        print_summary(summary.run)
        print_line()
        for line in summary.delta.lines():
            print_line(line)
    print_resume_hint(summary.run, sys.argv)
    return summary.run.exit_code


def detach(name: str, config: RowOptions, command: Sequence[str]) -> int:
    """Have `ng_<name>` with the arguments of `command` go on without this process; the exit code of this one.

    Raises:
        ConfigError: there can be no log.
    """
    log = Path(config.log_fpath) if config.log_fpath else config.paths.log
    try:
        make_folder(log.parent)
        with append_own(log) as file:
            begins = file.tell()
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM.format(name=name, script=command[0]), *_attached(command[1:])],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
    except OSError as error:
        if isinstance(error, GymError):
            raise
        raise ConfigError(f"the log of a detached run, {log}, cannot be written: {error}") from error
    try:
        has_begun = _has_begun(process, config)
    except KeyboardInterrupt:
        process.terminate()
        raise
    if process.poll() is not None:
        _show(log, begins)
        return process.returncode if process.returncode >= 0 else EXIT_FAILED_RUN
    _say_where(config, process.pid, log, has_begun=has_begun)
    return 0


def _attached(arguments: Sequence[str]) -> list[str]:
    """The same arguments without the wish to leave, which a config file may have, too."""
    own = {_OPTION, "log_fpath"}
    kept = [argument for argument in arguments if argument.lstrip("+").partition("=")[0] not in own]
    return kept if len(kept) < len(arguments) else [*kept, f"++{_OPTION}=false", "++log_fpath=null"]


def _has_begun(process: "subprocess.Popen[bytes]", config: RowOptions) -> bool:
    """Whether it collects by now; it may also have ended, or need longer."""
    by_s = time.monotonic() + _BEGUN_WITHIN_S
    while time.monotonic() < by_s and process.poll() is None:
        address = address_in(config.paths)
        if address is not None:
            with suppress(GymError):
                if ask(address, {"do": "status"}).get("pid") == process.pid:
                    return True
        time.sleep(_STEP_S)
    return False


def _show(log: Path, begins: int) -> None:
    """What a process said that is over already."""
    with log.open("rb") as file:
        file.seek(max(begins, log.stat().st_size - _MOST_LOG_BYTES))
        print(harmless(file.read().decode(errors="replace")), end="", file=sys.stderr)


def _say_where(config: RowOptions, pid: int, log: Path, *, has_begun: bool) -> None:
    output = config.paths.rollouts
    if config.json_format:
        where = {"pid": pid, "run": run_id(output), "output_jsonl_fpath": str(output), "log_fpath": str(log)}
        print(json.dumps({**where, "has_begun": has_begun}))
        return
    print_line(f"Process {pid} {'collects' if has_begun else 'prepares to collect'} rollouts into {output}")
    print_line(f"Log: {log}")
    print_line(f"How it is doing: {shlex.join(['ng_attach', f'+run={output}'])}")
    print_line(f"To stop it: {shlex.join(['ng_control', f'+run={output}', '+stop=true'])}")


def telling_of_end(run: Callable[[], RunSummary | None], config: RowOptions) -> RunSummary | None:
    """What `run` returns; when it has ended, in whatever way, the command of `on_end` is told."""
    if config.on_end is None:
        return run()
    try:
        summary = run()
    except BaseException as error:
        what = harmless(str(error)) or type(error).__name__
        ended = {"output_jsonl_fpath": str(config.paths.rollouts), "exit_code": exit_code_of(error), "error": what}
        _tell(config.on_end, ended)
        raise
    if summary is not None:
        _tell(config.on_end, {**summary.as_json(), "error": None})
    return summary


def _tell(command: str, summary: Mapping[str, Any]) -> None:
    """Run a command with `summary` on its stdin; it has a minute, and its failure is one warning."""
    try:
        process = subprocess.Popen(words_of(command), stdin=subprocess.PIPE, stdout=2, start_new_session=True)
    except (OSError, ValueError) as error:
        logger.warning("+on_end could not be run: %s", error)
        return
    content = orjson.dumps(summary, option=orjson.OPT_NON_STR_KEYS, default=str) + b"\n"
    try:
        process.communicate(content, timeout=_ON_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        logger.warning("+on_end did not end within %g s and was ended: %s", _ON_END_WITHIN_S, command)
    else:
        if process.returncode:
            logger.warning("+on_end ended with code %d: %s", process.returncode, command)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
