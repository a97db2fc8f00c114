import pytest

from nemo_gym.cli.command import wants_help
from nemo_gym.cli.config import check_arguments, read_command_line
from nemo_gym.errors import OverrideSyntaxError
from nemo_gym.runs.options import RolloutCollectionConfig

KNOWN = {"limit", "num_repeats", "agent_name", "verbose"}


@pytest.mark.parametrize(
    "argument", ["-h", "--help", "+help=true", "+h=true", "++help=True", "++h=1", "help=yes", "h=true"]
)
def test_help_is_asked_for_in_many_spellings(argument: str) -> None:
    assert wants_help(["+limit=5", argument])


@pytest.mark.parametrize("argument", ["+help=false", "+helpful=true", "--helpless", "+note=--help", "help"])
def test_other_arguments_do_not_ask_for_help(argument: str) -> None:
    assert not wants_help([argument])


@pytest.mark.parametrize("argument", ["+limit=5", "++limit=5", "limit=5", "~limit", "~a.b", "+a.b=-1", "x=", "é=1"])
def test_options_pass(argument: str) -> None:
    assert complaint_about([argument]) is None


def complaint_about(arguments: list[str]) -> str | None:
    try:
        check_arguments(arguments, KNOWN)
    except OverrideSyntaxError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--limit", "5"], "--limit 5: write +limit=5"),
        (["--limit=5"], "--limit=5: write +limit=5"),
        (["--limit", "-5"], "--limit -5: write +limit=-5"),
        (["--num-repeat", "4"], "--num-repeat 4: write +num_repeats=4"),
        (["--agent", "a b"], "--agent a b: write '+agent_name=a b'"),
        (["-v"], "-v: write +verbose=<value>"),
        (["--config", "a.yaml"], '--config a.yaml: write "+config_paths=[a.yaml]"'),
        (["a.yaml"], 'a.yaml: a config file is given as "+config_paths=[a.yaml]"'),
        (["+limit"], "+limit: write +limit=<value>"),
        (["limt"], "limt: write +limit=<value>"),
        (["help"], "help: write --help"),
        (["--model-api-key", "sk-1"], "--model-api-key ****: write +policy_api_key=<value>"),
        (["--hf-token=sk-1"], "--hf-token=****: no such option"),
        (["--zzz", "1"], "--zzz 1: no such option"),
        ([""], "'': no such option"),
    ],
)
def test_what_is_no_option_is_refused_with_what_was_probably_meant(arguments: list[str], remedy: str) -> None:
    with pytest.raises(OverrideSyntaxError, match="cannot read this argument") as refusal:
        check_arguments(arguments, KNOWN)
    assert remedy in str(refusal.value).splitlines()[1]
    assert "+name=value" in str(refusal.value)


def test_all_arguments_that_are_no_options_are_named_at_once_and_real_options_are_not() -> None:
    with pytest.raises(OverrideSyntaxError, match="cannot read 3 arguments") as refusal:
        check_arguments(["--limit", "+num_repeats=2", "--agent", "limit=3", "x.yaml"], KNOWN)
    lines = str(refusal.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == ["--limit", "--agent", "x.yaml"]


REQUIRED = ["input_jsonl_fpath", "output_jsonl_fpath"]


@pytest.mark.parametrize(
    ("arguments", "remedies"),
    [
        (["rows.jsonl", "out/a.jsonl"], ["+input_jsonl_fpath=rows.jsonl", "+output_jsonl_fpath=out/a.jsonl"]),
        (["+input_jsonl_fpath=a", "my out.jsonl"], ["'+output_jsonl_fpath=my out.jsonl'"]),
        (["limt", "rows.jsonl"], ["+limit=<value>", "+input_jsonl_fpath=rows.jsonl"]),
    ],
)
def test_words_are_answered_with_the_required_options_they_may_be_meant_for(
    arguments: list[str], remedies: list[str]
) -> None:
    with pytest.raises(OverrideSyntaxError) as refusal:
        check_arguments(arguments, KNOWN, REQUIRED)
    assert [line.partition(": write ")[2] for line in str(refusal.value).splitlines()[1:-1]] == remedies


def test_a_word_too_many_is_no_option() -> None:
    with pytest.raises(OverrideSyntaxError, match=r"c/d: no such option"):
        check_arguments(["a/b", "c/d"], KNOWN, ["entrypoint"])


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        (["+a={b:", "2}"], "'+a={b: 2}'"),
        (["+a={b:", "{c:", "-1},", "d:", "[1,", "2]}"], "'+a={b: {c: -1}, d: [1, 2]}'"),
        (["+config_paths=[a.yaml,", "b.yaml]"], "'+config_paths=[a.yaml, b.yaml]'"),
        (["+a={api_key:", "sk-1}"], "'+a=...'"),
    ],
)
def test_a_value_that_the_shell_has_split_is_answered_with_its_quotes(arguments: list[str], quoted: str) -> None:
    with pytest.raises(OverrideSyntaxError, match="cannot read this argument") as refusal:
        check_arguments([*arguments, "+limit=5"], KNOWN)
    assert str(refusal.value).splitlines()[1].endswith(f"put it into quotes: {quoted}")
    assert "sk-1" not in str(refusal.value)


@pytest.mark.parametrize("arguments", [["+a=[1,2]", "+b={c: 1}"], ["+note=(", "+limit=5"], ["+note=:]"]])
def test_values_that_are_whole_pass(arguments: list[str]) -> None:
    assert complaint_about(arguments) is None


def test_what_is_read_comes_before_what_is_written() -> None:
    with pytest.raises(OverrideSyntaxError, match=r"rows\.jsonl: write \+input_jsonl_fpath=rows\.jsonl"):
        read_command_line(["rows.jsonl"], RolloutCollectionConfig)
