import site
from pathlib import Path

import pytest

from nemo_gym.launch.requirements import own_root_for_path, running_site_packages, search_path
from nemo_gym.paths import PARENT_DIR


def test_an_installation_in_site_packages_is_not_put_in_front_of_other_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert own_root_for_path() == PARENT_DIR
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(PARENT_DIR), "/not/there"])
    assert PARENT_DIR in running_site_packages()
    assert Path("/not/there") not in running_site_packages()
    assert own_root_for_path() is None


def test_a_search_path_has_no_gaps_and_no_repetitions() -> None:
    assert search_path([Path("/a"), None, "", "/b", Path("/a")]) == "/a:/b"
