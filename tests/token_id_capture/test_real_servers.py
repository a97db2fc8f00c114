"""Runs whose agent is a program of its own that knows an address and nothing else, with the real commands."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from responses_api_models.token_model.chat_tokenizer import ChatTokenizer
from responses_api_models.token_model.tests.stand_in import StandInEngine, serving, tokenizer_folder, tool_user
from tests.collection.fakes import lines_in, write_rows
from tests.programs import run_program

ENVIRONMENT = """
    from nemo_gym.base_resources_server import (
        BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer,
    )
    from pydantic import ConfigDict

    class Asked(BaseVerifyRequest):
        model_config = ConfigDict(extra="allow")

    class Told(BaseVerifyResponse):
        model_config = ConfigDict(extra="allow")

    class Lenient(SimpleResourcesServer):
        config: BaseResourcesServerConfig

        async def verify(self, body: Asked) -> Told:
            return Told(**body.model_dump(), reward=1.0)

    if __name__ == "__main__":
        Lenient.run_webserver()
"""
AGENT = """
    import asyncio
    import json
    import sys
    from pathlib import Path

    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
    from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
    from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
    from nemo_gym.server_utils import get_response_json, get_server_url, raise_for_status
    from pydantic import ConfigDict

    class Config(BaseResponsesAPIAgentConfig):
        model_server: ModelServerRef
        resources_server: ResourcesServerRef

    class Row(BaseRunRequest):
        model_config = ConfigDict(extra="allow")

    class Verdict(BaseVerifyResponse):
        model_config = ConfigDict(extra="allow")

    class BlackBox(SimpleResponsesAPIAgent):
        config: Config

        async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
            raise NotImplementedError

        async def run(self, body: Row) -> Verdict:
            root = self.base_url_for_run(get_server_url(self.config.model_server.name), body)
            harness = await asyncio.create_subprocess_exec(
                sys.executable, str(Path(__file__).with_name("harness.py")), root, body.model_extra["how"],
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await harness.communicate()
            if harness.returncode:
                raise RuntimeError("the harness failed")
            part = {"type": "output_text", "text": json.loads(out), "annotations": []}
            message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
            said = NeMoGymResponse(id="r", created_at=0, model="any", object="response", output=[message])
            if body.model_extra["how"] == "fails once" and not body.model_extra.get("_ng_attempt_index"):
                raise RuntimeError("not this time")
            answer = await self.server_client.post(
                server_name=self.config.resources_server.name, url_path="/verify",
                json={**body.model_dump(), "response": said.model_dump()},
            )
            await raise_for_status(answer)
            return Verdict.model_validate({**await get_response_json(answer), "base_url": root})

    if __name__ == "__main__":
        BlackBox.run_webserver()
"""
HARNESS = """
    # Knows an address, and sends back roles, texts and calls of tools.
    import json
    import sys
    import urllib.error
    import urllib.request

    root, how = sys.argv[1:]

    def post(path, body):
        request = urllib.request.Request(root + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=100) as answer:
            return json.load(answer)

    def chat(question):
        schema = {"type": "object", "properties": {}}
        tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
        messages = [{"role": "user", "content": question}]
        while True:
            said = post("/v1/chat/completions", {"messages": messages, "tools": tools})["choices"][0]["message"]
            messages.append({key: said[key] for key in ("role", "content", "tool_calls") if said.get(key) is not None})
            if not said.get("tool_calls"):
                return said["content"]
            for call in said["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a room"})

    def anthropic(question):
        tools = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
        messages = [{"role": "user", "content": question}]
        while True:
            body = {"model": "any", "max_tokens": 200, "messages": messages, "tools": tools}
            said = post("/v1/messages", body)["content"]
            messages.append({"role": "assistant", "content": said})
            calls = [block["id"] for block in said if block["type"] == "tool_use"]
            if not calls:
                return said[0]["text"]
            results = [{"type": "tool_result", "tool_use_id": call, "content": "a room"} for call in calls]
            messages.append({"role": "user", "content": results})

    def refused(path, body=None):
        try:
            request = urllib.request.Request(root + path, body, {"content-type": "application/json"})
            urllib.request.urlopen(request, timeout=100)
        except urllib.error.HTTPError:
            return
        raise SystemExit("not refused")

    refused("/v1/models")
    text = anthropic("What is there?") if how == "messages" else chat("What is there?")
    if how == "two":
        chat("And what does a sub-agent see?")
    if how == "elsewhere":
        refused("/v1/embeddings", b"{}")
    print(json.dumps(text))
