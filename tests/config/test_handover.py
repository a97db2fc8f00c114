"""How a config gets to child processes: privately, whatever its size."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_gym.config.handover import (
    INLINE_LIMIT_BYTES,
    child_environment,
    config_from_environment,
    remove_abandoned_files,
    remove_config_file,
    write_config_file,
)
from nemo_gym.errors import ConfigError
from nemo_gym.http.pace_books import Books, share_pace
from nemo_gym.paths import SymbolicLinkError
from nemo_gym.process_inputs import common_book


def config(**values: object) -> DictConfig:
    return OmegaConf.create({"a": {"b": "${c}"}, "c": 1, **values})


def environment_for(given: DictConfig, **inherited: str) -> dict[str, str]:
    return child_environment(given, write_config_file(given), "my_server", inherited)


def test_the_file_is_readable_by_its_owner_only_and_keeps_interpolations() -> None:
    path = write_config_file(config(policy_api_key="k"))

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert OmegaConf.load(path) == config(policy_api_key="k")
    assert "${c}" in path.read_text()


def test_a_child_gets_the_file_its_name_and_a_small_config_without_secrets() -> None:
    environment = environment_for(config(), PATH="/bin")

    assert environment["PATH"] == "/bin"
    assert environment["NEMO_GYM_CONFIG_PATH"] == "my_server"
    assert OmegaConf.load(environment["NEMO_GYM_CONFIG_FILE"]) == config()
    assert OmegaConf.create(environment["NEMO_GYM_CONFIG_DICT"]) == config()


@pytest.mark.parametrize(
    "secret",
    [{"policy_api_key": "hunter2"}, {"url": "http://u:hunter2@h"}, {"headers": {"Authorization": "Bearer hunter2"}}],
)
def test_a_secret_never_stands_in_the_environment(secret: dict[str, object]) -> None:
    environment = environment_for(config(**secret), NEMO_GYM_CONFIG_DICT="{a: left over}")

    assert "NEMO_GYM_CONFIG_DICT" not in environment
    assert "hunter2" not in str(environment)
    assert config_from_environment(environment) == config(**secret)


def test_a_large_config_travels_in_the_file_alone() -> None:
    large = config(text="é" * INLINE_LIMIT_BYTES, many=["x" * 100] * 10_000)

    environment = environment_for(large)

    assert "NEMO_GYM_CONFIG_DICT" not in environment
    assert config_from_environment(environment) == large


def test_the_limit_counts_bytes() -> None:
    bytes_around = len(OmegaConf.to_yaml(config(text="x")).encode())

    below = config(text="x" * (INLINE_LIMIT_BYTES - bytes_around))
    at = config(text="x" * (INLINE_LIMIT_BYTES - bytes_around + 1))

    assert len(OmegaConf.to_yaml(below).encode()) == INLINE_LIMIT_BYTES - 1
    assert "NEMO_GYM_CONFIG_DICT" in environment_for(below)
    assert "NEMO_GYM_CONFIG_DICT" not in environment_for(at)


def test_the_file_goes_when_the_process_that_wrote_it_exits_and_not_when_a_fork_does() -> None:
    program = """
        import os
        import sys
        from omegaconf import OmegaConf
        from nemo_gym.config.handover import write_config_file

        path = write_config_file(OmegaConf.create({"a": 1}))
        if os.fork() == 0:
            sys.exit()
        os.wait()
        assert path.exists()
        print(path)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=60
    )

    path = Path(done.stdout.strip())
    assert path.name.startswith("nemo_gym_config_")
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "a: {b: '${c}'}\nc: 1\n",
        '{"a": {"b": "${c}"}, "c": 1}',
        '{\n\t"a": {"b": "${c}"},\n\t"c": 1\n}',
        "{a: {b: '${c}'}, c: 1}",
    ],
    ids=["YAML", "JSON", "JSON with tabs", "flow YAML"],
)
def test_what_any_launcher_hands_over_is_taken_as_it_is(text: str) -> None:
    found = config_from_environment({"NEMO_GYM_CONFIG_DICT": text})

    assert found == config()
    assert list(found) == ["a", "c"]


def test_json_keeps_characters_that_yaml_would_break() -> None:
    text = json.dumps({"smile": "\N{GRINNING FACE}"})

    assert config_from_environment({"NEMO_GYM_CONFIG_DICT": text}) == {"smile": "\N{GRINNING FACE}"}


def test_an_inline_config_comes_before_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("from: file\n")
    environment = {"NEMO_GYM_CONFIG_FILE": str(tmp_path / "c.yaml"), "NEMO_GYM_CONFIG_DICT": "from: text"}

    assert config_from_environment(environment) == {"from": "text"}
    assert config_from_environment({**environment, "NEMO_GYM_CONFIG_DICT": ""}) == {"from": "file"}


