import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, model_validator

import nemo_gym.global_config
from nemo_gym.cli.command import Command, command
from nemo_gym.errors import ConfigError, GymError
from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig


class RollConfig(BaseNeMoGymCLIConfig):
    """Arguments of `ng_roll`."""

    rows: str
    """The rows to roll out."""
    limit: int | None = Field(None, ge=1)
    repeats: int | dict[str, int] = 1
    params: dict[str, Any] = Field(default_factory=dict)
    mode: Literal["fast", "slow"] = "fast"
    secret_key: int = 0
    select: str | None = None


@command(RollConfig, name="ng_roll")
def roll(config: RollConfig) -> None:
    """Roll."""
    sys.stdout.write(config.model_dump_json())


def exit_code(program: Command[Any], *arguments: str) -> int:
    try:
        program.run(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def rolled(capsys: pytest.CaptureFixture[str], *arguments: str) -> RollConfig:
    roll.run(["+rows=in.jsonl", *arguments])
    return RollConfig.model_validate_json(capsys.readouterr().out)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str, program: Command[Any] = roll) -> str:
    assert exit_code(program, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err


def test_a_config_given_from_python_goes_straight_to_the_function() -> None:
    @command(RollConfig)
    def main(config: RollConfig) -> str:
        return config.rows

    @command(RollConfig)
    async def async_main(config: RollConfig) -> str:
        return config.rows

    assert main(RollConfig(rows="a")) == "a"
    assert asyncio.run(async_main(RollConfig(rows="b"))) == "b"


def test_without_a_config_the_arguments_of_the_process_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ng_roll", "+rows=typed.jsonl"])
    assert roll() is None
    assert '"rows":"typed.jsonl"' in capsys.readouterr().out


def test_a_second_run_in_one_process_has_a_configuration_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert rolled(capsys, "+limit=5", "+mode=slow").limit == 5
    assert rolled(capsys, "+limit=6") == RollConfig(rows="in.jsonl", limit=6)


@pytest.mark.parametrize("spelling", ["+limit=5", "++limit=5", "limit=5"])
def test_all_three_spellings_set_an_option(capsys: pytest.CaptureFixture[str], spelling: str) -> None:
    assert rolled(capsys, spelling).limit == 5


def test_the_last_of_several_wins_and_a_tilde_removes(capsys: pytest.CaptureFixture[str]) -> None:
    assert rolled(capsys, "+limit=5", "limit=6", "++limit=7").limit == 7


def test_a_tilde_removes_what_a_file_set(capsys: pytest.CaptureFixture[str]) -> None:
    Path("env.yaml").write_text("limit: 3\n")
    assert rolled(capsys, "~limit").limit is None


def test_nested_keys_lists_and_mappings_reach_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    config = rolled(capsys, "+repeats={a: 4, b: 1}", "+params.stop=[x,y]", "+params.t=0.5")
    assert config.repeats == {"a": 4, "b": 1}
    assert config.params == {"stop": ["x", "y"], "t": 0.5}


@pytest.mark.parametrize("text", ["0 < mean < 1", "a/*.jsonl,b/*.jsonl", "http://h/?x=1&y=(2)", "it's", "é=1", "007"])
def test_text_is_taken_as_it_is(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert rolled(capsys, f"+select={text}").select == text


def test_options_come_from_files_too_and_are_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("base: 4\nlimit: ${base}\nparams: {a: '${base}'}\n")
    config = rolled(capsys, "+config_paths=[mine.yaml]")
    assert (config.limit, config.params) == (4, {"a": 4})


def test_no_folder_and_no_file_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    rolled(capsys)
    assert list(Path().iterdir()) == []


def test_what_is_missing_is_named_the_way_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    error = complaint(capsys)
    assert "+rows=<text> is required. The rows to roll out." in error
    assert "ng_roll --help" in error


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("+limit=0", ["+limit=0: expected int, at least 1\n"]),
        ("+limit=many", ["+limit=many: expected int, at least 1\n"]),
        ("+mode=fest", ["+mode=fest: expected fast|slow; did you mean 'fast'?"]),
        ("+repeats={a: x}", ["+repeats={a: x}: expected int or {text: int}", "a: Input should be a valid integer"]),
    ],
)
def test_a_value_of_no_use_is_shown_with_what_is_expected(
    capsys: pytest.CaptureFixture[str], argument: str, words: list[str]
) -> None:
    error = complaint(capsys, "+rows=a", argument)
    assert [word for word in words if word not in error] == []