"""
ASKED = {"input": [{"role": "user", "content": "What is there?"}]}
HOWS = ("chat", "messages", "two", "elsewhere", "fails once")
Records = dict[str, dict[str, Any]]


def write_run(root: Path, engine: str) -> None:
    """The servers of a run, and its rows: one for each way to go about it."""
    written = {
        "resources_servers/lenient/app.py": ENVIRONMENT,
        "responses_api_agents/black_box/app.py": AGENT,
        "responses_api_agents/black_box/harness.py": HARNESS,
    }
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        (path.parent / "requirements.txt").touch()
    agent = {
        "entrypoint": "app.py",
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "resources_server": {"type": "resources_servers", "name": "lenient"},
        "token_id_capture": True,
    }
    data = {
        name: [{"name": name, "type": "example", "jsonl_fpath": str(root / f"{name}.jsonl")}]
        for name in ("black_box", "simple_agent")
    }
    model = {
        "entrypoint": "app.py",
        "base_url": f"{engine}/v1",
        "api_key": "key",
        "model": "m",
        "tokenizer": str(tokenizer_folder(root / "tokenizer")),
    }
    config = {
        "policy_model": {"responses_api_models": {"token_model": model}},
        "lenient": {"resources_servers": {"lenient": {"entrypoint": "app.py", "domain": "other"}}},
        **{name: {"responses_api_agents": {name: {**agent, "datasets": data[name]}}} for name in data},
    }
    (root / "servers.yaml").write_text(yaml.safe_dump(config))
    write_rows(root / "black_box.jsonl", [{"responses_create_params": ASKED, "how": how} for how in HOWS])
    write_rows(root / "simple_agent.jsonl", [{"responses_create_params": ASKED, "how": "simple"}])


def run(root: Path, *options: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NEMO_GYM", "WANDB"))}
    command = ("ng_e2e_collect_rollouts", "+config_paths=[servers.yaml]", "+split=example", "+head_server.port=0")
    return run_program(
        *command, "+output_jsonl_fpath=out.jsonl", *options, folder=root, environment=environment, timeout=240
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokenizer = ChatTokenizer(tokenizer_folder(tmp_path_factory.mktemp("engine")))
    with serving(StandInEngine(tokenizer, tool_user("look", "{}", rounds=2, thinks=False)).app()) as address:
        yield address


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, engine: str) -> tuple[Path, Records, str]:
    root = tmp_path_factory.mktemp("captured")
    write_run(root, engine)
    options = ("+token_id_capture.enabled=true", f"+token_id_capture.dir={root / 'tokens'}", "+max_attempts=2")
    ended = run(root, *options)
    assert ended.returncode == 0, ended.stderr
    return root, {record["how"]: record for record in lines_in(root / "out.jsonl")}, ended.stderr


def names_in(folder: Path, rollout_id: str) -> set[str]:
    return {path.name.removeprefix(f"{rollout_id}.tokens.") for path in folder.glob(f"{rollout_id}.tokens.*")}


@pytest.mark.parametrize(("how", "rollout_id"), [("chat", "0-0"), ("messages", "1-0"), ("fails once", "4-0-a1")])
def test_one_conversation_is_in_the_record_with_its_ids_and_what_was_kept_is_forgotten(
    collected: tuple[Path, Records, str], how: str, rollout_id: str
) -> None:
    root, records, _ = collected
    record = records[how]
    assert record["base_url"].endswith(f"/ng-rollout/{rollout_id}/training-token-capture")
    assert "mask_sample" not in record
    output = record["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call", "message"]
    seen: list[int] = []
    for item in output:
        assert item["prompt_token_ids"][: len(seen)] == seen
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
    assert record["_ng_token_capture"]["n_calls"] == 3
    assert record["_ng_token_capture"]["delivered_fraction"] == 1.0
    assert names_in(root / "tokens", rollout_id) == {"state.json", "lock"}


@pytest.mark.parametrize(
    ("how", "rollout_id", "reason"),
    [("two", "2-0", "2 conversations"), ("elsewhere", "3-0", "was not kept")],
)
def test_what_is_in_doubt_is_masked_and_scored_all_the_same(
    collected: tuple[Path, Records, str], how: str, rollout_id: str, reason: str
) -> None:
    root, records, told = collected
    record = records[how]
    assert (record["mask_sample"], record["reward"]) == (True, 1.0)
    assert reason in record["_ng_token_capture"]["error"]
    assert f"rollout {rollout_id} is marked for masking" in told
    assert "jsonl" in names_in(root / "tokens", rollout_id)


def test_a_failed_attempt_is_no_masked_one_and_keeps_what_it_left(collected: tuple[Path, Records, str]) -> None:
    root, _, _ = collected
    (failure,) = lines_in(root / "out_failures.jsonl")
    assert failure["_ng_task_index"] == HOWS.index("fails once")
    assert "mask_sample" not in failure
    assert "jsonl" in names_in(root / "tokens", "4-0")


def test_an_agent_that_reports_token_ids_is_left_alone_and_what_was_kept_is_forgotten(
    collected: tuple[Path, Records, str],
) -> None:
    root, records, _ = collected
    record = records["simple"]
    assert record["response"]["output"][-1]["generation_token_ids"]
    assert record.keys().isdisjoint({"mask_sample", "_ng_token_capture"})
    assert names_in(root / "tokens", f"{len(HOWS)}-0") == {"state.json", "lock"}


def test_too_many_masked_rollouts_end_the_run_and_a_resumed_one_makes_the_rest(tmp_path: Path, engine: str) -> None:
    write_run(tmp_path, engine)
    hows = ("two", "chat", "chat", "chat")
    rows = [{"responses_create_params": ASKED, "how": how, "number": number} for number, how in enumerate(hows)]
    write_rows(tmp_path / "black_box.jsonl", rows)
    write_rows(tmp_path / "simple_agent.jsonl", [])
    options = ("+token_id_capture.enabled=true", f"+token_id_capture.dir={tmp_path / 'tokens'}")
    limits = ("+token_id_capture.max_mask_fraction=0.1", "+token_id_capture.mask_fraction_min_samples=1")
    ended = run(tmp_path, *options, *limits, "+num_samples_in_parallel=1")
    assert ended.returncode == 1, ended.stderr
    assert "1 of 1 rollouts are masked" in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr
    begun = lines_in(tmp_path / "out.jsonl")
    assert begun[0]["mask_sample"] is True
    assert len(begun) < len(rows)

    (tmp_path / "tokens" / "3-0.tokens.jsonl").write_text("left by a run that was killed\n")
    ended = run(tmp_path, *options, "+resume_from_cache=true")
    assert ended.returncode == 0, ended.stderr
    records = lines_in(tmp_path / "out.jsonl")
    is_masked = {record["number"]: "mask_sample" in record for record in records}
    assert (len(records), is_masked) == (4, {0: True, 1: False, 2: False, 3: False})


def test_without_it_nothing_is_kept_and_paths_are_plain(tmp_path: Path, engine: str) -> None:
    write_run(tmp_path, engine)
    ended = run(tmp_path, "+limit=1", f"+token_id_capture.dir={tmp_path / 'tokens'}")
    assert ended.returncode == 0, ended.stderr
    (record,) = lines_in(tmp_path / "out.jsonl")
    assert "/ng-rollout/" not in record["base_url"]
    assert "generation_token_ids" not in json.dumps(record)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["+token_id_capture.enabled=true"], "token_id_capture requires a directory or sink"),
        (["+token_id_capture.enabled=true", "+token_id_capture.dir=tokens"], "it must be an absolute path"),
    ],
)
def test_a_run_without_a_place_for_them_is_refused(tmp_path: Path, engine: str, options: list[str], words: str) -> None:
    write_run(tmp_path, engine)
    ended = run(tmp_path, *options)
    assert ended.returncode == 2, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
