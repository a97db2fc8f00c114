"""The pages of the documentation as they are handed to the builder: every link leads somewhere, nothing is left out."""

import re
from pathlib import Path

import pytest

from docs.site import llms
from docs.site.__main__ import from_the_network
from docs.site.markdown import anchors, escaped, first_sentence, links
from docs.site.pages import Site, site
from nemo_gym.cli.registry import COMMANDS, all_options, config_class_of
from nemo_gym.cli.workloads import InitWorkloadConfig, TestWorkloadConfig, ValidateWorkloadConfig
from nemo_gym.config.options import options_of
from nemo_gym.http.settings import GlobalAIOHTTPAsyncClientConfig
from nemo_gym.keys import NEMO_GYM_RESERVED_TOP_LEVEL_KEYS, OBSERVED_KEYS, WELL_KNOWN_KEYS
from nemo_gym.paths import PARENT_DIR
from nemo_gym.schemas.cli_config import Shortcuts

_HISTORY = {"changelog.md", "compatibility.md"}
"""Pages that speak of what was, or is elsewhere."""
_NO_COMMANDS = {"ng_check_rows", "ng_gitlab_to_hf_dataset", "ng_replicable", "ng_stop_reason", *OBSERVED_KEYS}
"""Routes, a command of the original, fields."""
_MADE_UP = {"key", "name", "outer", "list", "map", "note", "nothing", "flag", "number", "agent_nam"}
"""Stand for any option, or for a mistake."""


@pytest.fixture(scope="module")
def pages() -> Site:
    return site()


def test_every_link_and_every_anchor_resolves(pages: Site) -> None:
    assert pages.problems() == []


def test_every_link_of_the_first_page_resolves() -> None:
    for link in links((PARENT_DIR / "README.md").read_text(encoding="utf-8")):
        file, _, anchor = link.target.partition("#")
        if ":" not in file:
            assert (PARENT_DIR / file).exists(), link.target
            assert not anchor or anchor in anchors((PARENT_DIR / file).read_text(encoding="utf-8")), link.target


def test_links_that_lead_nowhere_are_found() -> None:
    text = "# A page\n\n[a](b.md) [c](c.md#here) [d](#there) `[e](no_link.md)` [f](https://example.com)\n"
    made = Site({"a.md": text, "c.md": "# C\n\n```\n# here\n```\n"})

    assert made.problems() == [
        "a.md: b.md leads nowhere",
        "a.md: c.md#here: c.md has no heading 'here'",
        "a.md: #there: a.md has no heading 'there'",
    ]


@pytest.mark.parametrize("info", COMMANDS, ids=lambda info: info.name)
def test_every_option_of_every_command_is_in_the_reference(info: object, pages: Site) -> None:
    found = next(each for each in COMMANDS if each is info)
    config_class = config_class_of(found)
    assert config_class is not None
    text = pages.pages[f"reference/commands/ng_{found.name}.md"]
    assert [name for option in options_of(config_class) for name in option.names if f"`+{name}`" not in text] == []


def test_every_key_of_the_configuration_is_in_the_reference(pages: Site) -> None:
    text = pages.pages["reference/config-keys.md"]
    keys = {*NEMO_GYM_RESERVED_TOP_LEVEL_KEYS, *WELL_KNOWN_KEYS}
    assert [key for key in sorted(keys) if f"| `{key}` |" not in text] == []


def test_every_key_of_records_is_in_the_reference(pages: Site) -> None:
    sources = "".join(path.read_text() for path in (PARENT_DIR / "nemo_gym").rglob("*.py"))
    named = set(re.findall(r'"(_ng_[a-z_]+)"', sources)) - {"_ng_failure"}  # the beginning of several
    assert len(named) > 12
    assert [key for key in sorted(named) if f"| `{key}` |" not in pages.pages["reference/file-formats.md"]] == []


