"""The reference of the files of a run, from the classes that name, write and read them."""

import inspect
from pathlib import Path

from docs.site.fields import fields_table
from docs.site.markdown import code, escaped, page, table
from nemo_gym import keys
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.runs import record
from nemo_gym.runs.files import RolloutPaths
from nemo_gym.runs.manifest import RunManifest
from nemo_gym.schemas.aggregate_metrics import AggregateMetrics
from nemo_gym.token_id_capture.delivery import TOKEN_CAPTURE_KEY

FOLDER = "reference"
_OF_RESULTS = {
    keys.TASK_INDEX_KEY_NAME: "which task; equal rows are one task",
    keys.ROLLOUT_INDEX_KEY_NAME: "which of the rollouts of that task, from 0",
    keys.AGENT_REF_KEY_NAME: "the agent that made it: `name`, and `type`",
    keys.ATTEMPT_INDEX_KEY_NAME: "which attempt, where the row says so",
    keys.ROLLOUT_ID_KEY_NAME: "a name for the rollout, where the row brings one",
}
_OF_FAILURES = {
    record.NG_FAILURE_CLASS_KEY: "what kind of failure: [the classes](../troubleshooting.md#failure-classes)",
    record.FAILURE_MESSAGE_KEY: f"what was said, at most {record.MAX_FAILURE_MESSAGE_LENGTH} characters",
    record.FAILURE_STATUS_KEY: "the HTTP status of the innermost failure, or null",
    record.FAILURE_SERVER_KEY: "the server in which it happened, or null",
    record.COUNTS_AS_ATTEMPT_KEY: "false when it does not count towards `max_attempts`",
    "_ng_partial_response": "what the agent had of the response by then, at most 1 MB",
    "_ng_items_left_out": "how many items at the end of that are missing",
    "_ng_failure_judge_error": "what the judge said, where it was the judge that failed",
    record.NG_TERMINAL_KEY: "true when it is never to be tried again; agents say so",
    record.PARTIAL_RESPONSE_KEY: "what the agent had of the response by then, where it says so, at most 1 MB",
    record.FAILED_IN_KEY: "`verify` when that response is whole and only its verdict is missing",
    keys.USAGE_KEY_NAME: "tokens that model servers counted, where that response has no `usage`",
    record.STARTED_AT_KEY: "when the attempt began, ISO 8601 in UTC",
    record.ENDED_AT_KEY: "when it ended",
}


_OF_ROLLOUTS = {
    keys.TIMING_KEY_NAME: "start, duration and calls of the rollout: [Collecting rollouts](../collecting-rollouts.md)",
}
_OF_ROLLOUTS[keys.USAGE_KEY_NAME] = (
    "tokens that model servers counted, where the agent's response has no `usage`, and `counted_before` if only the "
    "verdict is new, so that the tokens are in the line of a failed attempt: [Spending wisely](../guides/spending.md)"
)
_OF_ROLLOUTS[record.PREVIOUS_VERDICT_KEY] = (
    "what the record said before it was scored again: [Scoring again](../scoring-again.md)"
)
_OF_ROLLOUTS[TOKEN_CAPTURE_KEY] = (
    "what was captured of the calls of an agent that knows no tokens, and why it cannot be trusted: "
    "[Feeding a trainer](../training.md)"
)
_NEVER_WRITTEN = {
    record.NG_NO_PERSIST_KEY: "an answer with it leaves no trace; the rollout runs again when the run is resumed",
}


def pages() -> dict[str, str]:
    """Path and text of the page."""
    return {f"{FOLDER}/file-formats.md": _page()}


def _page() -> str:
    return page(
        "# File formats",
        "A run writes several files, all named after its `+output_jsonl_fpath`. With "
        "`+output_jsonl_fpath=results/rollouts.jsonl`:",
        table(("File", "Holds"), _files()),
        "A file that ends in `.jsonl` has one JSON object per line, in UTF-8, each written whole. How rows may be "
        "given in other formats is explained in [Data sets and benchmarks](../data.md).",
        "## A row",
        "One task, as it is given to the collector. Fields beyond these are for the verifier: each environment names "
        "its own ([gallery](../gallery/index.md)).",
        fields_table(BaseRunRequest),
        "## A materialized input",
        "A row as it is sent to the agent: its prompt filled in, the parameters of the command laid over it, and",
        table(("Key", "Meaning"), ((code(key), meaning) for key, meaning in _OF_RESULTS.items())),
        "There is one line for every rollout that the run owes.",
        "## A rollout",
        "What the agent answered: the row, the model's whole response and the verdict, with the same keys as the row "
        "it belongs to. Environments add fields of their own.",
        fields_table(BaseVerifyResponse),
        table(("Key", "Meaning"), ((code(key), meaning) for key, meaning in _OF_ROLLOUTS.items())),
        "## A failure",
        "One line per failed attempt. It never has a reward.",
        table(("Key", "Meaning"), ((code(key), meaning) for key, meaning in {**_OF_FAILURES, **_OF_RESULTS}.items())),
        "Agents may answer with one key that is in no file:",
        table(("Key", "Meaning"), ((code(key), meaning) for key, meaning in _NEVER_WRITTEN.items())),
        "## Metrics",
        "A list with one object per agent: `agent_ref`, `coverage` ([Metrics](../metrics.md#coverage)) and",
        fields_table(AggregateMetrics),
        "## The manifest",
        "One object. Secrets are masked.",
        fields_table(RunManifest),
    )


def _files() -> list[tuple[str, str]]:
    paths = RolloutPaths(Path("rollouts.jsonl"))
    rows = [("`rollouts.jsonl`", "One line per finished rollout, as they finish.")]
    for name, value in vars(RolloutPaths).items():
        path = getattr(paths, name) if isinstance(value, property) else None
        if isinstance(path, Path):  # others say something about all of them
            rows.append((f"`{path.name}`", escaped(inspect.getdoc(value) or "")))
    return rows