def test_without_a_launcher_there_is_no_config() -> None:
    assert config_from_environment({}) is None
    assert config_from_environment({"NEMO_GYM_CONFIG_DICT": "", "NEMO_GYM_CONFIG_FILE": ""}) is None


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "a: [", '{"a": '])
def test_text_that_is_no_mapping_is_an_error_that_names_the_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="NEMO_GYM_CONFIG_DICT"):
        config_from_environment({"NEMO_GYM_CONFIG_DICT": text})


def test_a_file_that_is_gone_is_an_error_that_names_it_and_the_variable(tmp_path: Path) -> None:
    gone = tmp_path / "gone.yaml"

    with pytest.raises(ConfigError, match=r"cannot read .*gone\.yaml.*NEMO_GYM_CONFIG_FILE"):
        config_from_environment({"NEMO_GYM_CONFIG_FILE": str(gone)})


def test_a_child_process_reads_what_its_parent_wrote() -> None:
    given = config(policy_api_key="hunter2")
    child = subprocess.run(
        [sys.executable, "-c", "from nemo_gym.global_config import get_global_config_dict as g; print(dict(g()))"],
        env=child_environment(given, write_config_file(given), "my_server", os.environ),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert child.stdout.strip() == str(dict(given))


WRITER = """
import os, signal, sys
from omegaconf import OmegaConf
from nemo_gym.process_inputs import common_book
from nemo_gym.config.handover import write_config_file

print(write_config_file(OmegaConf.create({"policy_api_key": "k"})), flush=True)
signal.pause()
"""


@pytest.fixture
def start_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[Any, Path]]]:
    """Start a process that has written its config to `tmp_path` and waits; this one's files go there as well."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writers: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], Path]:
        env = os.environ | {"TMPDIR": str(tmp_path)}
        writers.append(subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True, env=env))
        assert writers[-1].stdout is not None
        return writers[-1], Path(writers[-1].stdout.readline().strip())

    yield start
    for writer in writers:
        writer.kill()
        writer.communicate(timeout=20)


def test_what_a_killed_process_left_is_removed_at_the_next_start_and_what_is_in_use_never(
    start_writer: Callable[[], tuple[Any, Path]],
) -> None:
    killed, left = start_writer()
    _, used = start_writer()
    killed.kill()
    killed.wait(20)
    assert left.exists()

    mine = write_config_file(config())

    assert [path.exists() for path in (left, used, mine)] == [False, True, True]
    assert write_config_file(config()).exists()
    assert [path.exists() for path in (used, mine)] == [True, True]
    remove_config_file(mine)
    remove_config_file(mine)
    assert not mine.exists()


def test_only_own_plain_files_of_that_name_are_removed(
    start_writer: Callable[[], tuple[Any, Path]], tmp_path: Path
) -> None:
    kept = tmp_path / "precious.yaml"
    kept.write_text("a: 1")
    planted = [tmp_path / f"nemo_gym_config_held_{number}.yaml" for number in range(4)]
    planted[0].symlink_to(kept)
    planted[1].mkdir()
    os.mkfifo(planted[2])
    planted[3].write_text("of another user")
    if os.geteuid() == 0:
        os.chown(planted[3], 12345, 12345)
    else:
        planted.pop()
    other_names = [tmp_path / "nemo_gym_config_abc.yaml", tmp_path / "nemo_gym_config_held_x.txt"]
    for path in other_names:
        path.touch()

    write_config_file(config())

    assert kept.read_text() == "a: 1"
    assert all(os.path.lexists(path) for path in [*planted, *other_names])


def test_a_file_that_is_taken_for_abandoned_before_it_is_locked_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, real = [], tempfile.mkstemp

    def mkstemp(**options: Any) -> tuple[int, str]:
        descriptor, name = real(**options)
        made.append(Path(name))
        if len(made) == 1:
            remove_abandoned_files(tmp_path)  # another process, at the worst moment
        return descriptor, name

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)

    assert write_config_file(config()) == made[1]
    assert [path.exists() for path in made] == [False, True]


def test_what_children_keep_beside_the_file_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = write_config_file(config())
    share_pace(path, 0.5)
    assert stat.S_IMODE(common_book(path).stat().st_mode) == 0o600
    abandoned = tmp_path / path.name.replace("held_", "held_0")
    for file in (abandoned, common_book(abandoned)):
        file.touch()

    remove_abandoned_files(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([path, common_book(path)])
    remove_config_file(path)

    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_taken_for_what_is_kept_beside_the_file(tmp_path: Path) -> None:
    path = write_config_file(config())
    (tmp_path / "theirs").touch()
    common_book(path).symlink_to(tmp_path / "theirs")

    with pytest.raises(SymbolicLinkError):
        share_pace(path, 0.5)
    assert not Books(path, "m").is_shared
    remove_config_file(path)

    assert (tmp_path / "theirs").read_bytes() == b""