def test_every_module_has_its_page_in_the_gallery(pages: Site) -> None:
    readmes = list(PARENT_DIR.glob("*/*/README.md"))
    assert len(readmes) >= 24
    for readme in readmes:
        (found,) = [
            path for path in pages.pages if path.startswith("gallery/") and path.endswith(f"/{readme.parent.name}.md")
        ]
        assert readme.read_text(encoding="utf-8").splitlines()[0] in pages.pages[found]
    assert "| `grading_mode` |" in pages.pages["gallery/environments/mcqa.md"]
    assert "gsm8k_benchmark.jsonl" in pages.pages["gallery/benchmarks/gsm8k.md"]


def test_the_http_api_is_that_of_the_servers(pages: Site) -> None:
    for server, endpoint in (
        ("head", "GET /server_instances"),
        ("agent", "POST /run"),
        ("resources-server", "POST /verify"),
        ("model-server", "POST /v1/responses"),
    ):
        assert f"## {endpoint}\n" in pages.pages[f"reference/http-api/{server}.md"]
    assert "| `responses_create_params` |" in pages.pages["reference/http-api/types.md"]


def test_files_for_programs_that_read_list_every_page(pages: Site) -> None:
    made = llms.files(pages)

    unlisted = {path for path in pages.pages if path.endswith(".md") and f"]({path})" not in made["llms.txt"]}
    assert unlisted == {"index.md"}
    assert "{toctree}" not in made["index.md"]
    assert "# Collecting rollouts" in made["llms-full.txt"]


def test_what_would_come_from_the_network_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://example.com">x</a><script src="_static/a.js"></script>')
    assert from_the_network(tmp_path) == []

    (tmp_path / "bad.html").write_text(
        '<link rel="stylesheet" href="https://a.example/x.css"><img src="//b.example/y">'
    )
    (tmp_path / "bad.css").write_text(
        '@import "https://c.example/z.css"; a { background: url(https://d.example/w.png) }'
    )
    assert from_the_network(tmp_path) == [
        "bad.css loads https://c.example/z.css",
        "bad.css loads https://d.example/w.png",
        "bad.html loads https://a.example/x.css",
        "bad.html loads //b.example/y",
    ]


def test_text_stands_in_a_page_as_it_was_written() -> None:
    assert escaped("a <stem> and `<stem>|x` *b*") == r"a \<stem\> and `<stem>\|x` \*b\*"
    assert escaped("ng_run or _x_ y") == r"ng_run or \_x\_ y"
    assert first_sentence("# T\n\nOne [page](x.md)\nof two. Then more.") == "One page of two."


def test_every_command_and_option_that_a_page_mentions_exists(pages: Site) -> None:
    commands = {f"ng_{info.name}" for info in COMMANDS}
    options = {name for option in all_options() for name in option.names} | set(Shortcuts.model_fields)
    options |= {*NEMO_GYM_RESERVED_TOP_LEVEL_KEYS, *WELL_KNOWN_KEYS, *GlobalAIOHTTPAsyncClientConfig.model_fields}
    for config_class in (ValidateWorkloadConfig, TestWorkloadConfig, InitWorkloadConfig):  # commands of `gym` alone
        options |= {name for option in options_of(config_class) for name in option.names}
    everything = "".join(pages.pages.values())
    options |= set(re.findall(r"^(\w+):$", everything, re.MULTILINE))  # servers of the configs that pages show
    options |= set(re.findall(r"\$\{(\w+)\}", everything))
    unknown = {}
    for path, text in pages.pages.items():
        if path in _HISTORY or not path.endswith(".md"):
            continue
        found = set(re.findall(r"\bng_[a-z0-9_]+\b(?!:)", text)) - commands - _NO_COMMANDS
        found |= set(re.findall(r"(?<![\w+])\+{1,2}([a-z_]+)(?:[.\[][\w.\]]*)?=", text)) - options - _MADE_UP
        if found:
            unknown[path] = found
    assert unknown == {}
