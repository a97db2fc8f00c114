"""YAML is read the way OmegaConf reads it, and complaints name the place."""

import io
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_gym.config.files import load_yaml, parse_yaml
from nemo_gym.errors import ConfigError

DIALECT = """
floats: [1e3, 1.5e-4, .5, 12., -1E5, .inf, 1_000.5]
integers: [1, 0x10, 010, 1_000, -3]
truths: [true, True, yes, No, on, off]
nothing: [null, ~, ]
dates: [2024-01-31, 2024-01-31T10:00:00Z]
texts: [1e, e3, 1.2.3, "1e3", '???', a:b, '${x.y}']
base: &base {a: 1, b: 2}
derived:
  <<: *base
  b: 3
block: |
  two
  lines
7: number key
"""


def test_the_dialect_is_that_of_omegaconf() -> None:
    theirs = OmegaConf.to_container(OmegaConf.load(io.StringIO(DIALECT)))

    assert parse_yaml(DIALECT, "here") == theirs


def test_a_config_with_paths_survives_being_written_by_omegaconf() -> None:
    config = OmegaConf.create({"where": Path("a") / "b"})

    assert parse_yaml(OmegaConf.to_yaml(config), "here") == {"where": Path("a/b")}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null"])
def test_nothing_is_an_empty_mapping(text: str) -> None:
    assert parse_yaml(text, "here") == {}


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [("a: [1\nb: 2\n", 2, 2), ("a: 1\n\tb: 2\n", 2, 1), ("a: 1\na: 2\n", 2, 1), ("x:\n  y: 1\n  y: 2\n", 3, 3)],
)
def test_malformed_yaml_is_reported_with_file_line_and_column(
    tmp_path: Path, text: str, line: int, column: int
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match="Malformed YAML in") as failure:
        load_yaml(path)

    assert f"{path}, line {line}, column {column}: " in str(failure.value)


def test_a_key_given_twice_is_named() -> None:
    with pytest.raises(ConfigError, match="'port' is given twice"):
        parse_yaml("port: 1\nhost: x\nport: 2\n", "here")


@pytest.mark.parametrize(("text", "holds"), [("- a\n- b\n", "a list"), ("words\n", "'words'"), ("5", "5")])
def test_something_other_than_a_mapping_is_refused(text: str, holds: str) -> None:
    with pytest.raises(ConfigError, match=f"here holds .*{holds}.*mapping"):
        parse_yaml(text, "here")


def test_tags_that_would_run_code_are_refused() -> None:
    with pytest.raises(ConfigError, match="Malformed YAML in here, line 1"):
        parse_yaml("a: !!python/object/apply:os.system [echo]", "here")


@pytest.mark.parametrize("text", ["a: \x00", "a: \udc80"])
def test_characters_that_no_yaml_may_hold_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Malformed YAML in here"):
        parse_yaml(text, "here")


def test_a_file_that_is_no_text_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff\xfe")

    with pytest.raises(ConfigError, match=r"binary\.yaml: not UTF-8"):
        load_yaml(binary)
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load_yaml(tmp_path)
