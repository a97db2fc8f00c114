"""`+key=value`: Hydra's grammar, text taken literally, no trace left in the process."""

import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_gym.config.overrides import Change, apply_changes, change_tree, parse_overrides
from nemo_gym.errors import ConfigError, OverrideSyntaxError

TEXT = {"text"}


def value_of(argument: str, text_options: set[str] | None = None) -> Any:
    (change,) = parse_overrides([argument], TEXT if text_options is None else text_options)
    return change.value


def changed(tree: dict[str, Any], *arguments: str) -> dict[str, Any]:
    change_tree(tree, parse_overrides(arguments))
    return tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("true", True),
        ("null", None),
        ("", ""),
        ("word", "word"),
        ("two words", "two words"),
        ("'a,b'", "a,b"),
        ('"a=b"', "a=b"),
        ("[a.yaml,b.yaml]", ["a.yaml", "b.yaml"]),
        ("[a,[1,2]]", ["a", [1, 2]]),
        ("{agent_alpha: 4, agent_beta: 1}", {"agent_alpha": 4, "agent_beta": 1}),
        ("{a: {b: [1, x]}}", {"a": {"b": [1, "x"]}}),
        ("${other.key}", "${other.key}"),
        ("${oc.env:HOME,none}", "${oc.env:HOME,none}"),
        ("???", "???"),
    ],
)
def test_values_mean_what_they_mean_to_hydra(text: str, value: object) -> None:
    found = value_of(f"+anything={text}")

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "a/*.jsonl,b/*.jsonl",
        "0 < mean < 1",
        "http://host:8000/v1?x=1&y=2",
        "runs/lr=0.1/out.jsonl",
        "out (1).jsonl",
        "run(1).jsonl",
        "run(1)",
        "it's.jsonl",
        "~/data.jsonl",
        "données/été.jsonl",
        "日本語.jsonl",
        "a;b#c&d",
        "{curly",
        "[a-z]*.jsonl",
        "007",
        "1e3",
        "12",
        "1_000",
        "true",
        "nan",
        "int(3)",
        "str(3)",
        "choice(a,b)",
        "glob(*)",
        "range(1,5)",
        "a,",
        "'half quoted",
        "two\nlines",
    ],
)
def test_text_options_take_their_value_as_it_stands(text: str) -> None:
    assert value_of(f"+text={text}") == text


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab1 ,.=:/\\'\"[]{}()<>#~$*?é\n"), max_size=12))
def test_text_options_accept_whatever_is_typed(text: str) -> None:
    value = value_of(f"+text={text}")

    is_quoted_or_a_container = text.strip().startswith(("'", '"', "[", "{"))
    assert is_quoted_or_a_container or value in (text, _plain(text))


def _plain(text: str) -> str:
    """What Hydra makes of words: no space around them that is not escaped, no backslash before what it escapes."""
    pieces = re.findall(r"\\[\\()\[\]{}:=, \t]|.", text, re.DOTALL)
    while pieces and pieces[0].isspace():
        del pieces[0]
    while pieces and pieces[-1].isspace():
        del pieces[-1]
    return "".join(piece[-1] for piece in pieces)


def test_quotes_around_the_value_of_a_text_option_are_not_part_of_it() -> None:
    assert value_of("+text='0 < mean < 1'") == "0 < mean < 1"
    assert value_of('+text="007"') == "007"


@pytest.mark.parametrize(("text", "value"), [("null", None), ("[a,b]", ["a", "b"]), ("${key}", "${key}"), ("", "")])
def test_text_options_can_still_be_null_a_list_or_a_reference(text: str, value: object) -> None:
    assert value_of(f"+text={text}") == value


def test_nested_text_is_taken_as_it_stands_too() -> None:
    assert value_of("+responses_create_params.instructions=Be brief, be kind!") == "Be brief, be kind!"
    assert value_of("+responses_create_params.temperature=0.5") == 0.5


def test_lists_of_paths_and_addresses_are_literal_where_the_grammar_gives_up() -> None:
    assert value_of("+config_paths=[données/a.yaml, lr=1/b.yaml,'c,d.yaml']") == [
        "données/a.yaml",
        "lr=1/b.yaml",
        "c,d.yaml",
    ]
    assert value_of("+policy_base_url=[http://a/v1?x=1,http://b/v1]", {"policy_base_url"}) == [
        "http://a/v1?x=1",
        "http://b/v1",
    ]


@pytest.mark.parametrize("argument", ["+num=a,b", "+num=choice(1,2)", "+num=[choice(1,2)]", "+num={a: range(1,3)}"])
def test_sweeps_do_not_exist(argument: str) -> None:
    with pytest.raises(OverrideSyntaxError, match="sweep") as failure:
        parse_overrides([argument])

    assert argument in str(failure.value)


def test_what_the_grammar_rejects_is_answered_with_an_argument_that_works() -> None:
    with pytest.raises(OverrideSyntaxError) as failure:
        parse_overrides(["++filter=it's 0 < x"])

    shown = str(failure.value)
    example = shown[shown.index("is written ") + len("is written ") :]
    argument = subprocess.run(["sh", "-c", f"printf %s {example}"], capture_output=True, text=True, check=True).stdout
    assert "++filter=it's 0 < x" in shown
    assert value_of(argument, set()) == "it's 0 < x"


