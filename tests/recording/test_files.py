"""Recorded calls on disk survive kills, notice every flipped byte, and can be written by many at once."""

import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.recording import files
from nemo_gym.recording.files import (
    HEAD_BYTES,
    CallKey,
    DamagedRecordingError,
    Frame,
    Index,
    Writer,
    call_files,
    read_call,
    scan,
)
from nemo_gym.recording.requests import sample_of
from nemo_gym.recording.upkeep import calls_of_rollout, prune, take_inventory

ABOUT = (
    b'{"dialect":"responses","model_ref":{"name":"policy"},"settings":{"model":"m"},"started_ns":0,'
    b'"ended_ns":1000000,"request":{}}'
)


def key_of(number: int, ordinal: int = 0) -> CallKey:
    return CallKey(number, number + 1, ordinal)


def write(folder: Path, numbers: range, server: str = "policy", text: str = "answer") -> tuple[Path, list[Frame]]:
    writer = Writer(folder, server)
    about = ABOUT.replace(b"policy", server.encode())
    kept = [
        writer.append(key_of(number), sample_of(f"{number}-0"), f'"{text} {number}"'.encode(), about)
        for number in numbers
    ]
    writer.close()
    return writer.path, [frame for frame in kept if frame is not None]


@pytest.fixture(params=[True, False], ids=["zstandard", "plain"])
def compression(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With and without the extra."""
    monkeypatch.setattr(files, "_WORTH_COMPRESSING", 0)
    if not request.param:
        monkeypatch.setattr(files, "_zstandard", lambda: None)
    return bool(request.param)


@pytest.mark.usefixtures("compression")
def test_what_was_written_is_found_and_read_again(tmp_path: Path) -> None:
    path, frames = write(tmp_path, range(50))
    index = Index(tmp_path, "policy")

    assert len(index) == 50
    for number, frame in enumerate(frames):
        assert index.find(key_of(number)) == (path, frame)
        call = read_call(path, frame)
        assert call.response == f'"answer {number}"'.encode()
        assert call.about["dialect"] == "responses"
    assert index.find(key_of(50)) is None
    assert index.find(key_of(0, ordinal=1)) is None
    assert index.calls_of(sample_of("7-0")) == [(path, frames[7])]
    assert len(Index(tmp_path, "judge")) == 0


def test_a_compressed_call_needs_what_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, frames = write(tmp_path, range(1), text="long " * 1000)
    assert frames[0].size < 1000
    monkeypatch.setattr(files, "_zstandard", lambda: None)

    with pytest.raises(ConfigError, match=r"pip install -c .* -e .*\[data\]"):
        read_call(path, frames[0])


def test_wherever_a_writer_is_killed_all_calls_before_are_there(tmp_path: Path) -> None:
    path, frames = write(tmp_path, range(3))
    whole = path.read_bytes()
    for length in range(0, len(whole), 2):
        path.write_bytes(whole[:length])
        complete = [frame for frame in frames if frame.offset + frame.size <= length]
        found = scan(path, verify=True)

        assert found.frames == complete
        assert found.damage == []
        assert found.end + found.torn_bytes == length


@pytest.mark.usefixtures("compression")
def test_every_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    path, frames = write(tmp_path, range(3))
    whole = path.read_bytes()
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        (hit,) = (frame for frame in frames if frame.offset <= position < frame.offset + frame.size)
        found = scan(path, verify=True)

        assert [(place.file, place.offset) for place in found.damage] == [(path, hit.offset)]
        assert found.frames == [frame for frame in frames if frame is not hit]
        with pytest.raises(DamagedRecordingError, match=f"offset {hit.offset}"):
            read_call(path, hit)


def test_an_index_is_kept_used_and_never_trusted_blindly(tmp_path: Path) -> None:
    path, frames = write(tmp_path, range(300))
    index_path = path.with_name(path.name + ".idx")
    Index(tmp_path)
    kept = index_path.read_bytes()
    for spoilt in (kept[:-1], kept[:40] + b"\xff" + kept[41:], b"", b"something else"):
        index_path.write_bytes(spoilt)
        assert Index(tmp_path).find(key_of(299)) == (path, frames[299])
    index_path.write_bytes(kept)
    path.write_bytes(b"\xff" * path.stat().st_size)  # only the index knows what was here

    assert Index(tmp_path).find(key_of(299)) == (path, frames[299])


def test_the_call_that_was_recorded_last_counts(tmp_path: Path) -> None:
    write(tmp_path, range(3), text="first")
    later, frames = write(tmp_path, range(1, 2), text="second")
    index = Index(tmp_path)

    assert index.find(key_of(1)) == (later, frames[0])
    found = index.find(key_of(2))
    assert found is not None
    assert read_call(*found).response == b'"first 2"'


def test_what_others_write_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LOOK_AGAIN_S", 0.0)
    write(tmp_path, range(2))
    index = Index(tmp_path, "policy")
    other, frames = write(tmp_path, range(2, 4))
    write(tmp_path, range(4, 5), server="judge")

    assert index.find(key_of(3)) is None
    assert index.refresh()
    assert index.find(key_of(3)) == (other, frames[1])
    assert not index.refresh()
    assert index.find(key_of(4)) is None


def _write_many(folder: str, start: int) -> None:
    write(Path(folder), range(start, start + 200))


def test_many_can_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_many, args=(str(tmp_path), 200 * each)) for each in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0

    assert len(call_files(tmp_path)) == 4
    index = Index(tmp_path)
    assert all(index.find(key_of(number)) is not None for number in range(800))
    assert take_inventory(tmp_path, verify=True).damage == []


def test_recording_stops_at_its_bound_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, frames = write(tmp_path, range(1))
    room = 5 * frames[0].size
    writer = Writer(tmp_path, "policy", max_bytes=room)
    kept = [writer.append(key_of(number), 0, b'"answer"', ABOUT) for number in range(1, 20)]
    writer.close()

    assert 2 <= sum(frame is not None for frame in kept) <= 5
    assert sum(path.stat().st_size for path in call_files(tmp_path)) <= room
    assert caplog.text.count(f"has reached max_bytes={room}") == 1


def test_a_disk_that_takes_half_a_call_leaves_no_half_of_it(tmp_path: Path) -> None:
    old, frames = write(tmp_path, range(1))
    old.unlink()
    room = 2 * frames[0].size + 20
    process = multiprocessing.get_context("fork").Process(target=_write_with_room, args=(tmp_path, room))
    process.start()
    process.join(60)

    assert process.exitcode == 0
    [path] = call_files(tmp_path)
    assert path.stat().st_size == 2 * frames[0].size
    assert len(scan(path, verify=True).frames) == 2


def _write_with_room(folder: Path, room: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    _, kept = write(folder, range(5))
    assert len(kept) == 2


def test_a_folder_that_vanishes_ends_recording_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer(tmp_path / "gone", "policy")

    assert writer.append(key_of(1), 0, b"{}", ABOUT) is None
    assert writer.append(key_of(2), 0, b"{}", ABOUT) is None
    assert caplog.text.count("not recorded") == 1


def test_of_calls_written_at_once_those_are_kept_for_which_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(tmp_path, "policy")
    frames = [writer.add(key_of(number), 0, b'"answer"', ABOUT, number) for number in range(5)]
    assert not writer.path.exists()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert frames[3] is not None
    resource.setrlimit(resource.RLIMIT_FSIZE, (frames[3].offset + 9, hard))  # as if the disk were full
    try:
        assert not writer.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert writer.append(key_of(9), 0, b"{}", ABOUT) is None
    writer.close()

    found = scan(writer.path, verify=True)
    assert (found.frames, found.damage, found.torn_bytes) == (frames[:3], [], 0)
    assert caplog.text.count("not recorded") == 1


def test_pruning_drops_what_is_of_no_use_and_nothing_else(tmp_path: Path) -> None:
    old, _ = write(tmp_path, range(4), text="first")
    write(tmp_path, range(2), text="second")
    torn, frames = write(tmp_path, range(10, 13))
    data = bytearray(torn.read_bytes())
    data[frames[1].offset + HEAD_BYTES] ^= 1
    torn.write_bytes(data + b"NGC1 torn")
    Index(tmp_path)

    done = prune(tmp_path)

    assert (done.kept, done.dropped, done.in_use) == (6, 3, [])
    assert done.freed_bytes > 0
    assert not old.exists()
    inventory = take_inventory(tmp_path, verify=True)
    assert inventory.damage == []
    assert inventory.torn_bytes == 0
    index = Index(tmp_path)
    texts = {number: index.find(key_of(number)) for number in (0, 1, 2, 3, 10, 11, 12)}
    answers = {number: read_call(*place).response.decode() for number, place in texts.items() if place is not None}
    assert answers == {
        0: '"second 0"',
        1: '"second 1"',
        2: '"first 2"',
        3: '"first 3"',
        10: '"answer 10"',
        12: '"answer 12"',
    }
    assert prune(tmp_path).dropped == 0


def test_pruning_by_age_and_size_leaves_what_is_being_written(tmp_path: Path) -> None:
    _, frames = write(tmp_path, range(5))
    writer = Writer(tmp_path, "policy")
    writer.append(key_of(100), 0, b"{}", ABOUT)

    done = prune(tmp_path, max_bytes=2 * frames[0].size + 200)
    assert done.in_use == [writer.path]
    assert {path for path in call_files(tmp_path) if path == writer.path} == {writer.path}
    assert 1 <= done.kept <= 3
    writer.close()
    assert prune(tmp_path, older_than_days=1).dropped == 0
    assert prune(tmp_path, older_than_days=1e-9).kept == 0
    assert call_files(tmp_path) == []


def test_a_recording_says_what_is_in_it(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    write(tmp_path, range(2))
    write(tmp_path, range(1), server="judge model")
    found = take_inventory(tmp_path).as_json()

    assert [(each["server"], each["calls"], each["superseded"], each["rollouts"]) for each in found["servers"]] == [
        ("judge model", 1, 0, 1),
        ("policy", 5, 2, 3),
    ]
    assert found["servers"][1]["first_at"] <= found["servers"][1]["last_at"]
    calls = list(calls_of_rollout(tmp_path, "1-0", "policy"))
    assert [call.is_superseded for call in calls] == [True, False]
    with pytest.raises(ConfigError, match="no calls of this rollout"):
        list(calls_of_rollout(tmp_path, "9-9"))


@pytest.mark.parametrize(
    ("folder", "server", "words"),
    [
        ("nowhere", None, "no such folder"),
        ("empty", None, "no recorded calls in it"),
        (".", "polcy", "did you mean 'policy'"),
    ],
)
def test_what_cannot_be_listed_is_said_in_one_line(folder: str, server: str | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path, range(1))

    with pytest.raises(ConfigError, match=words):
        take_inventory(tmp_path / folder, server)


def test_zeros_at_the_end_are_what_a_power_failure_leaves(tmp_path: Path) -> None:
    path, frames = write(tmp_path, range(2))
    with path.open("ab") as file:
        file.write(bytes(4096))
    found = scan(path, verify=True)

    assert found.frames == frames
    assert found.damage == []
    assert found.torn_bytes == 4096


def test_the_size_of_a_head_is_part_of_the_format() -> None:
    described: Any = files._HEAD
    assert (HEAD_BYTES, described.format) == (64, "<4sB3xQQQQIIIIII")
    assert os.path.basename(files.CALLS_SUFFIX) == ".calls"  # noqa: PTH119
