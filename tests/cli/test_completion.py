import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_gym.cli.completion import answer, candidates, current_word, shell_script, tree_candidates

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "extra"
    for name in (
        "resources_servers/shop/configs/shop.yaml",
        "resources_servers/shop/configs/shop_hard.yaml",
        "responses_api_models/oracle/configs/oracle.yaml",
        "benchmarks/exam/config.yaml",
        "benchmarks/prompts/not_a_config.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    here = tmp_path / "here"
    for name in ("mine.yaml", "env.yaml", "has space.yaml", "rows.jsonl", "sub/deep/own.yaml"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(root))
    monkeypatch.chdir(here)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("ng_x ", ""),
        ("ng_x +li", "+li"),
        ("ng_x '+config_paths=[a, b", "+config_paths=[a, b"),
        ('ng_x "a" "+b=\'c', "+b='c"),
        ("ng_x a\\ b", "a b"),
        ("ng_x 'it''s", "its"),
    ],
)
def test_the_word_at_the_cursor_is_what_the_command_would_see(line: str, word: str) -> None:
    assert current_word(line) == word


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("+", ["+shell="]),
        ("++s", ["++shell="]),
        ("s", ["shell="]),
        ("", ["+shell="]),
        ("~", ["~shell"]),
        ("+x", []),
        ("-", ["--help"]),
        ("+++", []),
        ("+shell=", ["+shell=bash", "+shell=zsh"]),
        ("++shell=z", ["++shell=zsh"]),
        ("+nonsense=", []),
    ],
)
def test_options_and_their_choices_are_offered_in_the_spelling_that_was_begun(word: str, offered: list[str]) -> None:
    assert candidates("ng_completion", word) == offered


def test_commands_that_read_configs_offer_config_paths_and_unknown_ones_nothing_else() -> None:
    assert candidates("nemo_gym_validate", "+") == ["+benchmark=", "+config_paths=[", "+environment=", "+model="]
    assert candidates("ng_unheard_of", "~c") == ["~config_paths"]


def test_config_files_of_all_roots_and_of_the_folder_are_offered() -> None:
    offered = {word.partition("=[")[2] for word in candidates("ng_validate", "+config_paths=[")}
    assert {
        "mine.yaml",
        "sub/",
        "resources_servers/shop/configs/shop.yaml",
        "responses_api_models/oracle/configs/oracle.yaml",
        "benchmarks/exam/config.yaml",
    } <= offered
    assert not offered & {"env.yaml", "has space.yaml", "rows.jsonl"}


def test_the_bracket_is_added_when_it_is_missing() -> None:
    assert "++config_paths=[mine.yaml" in candidates("ng_validate", "++config_paths=")


def test_entries_after_a_comma_are_completed_and_not_offered_twice() -> None:
    offered = candidates("ng_validate", "+config_paths=[mine.yaml,resources_servers/shop/")
    assert [word.partition(",")[2] for word in offered] == [
        "resources_servers/shop/configs/shop.yaml",
        "resources_servers/shop/configs/shop_hard.yaml",
    ]
    assert candidates("ng_validate", "+config_paths=[mine.yaml,mine") == []


def test_the_only_file_left_comes_with_what_may_follow_it_even_inside_lone_folders() -> None:
    assert candidates("ng_validate", "+config_paths=[su") == [
        "+config_paths=[sub/deep/own.yaml,",
        "+config_paths=[sub/deep/own.yaml]",
    ]


def test_bash_is_given_only_the_part_it_replaces() -> None:
    assert answer("bash", "ng_completion", "ng_completion +shell=z", "z") == ["zsh"]
    assert answer("bash", "ng_completion", 'ng_completion "+shell=z', "+shell=z") == ["+shell=zsh"]
    assert answer("zsh", "ng_completion", "+shell=z", "") == ["+shell=zsh"]