def test_all_wrong_options_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = complaint(capsys, "+limit=0", "+mode=x")
    assert [line.strip().split("=")[0] for line in error.splitlines()[1:-1]] == ["+rows", "+limit", "+mode"]


def test_a_secret_of_no_use_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    error = complaint(capsys, "+rows=a", "+secret_key=hunter2")
    assert "hunter2" not in error
    assert "+secret_key=****: expected int" in error


def test_what_a_config_class_objects_to_as_a_whole_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    class Picky(BaseNeMoGymCLIConfig):
        a: int | None = None
        b: int | None = None

        @model_validator(mode="after")
        def _one_of_both(self) -> "Picky":
            if self.a is None and self.b is None:
                raise ValueError("give either +a or +b")
            return self

    picky = Command(lambda config: None, Picky, "ng_picky", roll.loading)
    assert "ng_picky cannot run like this:\n  give either +a or +b\n" in complaint(capsys, program=picky)


def test_a_misspelled_option_is_refused_with_the_nearest_known_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown option 'repeat'; did you mean 'repeats'?" in complaint(capsys, "+rows=a", "+repeat=2")


def test_what_is_no_option_is_refused_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--limit 5: write +limit=5" in complaint(capsys, "+rows=a", "--limit", "5")


@pytest.mark.parametrize("spelling", ["-h", "--help", "+help=true", "++h=true"])
def test_help_needs_no_valid_configuration(capsys: pytest.CaptureFixture[str], spelling: str) -> None:
    Path("env.yaml").write_text("a: [1\n")
    with pytest.raises(SystemExit) as stop:
        roll.run(["+config_paths=[missing.yaml]", "+nonsense=1", "--what", spelling])
    assert stop.value.code == 0
    output = capsys.readouterr()
    assert output.out.startswith("Usage: ng_roll +rows=<text>")
    assert output.err == ""


@pytest.mark.parametrize("key", ["h", "help"])
def test_help_is_also_asked_for_by_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.setattr(nemo_gym.global_config, "_GLOBAL_CONFIG_DICT", {key: True})
    with pytest.raises(SystemExit) as stop:
        roll()
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: ng_roll")


REFUSED = "Error: cannot use a.jsonl: "
CHECK = "; check the path, its permissions and the disk, and run the command again\n"


def failing(error: BaseException | None = None, returned: object = None) -> Command[Any]:
    def main(config: BaseNeMoGymCLIConfig) -> object:
        sys.stdout.write("product\n")
        if error is not None:
            raise error
        return returned

    return Command(main, BaseNeMoGymCLIConfig, "ng_fail", roll.loading)


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        (failing(), 0, ""),
        (failing(returned=0), 0, ""),
        (failing(returned=["a result"]), 0, ""),
        (failing(returned=1), 1, ""),
        (failing(returned=7), 7, ""),
        (failing(returned=True), 0, ""),
        (failing(GymError("it broke")), 1, "Error: it broke\n"),
        (failing(ConfigError("your turn")), 2, "Error: your turn\n"),
        (
            failing(PermissionError(errno.EACCES, "Permission denied", "a.jsonl")),
            2,
            f"{REFUSED}Permission denied{CHECK}",
        ),
        (failing(OSError(errno.ENOSPC, "No space left", "a.jsonl")), 1, f"{REFUSED}No space left{CHECK}"),
        (failing(KeyboardInterrupt()), 130, "\nInterrupted.\n"),
        (failing(SystemExit(3)), 3, ""),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], program: Command[Any], code: int, message: str) -> None:
    assert exit_code(program) == code
    assert capsys.readouterr() == ("product\n", message)


def test_the_traceback_of_a_mistake_is_shown_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEMO_GYM_DEBUG", "1")
    assert exit_code(failing(ConfigError("your turn"))) == 2
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert error.endswith("Error: your turn\n")


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), BrokenPipeError("of a socket, not of stdout")])
def test_a_bug_keeps_its_traceback(bug: Exception) -> None:
    with pytest.raises(type(bug)):
        failing(bug).run([])


