"""Two files that define one instance in different ways: the message names both."""

from pathlib import Path
from typing import Any

import pytest

from nemo_gym.config.checks import conflicting_definitions, warn_of_differing_definitions
from nemo_gym.config.files import ConfigFile
from nemo_gym.config.trees import merge_trees
from nemo_gym.errors import DuplicateInstanceError


def model(implementation: str, **settings: Any) -> dict[str, Any]:
    return {"responses_api_models": {implementation: settings}}


def file(path: str, included: set[Path] | None = None, **tree: Any) -> ConfigFile:
    return ConfigFile(Path(path), tree, included or set())


def test_files_that_make_one_instance_two_servers_are_both_named() -> None:
    files = [
        file("a.yaml", policy=model("vllm", entrypoint="app.py")),
        file("b.yaml", other=model("x", entrypoint="app.py")),
        file("c.yaml", policy=model("openai", entrypoint="app.py")),
    ]

    problems = conflicting_definitions(files, merge_trees([each.tree for each in files]))

    assert list(problems) == ["policy"]
    assert isinstance(problems["policy"], DuplicateInstanceError)
    assert "'policy' is responses_api_models/vllm in a.yaml and responses_api_models/openai in c.yaml" in str(
        problems["policy"]
    )


def test_different_server_types_are_a_conflict_too() -> None:
    files = [
        file("a.yaml", name=model("m", entrypoint="app.py")),
        file("b.yaml", name={"resources_servers": {"r": {"entrypoint": "app.py"}}}),
    ]

    assert list(conflicting_definitions(files, merge_trees([each.tree for each in files]))) == ["name"]


def test_one_file_may_replace_a_server_after_deleting_it() -> None:
    files = [file("a.yaml", policy=model("vllm")), file("b.yaml", policy=model("openai"))]

    assert conflicting_definitions(files, {"policy": model("openai")}) == {}


def test_two_servers_in_one_file_are_no_conflict_between_files() -> None:
    both = {"responses_api_models": {"a": {"entrypoint": "app.py"}, "b": {"entrypoint": "app.py"}}}

    assert conflicting_definitions([file("a.yaml", policy=both)], {"policy": both}) == {}


def test_full_definitions_that_differ_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_differing_definitions(
        [
            file("a.yaml", policy=model("vllm", entrypoint="app.py", limit=1)),
            file("b.yaml", policy=model("vllm", entrypoint="app.py", limit=2)),
        ]
    )

    (record,) = caplog.records
    assert "'policy' is defined by a.yaml and, differently, by b.yaml" in record.getMessage()


@pytest.mark.parametrize(
    "later",
    [
        file("b.yaml", policy=model("vllm", limit=2)),
        file("b.yaml", policy=model("vllm", entrypoint="app.py", limit=1)),
        file("b.yaml", {Path("a.yaml")}, policy=model("vllm", entrypoint="app.py", limit=2)),
    ],
    ids=["adjusts a value", "says the same", "includes the other"],
)
def test_meant_overrides_raise_no_warning(caplog: pytest.LogCaptureFixture, later: ConfigFile) -> None:
    warn_of_differing_definitions([file("a.yaml", policy=model("vllm", entrypoint="app.py", limit=1)), later])

    assert caplog.records == []