@pytest.mark.parametrize(
    "argument", ["word", "+word", "", "+", "~", "=5", "+=5", "+a b=5", "+a..b=1", "+.a=1", "+a.=1", "-x=1", "+a[x]=1"]
)
def test_what_is_no_option_is_quoted_back(argument: str) -> None:
    with pytest.raises(OverrideSyntaxError, match=r"\+name=value") as failure:
        parse_overrides([argument])

    assert repr(argument) in str(failure.value)


def test_no_message_repeats_a_secret() -> None:
    (change,) = parse_overrides(["+policy_api_key=sk-123"])
    (url,) = parse_overrides(["+db=http://user:hunter2@host"])
    with pytest.raises(OverrideSyntaxError) as failure:
        parse_overrides(["+my_token=a=b=hunter2"])

    assert change.argument == "+policy_api_key=****"
    assert url.argument == "+db=http://user:****@host"
    assert "hunter2" not in str(failure.value)


@pytest.mark.parametrize("mark", ["", "+", "++"])
def test_all_three_spellings_set_whether_the_key_was_there_or_not(mark: str) -> None:
    assert changed({"old": 1}, f"{mark}old=2", f"{mark}new=3") == {"old": 2, "new": 3}


def test_the_last_one_wins() -> None:
    assert changed({}, "+k=1", "k=2", "++k=3") == {"k": 3}
    assert changed({}, "+k=1", "~k") == {}
    assert changed({"k": 1}, "~k", "+k=2") == {"k": 2}


def test_nested_keys_make_their_way() -> None:
    assert changed(
        {"responses_create_params": {"top_p": 1.0}},
        "+responses_create_params.temperature=0.0",
        "+responses_create_params.metadata={a: b}",
    ) == {"responses_create_params": {"top_p": 1.0, "temperature": 0.0, "metadata": {"a": "b"}}}


def test_a_mapping_is_merged_and_a_list_replaced() -> None:
    assert changed({"m": {"a": 1}, "l": [1, 2]}, "+m={b: 2}", "+l=[3]") == {"m": {"a": 1, "b": 2}, "l": [3]}


def test_entries_of_lists_can_be_set_and_deleted() -> None:
    assert changed({"l": [{"x": 1}, 2, 3]}, "+l[0].x=5", "~l[1]") == {"l": [{"x": 5}, 3]}


def test_a_tilde_deletes_what_came_from_anywhere() -> None:
    assert changed({"a": {"b": 1, "c": 2}, "d": 3}, "~a.b", "~d") == {"a": {"c": 2}}


def test_a_tilde_with_a_value_deletes_only_that_value() -> None:
    assert changed({"a": 1}, "~a=1") == {}
    with pytest.raises(ConfigError, match="'a' only if it has that value"):
        changed({"a": 1}, "~a=2")


def test_deleting_what_is_not_there_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'~block\.prot'.*not in the configuration; did you mean 'port'\?"):
        changed({"block": {"port": 1}}, "~block.prot")


def test_setting_below_a_plain_value_says_what_stands_in_the_way() -> None:
    with pytest.raises(ConfigError, match=r"'a\.b' as '\+a\.b=1' asks: a is a single value"):
        changed({"a": 5}, "+a.b=1")


def test_the_first_part_of_a_path_is_the_option_it_belongs_to() -> None:
    assert [change.top_level_key for change in parse_overrides(["+a.b=1", "+c[0]=1", "~d"])] == ["a", "c", "d"]


def test_a_finished_config_can_be_changed_whatever_its_flags() -> None:
    config = OmegaConf.create({"a": {"b": 1}, "ref": "${a}", "gone": 1})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config, True)

    apply_changes(config, parse_overrides(["+a.c=2", "~gone", "+new=3", "+ref.d=4"]))

    assert config == {"a": {"b": 1, "c": 2}, "ref": {"b": 1, "c": 2, "d": 4}, "new": 3}
    assert OmegaConf.is_readonly(config)


def test_many_threads_can_parse_at_once_from_a_cold_start() -> None:
    program = """
        import sys
        from concurrent.futures import ThreadPoolExecutor
        sys.setswitchinterval(1e-6)
        from nemo_gym.config.overrides import parse_overrides

        arguments = ["+a={x: [1, {y: z}]}", "+b=[a,b]", "+t=a,b", "+c='q'", "+d=${x}", "+t=0 < x", "+e=1e3"]
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda _: repr(parse_overrides(arguments, {"t"})), range(48)))
        assert len(set(found)) == 1, found
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_a_program_that_has_hydra_set_up_is_left_alone(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "config.yaml").write_text("theirs: 1\n")
    with initialize_config_dir(str(tmp_path), version_base=None):
        before = GlobalHydra.instance().hydra
        with ThreadPoolExecutor(2) as pool:
            changes = pool.submit(parse_overrides, ["+ours=2"]).result(timeout=60)
        assert GlobalHydra.instance().hydra is before
        assert compose("config", overrides=["theirs=3"]) == {"theirs": 3}
    assert changes == (Change("ours", 2, delete=False, argument="+ours=2"),)


def test_parsing_writes_nothing(tmp_path: Path) -> None:
    parse_overrides(["+a=1", "+hydra.run.dir=elsewhere"])

    assert list(tmp_path.iterdir()) == []


def test_hydra_is_loaded_only_when_there_is_something_to_parse() -> None:
    program = """
        import sys
        import nemo_gym.global_config
        from nemo_gym.config.overrides import parse_overrides
        parse_overrides([])
        assert "hydra" not in sys.modules
        parse_overrides(["+a=1"])
        assert "hydra" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
