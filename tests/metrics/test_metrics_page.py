"""The example of docs/metrics.md for metrics of one's own, as a server that is asked over its routes."""

import re
from typing import Any

from fastapi.testclient import TestClient
from omegaconf import OmegaConf

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.metrics.hooks import AggregateMetricsMixin
from nemo_gym.paths import PARENT_DIR
from nemo_gym.server_utils import ServerClient

PAGE = (PARENT_DIR / "docs" / "metrics.md").read_text(encoding="utf-8")


def server() -> SimpleResourcesServer:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "docs/metrics.md", "exec"), names)
    head = BaseServerConfig(host="127.0.0.1", port=1)
    config = BaseResourcesServerConfig(name="words", host="127.0.0.1", port=2, entrypoint="app.py", domain="other")
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    made: SimpleResourcesServer = names["WordsResourcesServer"](config=config, server_client=client)
    return made


def answer(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
    response = {"id": "r", "created_at": 0, "model": "m", "object": "response", "output": [message]}
    choices = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {"responses_create_params": {"input": "Be brief."}, "response": {**response, **choices}}


def test_the_example_adds_its_metrics_to_those_that_every_server_has() -> None:
    texts = {(0, 0): "yes", (0, 1): "yes it is", (1, 0): "no", (1, 1): "that is a long story"}
    with TestClient(server().setup_webserver()) as client:
        verdicts = []
        for (task, rollout), text in texts.items():
            verdict = client.post("/verify", json=answer(text)).json()
            verdicts.append({**verdict, "_ng_task_index": task, "_ng_rollout_index": rollout})
        metrics = client.post("/aggregate_metrics", json={"verify_responses": verdicts}).json()

    assert metrics["key_metrics"] == {"mean/reward": 0.75, "solved_every_time": 0.5, "longest_answer": 5}
    assert metrics["agent_metrics"]["mean/words"] == 2.5
    assert [group["solved_every_time"] for group in metrics["group_level_metrics"]] == [1.0, 0.0]


def test_the_page_has_the_signatures_of_the_hooks() -> None:
    for name, argument in (
        ("compute_metrics", "tasks: list[list[dict[str, Any]]]"),
        ("get_key_metrics", "agent_metrics: dict[str, Any]"),
    ):
        assert f"`{name}(self, {argument}) -> dict[str, Any]`" in PAGE
        assert [*vars(AggregateMetricsMixin)[name].__annotations__] == [argument.partition(":")[0], "return"]
