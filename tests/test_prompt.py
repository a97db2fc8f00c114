import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import nemo_gym.prompt
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError
from nemo_gym.prompt import (
    PromptConfig,
    apply_prompt_to_row,
    fill_prompt,
    load_prompt_config,
    materialize_prompts,
    validate_prompt_compatibility,
)

PROMPT = 'system: "Answer as {persona}."\nuser: |-\n  {question}\n  Put the result in \\boxed{{}}.\n'


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _only_user(template: str, row: dict[str, Any]) -> str:
    (message,) = fill_prompt(PromptConfig(user=template), row)
    assert message["role"] == "user"
    return message["content"]


def test_a_template_has_a_user_part_and_perhaps_a_system_part(tmp_path: Path) -> None:
    both = load_prompt_config(str(_write(tmp_path / "both.yaml", "user: '{q}'\nsystem: be brief\nother: 1\n")))
    assert both == PromptConfig(user="{q}", system="be brief")
    assert load_prompt_config(_write(tmp_path / "user.yaml", "user: '{q}'\n")).system is None


def test_loading_again_gives_the_same_object_until_the_file_changes(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.yaml", "user: first\n")
    loaded = load_prompt_config(path)
    assert load_prompt_config(path) is loaded
    _write(path, "user: the second one\n")
    assert load_prompt_config(path).user == "the second one"


@pytest.mark.parametrize("content", ["system: only\n", "- user\n", "", "user: 5\n"])
def test_a_file_that_is_no_template_is_a_validation_error_naming_it(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValidationError, match=r"p\.yaml"):
        load_prompt_config(_write(tmp_path / "p.yaml", content))


def test_a_file_that_is_no_yaml_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.yaml is not YAML"):
        load_prompt_config(_write(tmp_path / "p.yaml", "user: 'open\n"))


def test_a_missing_template_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigPathNotFoundError, match=str(tmp_path / "none.yaml")):
        load_prompt_config("none.yaml")


def test_a_relative_path_means_the_current_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "p.yaml", "user: here\n")
    assert load_prompt_config("p.yaml").user == "here"


def test_how_paths_are_resolved_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = _write(tmp_path / "p.yaml", "user: elsewhere\n")
    monkeypatch.setattr(nemo_gym.prompt, "_resolve_path", lambda path: elsewhere)
    assert load_prompt_config("whatever.yaml").user == "elsewhere"


@pytest.mark.parametrize(
    ("template", "row", "content"),
    [
        ("{meta[k]} {n:03d} {f:.2f} {s!r}", {"meta": {"k": "v"}, "n": 7, "f": 1.239, "s": "q"}, "v 007 1.24 'q'"),
        (r"Answer in \boxed{{}} for {q}", {"q": "1+1"}, r"Answer in \boxed{} for 1+1"),
        (r"\boxed{{{question}}}", {"question": 42}, r"\boxed{42}"),
        ("{q}", {"q": "{x}"}, "{x}"),
        ("{a}", {"a": None}, "None"),
        ("{a}", {"a": ["x", 1]}, "['x', 1]"),
        ("{self} {row}", {"self": 1, "row": 2}, "1 2"),
    ],
)
def test_fields_are_filled_in(template: str, row: dict[str, Any], content: str) -> None:
    assert _only_user(template, row) == content


def test_the_system_message_comes_first_even_when_empty() -> None:
    messages = fill_prompt(PromptConfig(user="{q}", system=""), {"q": "hi"})
    assert messages == [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]


def test_a_missing_field_is_named_beside_those_there_are() -> None:
    with pytest.raises(KeyError) as caught:
        _only_user("{b}", {"a": 1, "c": 2})
    assert "'b'" in str(caught.value)
    assert "['a', 'c']" in str(caught.value)
    assert not str(caught.value).startswith(('"', "'"))


def test_a_missing_inner_key_is_named() -> None:
    with pytest.raises(KeyError, match="'zz'"):
        _only_user("{meta[zz]}", {"meta": {}})


def test_a_missing_attribute_says_how_inner_keys_are_written() -> None:
    with pytest.raises(AttributeError, match=r"\{field\[key\]\}"):
        _only_user("{meta.zz}", {"meta": {}})


@pytest.mark.parametrize("template", ["{}", "{0}", "a { b", "a } b", "{n:q}", "{n[x]}"])
def test_a_template_that_cannot_be_filled_is_a_value_error(template: str) -> None:
    with pytest.raises(ValueError, match="cannot be filled"):
        _only_user(template, {"q": 1, "n": 2})