def test_an_answer_needs_no_configuration_machinery() -> None:
    probe = (
        "import sys\nfrom nemo_gym.cli.completion import candidates\ncandidates('ng_version', '+')\n"
        "assert not {'omegaconf', 'hydra', 'yaml', 'asyncio'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


def test_the_script_covers_both_names_of_every_command(script: Script) -> None:
    for shell in ("bash", "zsh"):
        done = script("ng_completion", f"+shell={shell}")
        assert (done.returncode, done.stderr) == (0, "")
        assert {"ng_validate", "nemo_gym_validate", "ng_completion"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "replaced", "offered"),
    [
        ("ng_completion +", "+", ["+shell="]),
        ("ng_completion +shell=", "", ["bash", "zsh"]),
        (
            "ng_validate +config_paths=[mine.yaml,resources_servers/shop/configs/shop",
            "[mine.yaml,resources_servers/shop/configs/shop",
            [
                "[mine.yaml,resources_servers/shop/configs/shop.yaml",
                "[mine.yaml,resources_servers/shop/configs/shop_hard.yaml",
            ],
        ),
        ("ng_validate +nonsense=", "", []),
    ],
)
def test_bash_asks_and_understands(line: str, replaced: str, offered: list[str]) -> None:
    ask = (
        'source <(printf %s "$1"); complete -p ng_validate >/dev/null || exit 3\n'
        'COMP_LINE=$2; COMP_POINT=${#2}; _nemo_gym_complete "${2%% *}" "$3" ""\n'
        'for word in "${COMPREPLY[@]}"; do printf "%s\\n" "$word"; done'
    )
    source = shell_script("bash", ["ng_completion", "ng_validate"])
    done = subprocess.run(
        ["bash", "--norc", "-c", ask, "bash", source, line, replaced],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == offered


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("ng_completion +sh", "ng_completion +shell="),
        ("ng_completion ++shell=z", "ng_completion ++shell=zsh"),
        ("gym eval pro", "gym eval profile "),
        ("gym env start --model-type orac", "--model-type oracle "),
        ("ng_validate +config_paths=[mine.yaml,benchmarks/exa", "[mine.yaml,benchmarks/exam/config.yaml"),
        (
            "ng_validate '+config_paths=[responses_api_models/orac",
            "'+config_paths=[responses_api_models/oracle/configs/oracle.yaml",
        ),
    ],
)
def test_the_tab_key_completes_in_an_interactive_bash(tmp_path: Path, typed: str, becomes: str) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(shell_script("bash", ["ng_completion", "ng_validate", "gym"]))
    assert becomes in after_tab(["bash", "--norc", "--noprofile", "-i"], script, typed, becomes)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed here")
@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("gym eval pro", "gym eval profile "),
        ("ng_completion +sh", "ng_completion +shell="),
        (
            "ng_validate '+config_paths=[responses_api_models/orac",
            "'+config_paths=[responses_api_models/oracle/configs/oracle.yaml",
        ),
    ],
)
def test_the_tab_key_completes_in_an_interactive_zsh(tmp_path: Path, typed: str, becomes: str) -> None:
    script = tmp_path / "completion.zsh"
    script.write_text(shell_script("zsh", ["ng_completion", "ng_validate", "gym"]))
    assert becomes in after_tab(["zsh", "-f", "-i"], script, typed, becomes)


def after_tab(shell: list[str], script: Path, typed: str, expected: str) -> str:
    """What an interactive shell shows once `typed` and TAB were typed into it."""
    with interactive(shell) as terminal:
        os.write(terminal, f"PS1='ready''> '; source {script}\n".encode())
        read_until(terminal, "ready> ")
        os.write(terminal, f"{typed}\t".encode())
        return read_until(terminal, expected)


@contextmanager
def interactive(shell: list[str]) -> Iterator[int]:
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "400", "INPUTRC": os.devnull, "PS1": ""}
    subprocess.run(["stty", "cols", "400"], stdin=terminal, check=True)
    process = subprocess.Popen(
        shell, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
    )
    os.close(terminal)
    try:
        yield controller
    finally:
        process.kill()
        process.wait(timeout=60)
        os.close(controller)


def read_until(terminal: int, expected: str, timeout_s: float = 30) -> str:
    """Everything shown up to `expected`, or up to the deadline."""
    shown, deadline = "", time.monotonic() + timeout_s
    while expected not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace").replace("\a", "")
    return shown


def test_names_of_components_are_offered_where_options_take_them(tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    (extra / "benchmarks/exam/config.yaml").write_text("x: {datasets: [{type: benchmark}]}\n")
    (extra / "resources_servers/shop/configs/shop.yaml").write_text(
        "shop_clerk: # the agent\n  _inherit_from: x\n  responses_api_agents:\n    a: {}\nshop:\n  other: {}\n"
    )
    assert candidates("ng_e2e_collect_rollouts", "+benchmark=ex") == ["+benchmark=exam"]
    assert candidates("ng_run", "+environment=sho") == ["+environment=shop", "+environment=shop/shop_hard"]
    assert candidates("ng_validate", "+model=or") == ["+model=oracle"]
    assert candidates("ng_validate", "+model=s") == ["+model=scripted", "+model=scripted_model"]
    assert candidates("ng_run", "+model=vllm") >= ["+model=vllm:", "+model=vllm_model"]
    assert candidates("ng_collect_rollouts", "+agent_name=sho") == ["+agent_name=shop_clerk"]
    assert candidates("ng_collect_rollouts", "+benchmark=ex") == []
    assert answer("bash", "ng_run", "ng_run +model=vllm:", "") == [""]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("eval run --split ", {"benchmark ", "example ", "train ", "validation "}),
        ("eval run --split=ex", {"--split=example"}),
        ("eval run --agent mcqa_s", {"mcqa_simple_agent "}),
        ("list agents simp", {"simple_agent "}),
        ("list models openai", {"openai_model "}),
        ("list benchmarks gs", {"gsm8k "}),
        ("list environments example_sing", {"example_single_tool_call "}),
        ("list resources-servers structured", {"structured_outputs "}),
    ],
)
def test_values_of_flags_and_names_of_components_are_offered_after_gym(typed: str, offered: set[str]) -> None:
    *before, word = typed.split(" ")
    assert set(tree_candidates(before, word)) == offered
