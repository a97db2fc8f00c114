"""The pages for newcomers, word for word, in folders that have nothing of ours in them.

Those that go on with the files of "Five minutes" share its folder and its servers, so a page may not change what
another one looks at.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym.cli.command import EXIT_CTRL_C, EXIT_FAILED_RUN, EXIT_USER_MISTAKE
from nemo_gym.paths import PARENT_DIR
from nemo_gym.runs.record import FailureClass
from nemo_gym.terminal import EXIT_READER_GONE
from tests.guides import Walk, walk


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """Five minutes later: `results/first.jsonl` is there, and the servers are up."""
    with walk(tmp_path_factory.mktemp("five_minutes")) as walking:
        walking.follow("start/five-minutes.md")
        yield walking


def test_five_minutes(begun: Walk) -> None:
    assert len((begun.folder / "results/first.jsonl").read_text().splitlines()) == 40


def test_concepts(begun: Walk) -> None:
    assert "'my_env'" in begun.follow("start/concepts.md")


@pytest.mark.parametrize("page", ["looking-at-results", "trackers", "notebooks", "slurm-and-ray", "spending"])
def test_guides_that_go_on_from_there(page: str, begun: Walk) -> None:
    assert begun.follow(f"guides/{page}.md")


def test_comparing(begun: Walk, tmp_path: Path) -> None:
    with walk(tmp_path) as walking:  # its servers have another model
        beside = [f"results/first{end}" for end in ("_materialized_inputs.jsonl", "_manifest.json")]
        for name in ("tasks.jsonl", "results/first.jsonl", *beside):
            walking.write(name, (begun.folder / name).read_text())
        assert "95 % interval" in walking.follow("guides/comparing.md")


def test_your_model(begun: Walk, tmp_path: Path) -> None:
    endpoint = re.search(r"scripted_model +(http://\S+)", (begun.folder / "ng_run.out").read_text())
    assert endpoint is not None
    with walk(tmp_path) as walking:
        walking.follow("guides/your-model.md", {"https://endpoint.example": endpoint[1]})
        assert len((tmp_path / "results/warm.jsonl").read_text().splitlines()) == 10


def test_observing(tmp_path: Path) -> None:
    with walk(tmp_path) as walking:
        assert "responses 200" in walking.follow("guides/observing.md")
    assert len([*(tmp_path / "captures").glob("*.capture.jsonl")]) == 5


def test_troubleshooting(begun: Walk) -> None:
    assert "did you mean" in begun.follow("troubleshooting.md")
    page = (PARENT_DIR / "docs" / "troubleshooting.md").read_text()
    codes = (0, EXIT_FAILED_RUN, EXIT_USER_MISTAKE, EXIT_CTRL_C, EXIT_READER_GONE)
    assert [code for code in codes if f"### Exit code {code}\n" not in page] == []
    assert [kind for kind in FailureClass if f"### {kind}\n" not in page] == []
    for kind in FailureClass:
        entry = page.partition(f"### {kind}\n")[2].partition("\n### ")[0]
        assert all(f"**{part}**" in entry for part in ("Symptom", "Cause", "Remedy")), kind


@pytest.mark.parametrize("page", ["metrics-hooks", "slow-verdicts", "your-benchmark"])
def test_guides_that_begin_in_an_empty_folder(page: str, tmp_path: Path) -> None:
    with walk(tmp_path) as walking:
        assert "finished" in walking.follow(f"guides/{page}.md")


def test_no_guide_is_forgotten_here() -> None:
    here = Path(__file__).read_text()
    pages = [page for folder in ("start", "guides") for page in (PARENT_DIR / "docs" / folder).glob("*.md")]
    assert len(pages) >= 10
    assert [page.name for page in pages if page.stem not in here] == []
