"""The collector's side: clear what earlier attempts left, and make one conversation of what a rollout's calls left."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body
from nemo_gym.token_id_capture.builder import BuildOutput, project_main_chain_response, run_builder
from nemo_gym.token_id_capture.config import TokenCaptureConfigError, token_id_capture_config
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot, TokenSource, installed_token_source
from nemo_gym.token_id_capture.store import TokenCaptureStore, make_token_store

__all__ = [
    "CollectorSource",
    "clear_token_captures_for_rollouts",
    "collector_token_source",
    "token_id_capture_dirs_from_config",
    "trajectories_for_rollout",
    "trajectories_from_source",
]

SNAPSHOT_KEY = "_capture_snapshot"
NO_RECORDS = "capture contains no token records"


class CollectorSource(NamedTuple):
    """Where a collector finds entries."""

    source: TokenSource
    is_own: bool
    """It was opened for the collector, which closes it; an installed one is its owner's."""


def collector_token_source(global_config_dict: Any) -> CollectorSource | None:
    """Where the collector of a run finds entries; None when results are not to be rebuilt.

    Raises:
        TokenCaptureConfigError: they are, and there is no place to find them in.
    """
    config = token_id_capture_config(global_config_dict)
    if not config.enabled or not config.token_id_capture.rebuild_response:
        return None
    installed = installed_token_source()
    if installed is not None:
        return CollectorSource(installed, is_own=False)
    store = make_token_store(global_config_dict)
    if store is None:
        raise TokenCaptureConfigError(
            "token_id_capture is to rebuild responses, but there is no token source in the rollout-collector process: "
            "set token_id_capture.dir, or call install_token_source there"
        )
    return CollectorSource(store, is_own=True)


def token_id_capture_dirs_from_config(global_config_dict: Any) -> list[Path]:
    """The folders with files of a run; none when nothing is kept, or not in files."""
    store = make_token_store(global_config_dict)
    return [] if store is None else [store.root]


def clear_token_captures_for_rollouts(records: Iterable[Any], token_capture_dirs: Sequence[Path]) -> None:
    """Delete what earlier attempts at these rows left; rows that name no rollout are passed over."""
    stores = [TokenCaptureStore(folder) for folder in token_capture_dirs]
    if not stores:
        return
    for record in records:
        rollout_id = maybe_rollout_id_from_run_body(record)
        for store in stores if rollout_id else ():
            store.delete(str(rollout_id))


def trajectories_for_rollout(
    rollout_id: str, token_capture_dirs: Sequence[Path], *, builder: str = "prefix_merging", model: str = ""
) -> dict[str, Any] | None:
    """What the files of a rollout amount to; None when there are none."""
    for folder in token_capture_dirs:
        store = TokenCaptureStore(folder)
        kept = (store.path_for(rollout_id), store.state_path_for(rollout_id), store.intents_path_for(rollout_id))
        if any(path.exists() for path in kept):
            return _built(store.freeze_now(rollout_id), builder, model)
    return None


async def trajectories_from_source(
    rollout_id: str, source: TokenSource, *, builder: str = "prefix_merging", model: str = ""
) -> dict[str, Any] | None:
    """What a source holds of a rollout, rebuilt.

    Raises:
        Exception: whatever the source raised.
    """
    return _built(await source.freeze(rollout_id), builder, model)


def _built(snapshot: TokenCaptureSnapshot, builder: str, model: str) -> dict[str, Any]:
    out = BuildOutput(chains=[])
    response, error = None, None
    try:
        if not snapshot.entries:
            raise ValueError(NO_RECORDS)
        out = run_builder(list(snapshot.entries), builder)
        response = project_main_chain_response(snapshot.rollout_id, out, model)
    except ValueError as failure:
        error = str(failure)
    notes = out.notes
    is_doubtful = bool(notes.unresolved_retries or out.quarantined) or notes.roots != 1 or notes.chains != 1
    return {
        "rollout_id": snapshot.rollout_id,
        "builder": builder,
        "rebuilt_response": response,
        "mask_sample": error is not None or is_doubtful or snapshot.incomplete,
        "metrics": _metrics(snapshot, out),
        "unresolved_retries": notes.unresolved_retries,
        SNAPSHOT_KEY: {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version},
        **({} if error is None else {"error": error}),
    }


def _metrics(snapshot: TokenCaptureSnapshot, out: BuildOutput) -> dict[str, Any]:
    notes: Mapping[str, Any] = asdict(out.notes)
    calls = len(snapshot.entries)
    counted = ("chains", "roots", "delivered_fraction", "generated_tokens_captured", "generated_tokens_delivered")
    return {
        "n_calls": calls,
        **{key: notes[key] for key in counted},
        "quarantined_calls": len(out.quarantined),
        "quarantined_fraction": len(out.quarantined) / calls if calls else 0.0,
        "empty_generation_calls": len(out.notes.empty_generation_calls),
        **({"capture_incomplete": True} if snapshot.incomplete else {}),
    }