def test_rows_with_an_input_of_their_own_are_refused_by_position() -> None:
    rows: list[dict[str, Any]] = [
        {"responses_create_params": {"input": "hi"}},
        {},
        {"responses_create_params": {"input": [{"role": "user", "content": "hi"}]}},
        {"responses_create_params": {"input": []}},
        {"responses_create_params": None},
        {"responses_create_params": "text"},
        {"responses_create_params": {"tools": []}},
    ]
    with pytest.raises(ValueError, match=r"mutually exclusive.*Violating rows: \[0, 2\]$"):
        validate_prompt_compatibility(rows, PromptConfig(user="x"))
    validate_prompt_compatibility(rows[3:], PromptConfig(user="x"))


def test_applying_a_prompt_keeps_everything_else_and_changes_nothing_in_place() -> None:
    row = {"q": "1", "responses_create_params": {"temperature": 0.5, "input": []}, "z": 9}
    before = json.dumps(row)
    prompted = apply_prompt_to_row(row, PromptConfig(user="{q}?"))
    assert json.dumps(row) == before
    messages = [{"role": "user", "content": "1?"}]
    assert prompted == {"q": "1", "responses_create_params": {"temperature": 0.5, "input": messages}, "z": 9}


@pytest.mark.parametrize("params", [{}, {"responses_create_params": None}, {"responses_create_params": [1]}])
def test_absent_or_odd_parameters_are_replaced(params: dict[str, Any]) -> None:
    prompted = apply_prompt_to_row({"q": 1} | params, PromptConfig(user="{q}"))
    assert prompted["responses_create_params"] == {"input": [{"role": "user", "content": "1"}]}


def test_materialized_prompts_are_written_as_ascii_json_with_their_source(tmp_path: Path) -> None:
    prompt = _write(tmp_path / "p.yaml", PROMPT)
    rows = _write(tmp_path / "in.jsonl", '\n{"question": "Größe?", "persona": "X"}\n\n')
    output = tmp_path / "deep" / "er" / "out.jsonl"
    assert materialize_prompts(str(rows), str(prompt), str(output)) == 1
    expected = (
        '{"question": "Gr\\u00f6\\u00dfe?", "persona": "X", "responses_create_params": {"input": [{"role": '
        '"system", "content": "Answer as X."}, {"role": "user", "content": "Gr\\u00f6\\u00dfe?\\nPut the result '
        'in \\\\boxed{}."}]}, "prompt_config_used": "%s"}\n'
    )
    assert output.read_text() == expected.replace("%s", str(prompt))


@pytest.mark.parametrize(
    ("second_line", "error", "message"),
    [
        ('{"q": 1, "responses_create_params": {"input": "x"}}', ValueError, r"lines \[2\].*Violating rows: \[1\]$"),
        ('{"other": 1}', KeyError, "line 2: the prompt names the field 'q'"),
        ('{"q": ', ConfigError, "line 2: not valid JSON"),
    ],
)
def test_nothing_is_written_when_any_row_is_unusable(
    tmp_path: Path, second_line: str, error: type[Exception], message: str
) -> None:
    prompt = _write(tmp_path / "p.yaml", "user: '{q}'\n")
    rows = _write(tmp_path / "in.jsonl", '{"q": 0}\n' + second_line + "\n")
    with pytest.raises(error, match=message):
        materialize_prompts(rows, prompt, tmp_path / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "p.yaml"]


def _command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from nemo_gym.cli.command import command_named; command_named('materialize_prompts')()"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_says_how_many_rows_it_wrote_and_where(tmp_path: Path) -> None:
    _write(tmp_path / "p.yaml", "user: '{q}'\n")
    _write(tmp_path / "in.jsonl", '{"q": 1}\n{"q": 2}\n')
    options = ["+input_jsonl_fpath=in.jsonl", "+prompt_config=p.yaml", "+output_jsonl_fpath=out.jsonl"]
    done = _command(tmp_path, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 rows" in done.stdout
    assert "out.jsonl" in done.stdout
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_the_command_reports_a_bad_template_without_a_traceback(tmp_path: Path) -> None:
    _write(tmp_path / "p.yaml", "system: only\n")
    _write(tmp_path / "in.jsonl", '{"q": 1}\n')
    options = ["+input_jsonl_fpath=in.jsonl", "+prompt_config=p.yaml", "+output_jsonl_fpath=out.jsonl"]
    done = _command(tmp_path, *options)
    assert done.returncode == 2
    assert "p.yaml" in done.stderr
    assert "user" in done.stderr
    assert "Traceback" not in done.stderr
