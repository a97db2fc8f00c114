"""Which calls are the same: what a recording is asked for, what it answers, and what it never holds."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.recording.files import DamagedRecordingError, Index, MissingCallError, call_files, read_call, scan
from nemo_gym.recording.recorder import Recorder, shaping_settings, whole_request
from nemo_gym.recording.requests import asked
from nemo_gym.rollout_correlation import begin_rollout, current_execution, leave_rollout, rollout_context
from nemo_gym.schemas.server_config import RecordingConfig, RecordingMode
from responses_api_models.openai_model.app import OpenAIModelConfig
from responses_api_models.vllm_model.app import VLLMModelConfig

CALL = {"type": "function_call", "name": "look", "arguments": "{}", "status": "completed"}


def request(text: Any = "hello", **fields: Any) -> NeMoGymResponseCreateParamsNonStreaming:
    return NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": text, **fields})


def recorder(folder: Path, mode: str, *, server: str = "policy", **settings: Any) -> Recorder:
    return Recorder(RecordingConfig(folder=str(folder), mode=RecordingMode(mode)), server, {"model": "m", **settings})


def record(folder: Path, *answers: tuple[str | None, str, str], **settings: Any) -> None:
    """Each answer with the rollout and the text it is the answer to."""
    keeping = recorder(folder, "record", **settings)
    for rollout_id, text, answer in answers:
        with rollout_context(rollout_id, f"once {rollout_id}"):
            call = keeping.call("responses", request(text))
            assert keeping.find(call) is None
            keeping.keep(call, answer.encode())
    keeping.close()


def ask(replaying: Recorder, text: str = "hello", rollout_id: str | None = "0-0", execution: str = "x") -> str | None:
    with rollout_context(rollout_id, execution):
        found = replaying.find(replaying.call("responses", request(text)))
    return None if found is None else found.decode()


def test_equal_calls_of_a_rollout_are_answered_in_their_order_and_those_of_others_are_others(tmp_path: Path) -> None:
    record(tmp_path, ("0-0", "hello", "a"), ("0-0", "hello", "b"), ("0-0", "bye", "c"), ("0-1", "hello", "d"))
    replaying = recorder(tmp_path, "replay")

    assert [
        ask(replaying),
        ask(replaying, "bye"),
        ask(replaying),
        ask(replaying, rollout_id="0-1", execution="y"),
    ] == list("acbd")
    with pytest.raises(
        MissingCallError, match=r"call 4 of rollout 0-0 .responses. is not in .*: it has only 2 calls equal to it"
    ):
        ask(replaying)
    with pytest.raises(MissingCallError, match=r"call 1 of rollout 7-0 .* no call of this rollout is"):
        ask(replaying, rollout_id="7-0", execution="z")


def test_calls_that_end_together_are_recorded_when_they_go_on_and_who_is_cancelled_is_not(tmp_path: Path) -> None:
    keeping = recorder(tmp_path, "record")

    async def asked_by(rollout_id: str, *texts: str) -> None:
        for number, text in enumerate(texts):
            with rollout_context(rollout_id, rollout_id), keeping.together:
                call = keeping.call("responses", request(text))
                await asyncio.sleep(0)
                await keeping.kept(call, f"{rollout_id} {number}".encode())
            (path,) = call_files(tmp_path)
            assert read_call(path, scan(path).frames[-1]).response.endswith(str(number).encode())

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(asked_by(f"0-{each}", "hello", "hello", "bye")) for each in range(3)]
        gone = asyncio.create_task(asked_by("0-9", "hello"))
        with keeping.together:  # one more, which does not end
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(*tasks)
        assert gone.cancelled()

    asyncio.run(all_of_them())
    keeping.close()
    replaying = recorder(tmp_path, "replay")
    for each in range(3):
        texts = ["bye", "hello", "hello"]
        answers = [ask(replaying, text, f"0-{each}", f"again {each}") for text in texts]
        assert answers == [f"0-{each} {number}" for number in (2, 0, 1)]
    with pytest.raises(MissingCallError, match="no call of this rollout is"):
        ask(replaying, rollout_id="0-9", execution="z")


def test_what_waits_to_be_recorded_when_a_server_stops_is_recorded(tmp_path: Path) -> None:
    keeping = recorder(tmp_path, "record")

    async def stopped() -> None:
        with keeping.together, keeping.together:
            waiting = asyncio.create_task(keeping.kept(keeping.call("responses", request()), b"a"))
            await asyncio.sleep(0)
            keeping.close()
            await waiting

    asyncio.run(stopped())

    assert ask(recorder(tmp_path, "replay"), rollout_id=None) == "a"


def test_a_rollout_that_is_worked_on_again_begins_anew(tmp_path: Path) -> None:
    record(tmp_path, ("0-0", "hello", "a"))
    replaying = recorder(tmp_path, "replay")

    assert ask(replaying, execution="first run") == "a"
    assert ask(replaying, execution="second run") == "a"
    assert ask(replaying, rollout_id="0-0-a1", execution="second attempt") == "a"


def test_of_several_attempts_at_a_rollout_the_last_is_replayed(tmp_path: Path) -> None:
    record(tmp_path, ("0-0", "hello", "of the one that failed"))
    record(tmp_path, ("0-0-a1", "hello", "of the one that did not"))

    assert ask(recorder(tmp_path, "replay")) == "of the one that did not"


def test_auto_asks_only_for_what_is_missing_and_keeps_it(tmp_path: Path) -> None:
    record(tmp_path, ("0-0", "hello", "a"))
    both = recorder(tmp_path, "auto")
    assert ask(both) == "a"
    with rollout_context("0-0", "x"):
        call = both.call("responses", request())
        assert both.find(call) is None
        both.keep(call, b"b")

    assert ask(both, execution="again") == "a"
    assert ask(both, execution="again") == "b"
    both.close()
    assert [ask(replaying := recorder(tmp_path, "replay")), ask(replaying)] == ["a", "b"]


def test_callers_without_an_identity_are_sample_0_which_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(tmp_path, (None, "hello", "a"), (None, "hello", "b"))

    assert caplog.text.count("counts as sample 0") == 1
    replaying = recorder(tmp_path, "replay")
    assert [ask(replaying, rollout_id=None), ask(replaying, rollout_id=None)] == ["a", "b"]


def test_an_answer_in_which_the_model_failed_is_not_kept(tmp_path: Path) -> None:
    keeping = recorder(tmp_path, "record")
    keeping.keep(keeping.call("responses", request()), b"{}", SimpleNamespace(error={"code": "server_error"}))

    assert call_files(tmp_path) == []


def test_a_damaged_call_is_asked_for_again_by_auto_and_named_by_replay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(tmp_path, ("0-0", "hello", "a"))
    (path,) = call_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    with pytest.raises(DamagedRecordingError, match=f"{path.name}, offset 0"):
        ask(recorder(tmp_path, "replay"))
    assert ask(recorder(tmp_path, "auto")) is None
    assert f"{path.name}, offset 0" in caplog.text
    assert "the recording is damaged" not in caplog.text  # the heads are whole, and what they tell of is not read yet

    data[8] ^= 1
    path.write_bytes(data)
    recorder(tmp_path, "auto")
    assert f"the recording is damaged: {path}, offset 0: the head of a call is damaged" in caplog.text


def test_settings_that_shape_answers_count_and_others_do_not(tmp_path: Path) -> None:
    address = {"host": "h", "port": 1, "entrypoint": "app.py", "name": "policy"}
    openai = OpenAIModelConfig(
        **address,
        openai_base_url="http://somewhere/v1",
        openai_api_key="secret",
        openai_model="m",
        openai_default_headers={"x-key": "secret"},
        max_concurrent_requests=3,
        extra_body={"seed": 1, "api_key": "secret"},
        recording=RecordingConfig(folder="somewhere", mode=RecordingMode.AUTO),
    )
    vllm = VLLMModelConfig(
        **address,
        base_url=["http://a/v1", "http://b/v1"],
        api_key="secret",
        model="m",
        return_token_id_information=True,
        uses_reasoning_parser=False,
        session_ttl_s=5,
    )

    shaping = shaping_settings(openai, openai.UNRELATED_TO_ANSWERS | {"max_concurrent_requests"})
    assert shaping == {"openai_model": "m", "extra_body": {"seed": 1, "api_key": "****"}}
    assert shaping_settings(vllm, vllm.UNRELATED_TO_ANSWERS) == {
        "model": "m",
        "return_token_id_information": True,
        "uses_reasoning_parser": False,
    }
    record(tmp_path, ("0-0", "hello", "a"), temperature=0.5)
    with pytest.raises(MissingCallError, match=r"setting temperature was 0.5 when it was recorded and is 0.7 now"):
        ask(recorder(tmp_path, "replay", temperature=0.7))


def test_a_missing_call_is_told_by_its_first_difference(tmp_path: Path) -> None:
    record(tmp_path, ("0-0", "The quick brown fox jumps over the lazy dog, and over the cat, too. 1", "a"))
    said = r"request.input was '….* too. 1' when it was recorded and is '….* too. 2' now\. Record it with"
    with pytest.raises(MissingCallError, match=said):
        ask(recorder(tmp_path, "replay"), "The quick brown fox jumps over the lazy dog, and over the cat, too. 2")


def test_a_recording_of_nothing_or_of_others_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no recorded calls of this server to replay; record them"):
        recorder(tmp_path, "replay")
    record(tmp_path, ("0-0", "hello", "a"), server="judge")
    with pytest.raises(ConfigError, match="only calls of other servers"):
        recorder(tmp_path, "replay")


def key_bytes(**fields: Any) -> bytes:
    return asked(request(**fields), "responses").digest


def conversation(call_id: str, output: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "go"},
        {**CALL, "id": f"fc_{call_id}", "call_id": call_id},
        {"type": "function_call_output", "call_id": call_id, "output": output},
    ]


def test_generated_ids_and_times_do_not_tell_requests_apart() -> None:
    first = conversation("call_1", "at 2026-01-02T03:04:05.678Z in 0f8fad5b-d9cb-469f-a165-70867728950e")
    other = conversation("call_zX9", "at 2027-11-12 13:14:15+02:00 in 7c9e6679-7425-40de-944b-e07fc1f90ae7")
    assert key_bytes(text=first) == key_bytes(text=other)
    times = [conversation("c", f"at {time}") for time in ("2026-01-02T03:04:05Z", "2027-11-12 13:14:15,5")]
    assert key_bytes(text=times[0]) == key_bytes(text=times[1])
    hexadecimal = [conversation("c", f"session {digits * 8}") for digits in ("0a1b", "9f8e")]
    assert key_bytes(text=hexadecimal[0]) == key_bytes(text=hexadecimal[1])


def test_what_the_ids_say_does_tell_them_apart() -> None:
    one, two = conversation("a", "x"), conversation("a", "x")
    two[2]["call_id"] = "another"
    assert key_bytes(text=one) != key_bytes(text=two)
    for left, right in (("on 2026-01-02", "on 2026-01-03"), ("12:30", "12:31"), ("#0", "#1"), ("deadbeef", "cafe")):
        assert key_bytes(text=conversation("a", left)) != key_bytes(text=conversation("a", right))
    assert key_bytes(prompt={"id": "pmpt_1"}) != key_bytes(prompt={"id": "pmpt_2"})


def test_what_is_left_out_and_what_has_its_default_are_the_same() -> None:
    assert key_bytes() == key_bytes(temperature=None, tools=[], metadata=None)
    assert key_bytes(temperature=0.5) != key_bytes(temperature=0.6)
    tools = [
        {"type": "function", "name": "f", "strict": True, "parameters": parameters}
        for parameters in ({"type": "object", "properties": {}}, {"properties": {}, "type": "object"})
    ]
    assert key_bytes(tools=tools[:1]) == key_bytes(tools=tools[1:])


def test_an_answer_that_is_read_again_asks_for_the_same_as_the_first_time() -> None:
    """What only one of them says about itself must not matter: one was validated from a dict, one from our JSON."""
    given = {"id": "m", "role": "assistant", "type": "message", "content": [], "status": "completed"}
    response = NeMoGymResponse.model_validate(
        {
            "id": "r",
            "created_at": 1.0,
            "model": "m",
            "object": "response",
            "output": [given],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
    )
    again = NeMoGymResponse.model_validate_json(response.model_dump_json())
    first, second = (NeMoGymResponseCreateParamsNonStreaming(input=[*each.output]) for each in (response, again))
    assert asked(first, "responses").digest == asked(second, "responses").digest


def test_what_a_request_adds_to_the_one_before_is_recorded_and_put_together_again(tmp_path: Path) -> None:
    keeping = recorder(tmp_path, "auto")
    items = conversation("c1", "x")
    first = request(items, temperature=0.5)
    longer = first.model_copy(update={"input": [*first.input, *request(conversation("c2", "y")).input]})
    others = request([*items, {"role": "user", "content": "else"}], temperature=0.6)
    calls = []
    with rollout_context("0-0", "x"):
        for body in (first, longer, others):
            calls.append(keeping.call("responses", body))
            keeping.keep(calls[-1], b"{}")
    keeping.close()

    assert [call.asked.items_before for call in calls] == [0, 3, 0]
    (path,) = call_files(tmp_path)
    index = Index(tmp_path)
    requests = [whole_request(index, read_call(path, frame).about) for frame in scan(path).frames]
    assert [len(each["input"]) for each in requests] == [3, 6, 4]
    assert [each["temperature"] for each in requests] == [0.5, 0.5, 0.6]
    assert requests[1]["input"][:3] == requests[0]["input"]
    assert requests[1]["input"][5]["output"] == "y"


def test_a_request_has_one_digest_whatever_came_before_it() -> None:
    first = request(conversation("c1", "x"))
    longer = first.model_copy(update={"input": [*first.input, *request(conversation("c1", "y")).input]})
    alone = asked(longer, "responses")

    assert asked(longer, "responses", before=asked(first, "responses")).digest == alone.digest
    assert asked(longer, "responses", before=asked(request("other"), "responses")).digest == alone.digest
    item = longer.input[2]
    before = asked(longer, "responses")
    item.output = "changed in place"  # type: ignore[union-attr]
    again = asked(longer, "responses", before=before)
    assert again.digest == asked(longer, "responses").digest != alone.digest


def test_half_a_surrogate_pair_is_no_obstacle(tmp_path: Path) -> None:
    keeping = recorder(tmp_path, "auto")
    body = request().model_copy(update={"input": "\ud83d"})
    call = keeping.call("responses", body)
    keeping.keep(call, b"{}")

    assert recorder(tmp_path, "replay").find(recorder(tmp_path, "replay").call("responses", body)) == b"{}"


def test_part_of_a_rollout_belongs_to_its_execution() -> None:
    seen = []
    for rollout_ids in (["0-0", "0-0", "0-1"], ["0-0"]):
        tokens = []
        for rollout_id in rollout_ids:
            tokens.append(begin_rollout(rollout_id))
            seen.append(current_execution())
        while tokens:
            leave_rollout(tokens.pop())
    first, same, other, again = seen

    assert first == same != ""
    assert len({first, other, again, ""}) == 4
    assert current_execution() == ""
