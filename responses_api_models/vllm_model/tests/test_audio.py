"""Sound named in the metadata stands before the last user message; what cannot be used is an error that says why."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from responses_api_models.vllm_model.audio import with_audio

DATA = "data:audio/wav;base64,UklGRg=="


def body(metadata: dict[str, Any], *messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages) or [{"role": "user", "content": "Listen."}], "metadata": metadata}


def sound(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def test_a_data_url_goes_before_the_text_of_the_last_user_message() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "First."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": [{"type": "text", "text": "Listen."}]},
        {"role": "assistant", "content": "Hm."},
    ]

    changed = with_audio(body({"audio_data": DATA, "other": "kept"}, *chat), None)

    assert changed["messages"][2]["content"] == [sound(DATA), {"type": "text", "text": "Listen."}]
    assert [changed["messages"][at] for at in (0, 1, 3)] == [chat[at] for at in (0, 1, 3)]
    assert changed["metadata"] == {"other": "kept"}


@pytest.mark.parametrize(
    ("suffix", "subtype"),
    [("wav", "wav"), ("flac", "flac"), ("mp3", "mpeg"), ("m4a", "mp4"), ("ogg", "ogg"), ("OPUS", "opus")],
)
def test_a_file_is_inlined(tmp_path: Path, suffix: str, subtype: str) -> None:
    path = tmp_path / f"clip.{suffix}"
    path.write_bytes(b"sound")

    changed = with_audio(body({"audio_path": str(path)}), None)

    url = f"data:audio/{subtype};base64,{base64.b64encode(b'sound').decode()}"
    assert changed["messages"] == [{"role": "user", "content": [sound(url), {"type": "text", "text": "Listen."}]}]
    assert "metadata" not in changed


@pytest.mark.parametrize("written", [lambda paths: paths, json.dumps])
def test_several_files_stay_in_order(tmp_path: Path, written: Any) -> None:
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(name.encode())

    changed = with_audio(body({"audio_paths": written(["b.wav", "a.wav"])}), str(tmp_path))

    urls = [part["audio_url"]["url"] for part in changed["messages"][0]["content"][:2]]
    assert [base64.b64decode(url.partition(",")[2]) for url in urls] == [b"b.wav", b"a.wav"]


def test_without_a_user_message_there_is_one_afterwards() -> None:
    changed = with_audio(body({"audio_data": DATA}, {"role": "system", "content": "Transcribe."}), None)

    assert changed["messages"][1] == {"role": "user", "content": [sound(DATA)]}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"audio_data": DATA, "audio_path": "/a.wav"}, "audio_data and audio_path"),
        ({"audio_paths": "a.wav"}, "must be a list"),
        ({"audio_data": "UklGRg=="}, "data URL"),
        ({"audio_path": "clip.wav"}, "audio_root"),
        ({"audio_path": "/no/such/clip.wav"}, "cannot be read"),
        ({"audio_path": "/etc/clip.txt"}, "none of"),
    ],
)
def test_sound_that_cannot_be_used_is_an_error(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        with_audio(body(metadata), None)


def test_a_relative_path_stays_below_its_folder(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "secret.wav").write_bytes(b"x")

    with pytest.raises(ValueError, match="leads out of"):
        with_audio(body({"audio_path": "../secret.wav"}), str(tmp_path / "inside"))
