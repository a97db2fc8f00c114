"""Records that nobody would want to meet, and more of them than anybody would want to read."""

import json
from pathlib import Path

PWN = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>"
CONTROLS = "\x1b[31mred\x1b[0m \u202eabc\u202c"
MARKDOWN = f"# {PWN}\n[x](javascript:window.pwned=1)\n```\n{PWN}\n```"
PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"


def write_hostile(path: Path) -> None:
    """Markup in every field, terminal and bidi controls, halves of surrogates, unknown items, depth, damage."""
    path.parent.mkdir(parents=True)
    deep = "[" * 2000 + "]" * 2000
    output = [
        {"type": "message", "role": PWN, "content": [{"type": "output_text", "text": PWN}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I will not " + PWN}]},
        {"type": "message", "role": "assistant", "status": "incomplete", "content": CONTROLS},
        {"type": "message", "role": "assistant", "content": MARKDOWN},
        {"type": "brand_new_item", PWN: PWN, "n": [1, 2, 3]},
        {"type": "function_call", "name": PWN, "arguments": '{"a": ' + deep + "}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "http://elsewhere.invalid/x.png"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]},
        {"type": "message", "role": "assistant", "content": "long " * 50_000},
        None, 7, "bare", [],
    ]  # fmt: skip
    record = {
        "_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {"name": PWN}, "reward": 0.5, PWN: PWN, "level": PWN,
        "responses_create_params": {"input": PWN, "tools": [{"type": "function", "name": PWN}]},
        "response": {"model": PWN, "output": output, "incomplete_details": {"reason": PWN}},
        "ng_trajectory": {
            "model_calls": [
                {"request": {PWN: PWN}, "response": PWN, "duration_ms": 1500.0, "token_stats": {"prompt_tokens": 3},
                 "response_metadata": {"model": PWN, "model_ref": {"name": PWN}, "error_category": PWN}}, 7,
            ],
            "tool_calls": [{"tool_name": PWN, "status": PWN}, None], "gaps": [{"code": PWN, "detail": PWN}],
        },
    }  # fmt: skip
    lines = [
        json.dumps(record),
        '{"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": NaN, "text": "\\ud800"}',
        '{"_ng_task_index": 2, "_ng_rollout_index": 0, "reward": 1, "response": ' + deep + "}",
        f"this is no record {PWN}",
    ]
    path.write_text("\n".join(lines) + "\n")


def write_many(path: Path, tasks: int) -> None:
    """Two small rollouts for each of many tasks."""
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        for task in range(tasks):
            for repeat in range(2):
                reward = float((task * 7 + repeat) % 5 > 1)
                record = {
                    "_ng_task_index": task,
                    "_ng_rollout_index": repeat,
                    "agent_ref": {"name": "a"},
                    "reward": reward,
                }
                file.write(json.dumps(record) + "\n")