def test_an_async_function_runs_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(config: BaseNeMoGymCLIConfig) -> int:
        await asyncio.sleep(0)
        sys.stdout.write("awaited\n")
        return 1

    assert exit_code(Command(main, BaseNeMoGymCLIConfig, "ng_async", roll.loading)) == 1
    assert capsys.readouterr().out == "awaited\n"


def test_ctrl_c_ends_a_real_process_with_one_line(tmp_path: Path) -> None:
    program = (
        "import asyncio\nfrom nemo_gym.cli.command import command\n"
        "from nemo_gym.schemas.cli_config import BaseNeMoGymCLIConfig\n"
        "@command(BaseNeMoGymCLIConfig, name='ng_wait')\n"
        "async def main(config):\n    print('ready', flush=True)\n    await asyncio.sleep(60)\n"
        "main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error.strip()) == (130, "Interrupted.")


def test_diagnostics_go_to_stderr_and_verbose_shows_more(capsys: pytest.CaptureFixture[str]) -> None:
    @command(BaseNeMoGymCLIConfig, name="ng_talk")
    def talk(config: BaseNeMoGymCLIConfig) -> None:
        logging.getLogger("nemo_gym.somewhere").debug("detail")
        logging.getLogger("nemo_gym.somewhere").warning("attention")
        sys.stdout.write("product\n")

    talk.run([])
    assert capsys.readouterr() == ("product\n", "Warning: attention\n")


def test_verbose_may_come_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    @command(BaseNeMoGymCLIConfig, name="ng_talk")
    def talk(config: BaseNeMoGymCLIConfig) -> None:
        logging.getLogger("nemo_gym.somewhere").debug("detail")

    Path("env.yaml").write_text("verbose: true\n")
    talk.run([])
    assert "detail" in capsys.readouterr().err


def test_a_command_without_a_model_of_its_own_gets_a_stand_in(capsys: pytest.CaptureFixture[str]) -> None:
    @command(BaseNeMoGymCLIConfig, name="ng_base", needs_model=False, offline=True, initial={"mine": 1, "limit": 2})
    def main(config: BaseNeMoGymCLIConfig) -> None:
        known = nemo_gym.global_config.get_global_config_dict()
        port = known.policy_model.responses_api_models.dummy_model.port
        sys.stdout.write(f"{port} {known.mine} {known.limit}\n")

    main.run(["+limit=3"])
    assert capsys.readouterr().out == "-1 1 3\n"


def test_a_command_that_reads_no_config_ignores_env_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    @command(RollConfig, name="ng_plain", reads_config=False)
    def main(config: RollConfig) -> None:
        sys.stdout.write(f"{config.rows} {config.limit}\n")

    Path("env.yaml").write_text("limit: 3\nbroken: [\n")
    main.run(["+rows=a"])
    assert capsys.readouterr().out == "a None\n"


def test_a_launchers_config_is_taken_as_it_is_with_the_command_line_on_top(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", '{"limit": 2, "mode": "slow", "config_paths": ["elsewhere.yaml"]}')
    config = rolled(capsys, "+limit=4")
    assert (config.limit, config.mode) == (4, "slow")


def test_a_misspelled_option_beside_a_launchers_config_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", '{"limit": 2}')
    assert "did you mean 'limit'?" in complaint(capsys, "+rows=a", "+limt=4")


def test_an_option_that_cannot_be_resolved_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", '{"limit": "${nowhere}", "unused": "${elsewhere}"}')
    error = complaint(capsys, "+rows=a")
    assert "the option 'limit' is '${nowhere}', which cannot be resolved" in error
    assert "elsewhere" not in error


def test_naming_config_files_leaves_a_launchers_config_aside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", '{"limit": 2}')
    Path("mine.yaml").write_text("mode: slow\n")
    roll.run(["+rows=a", "+config_paths=[mine.yaml]"])
    output = capsys.readouterr()
    assert RollConfig.model_validate_json(output.out) == RollConfig(rows="a", mode="slow")
    assert output.err.startswith("Warning: config_paths is given")


def test_a_reader_that_went_away_is_no_reason_to_complain(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = Path(sys.executable).parent / "ng_help"
    done = subprocess.run([script], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
