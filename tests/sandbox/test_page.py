"""The page about sandboxes, followed to the letter."""

from pathlib import Path

from tests.guides import walk
from tests.sandbox.stand_ins import StandIn, docker
from tests.sandbox.test_local import isolation, needs_isolation

__all__ = ["docker", "isolation"]


@needs_isolation
def test_the_page_does_what_it_says(docker: StandIn, tmp_path: Path) -> None:
    with walk(tmp_path / "reader") as walking:
        printed = walking.follow("sandboxes.md", {'workdir="/work"': f'workdir="{tmp_path / "inside"}"'})
    assert "hello, world" in printed
    assert (tmp_path / "reader/numbers.txt").read_text() == "6 7\n"
    assert docker.containers() == {}
