"""The Hugging Face hub through its own client: rows of published data sets in, files out.

The client (the extra `hf`) is imported when it is needed. It honours `HF_ENDPOINT`, `HF_HOME` and a
saved login, keeps what it downloads, and bounds its own waits and retries. Data files are read
directly, so the `datasets` library is not needed.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.data.hub_files import files_of_split
from nemo_gym.errors import ConfigError, GymError, listed
from nemo_gym.paths import require_path_inside
from nemo_gym.row_files import MissingLibraryError, read_rows

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
_CARD = "README.md"
_UNAUTHORIZED = (401, 403)


class HubError(GymError):
    """The hub does not answer, or not as it should."""


class HubConfigError(ConfigError, ValueError):
    """Something on the hub does not exist, or the token may not see it."""


@dataclass(frozen=True)
class Hub:
    """Data sets on the hub."""

    token: str | None = None
    """None: the saved login or `HF_TOKEN`, if there is any."""
    endpoint: str | None = None
    """None: `HF_ENDPOINT`, else the public hub."""
    cache_dir: Path | None = None

    def file(self, repo_id: str, path: str) -> Path:
        """A file of a data set, as it is now on the hub; of the last visit when the hub cannot be reached.

        Raises:
            PathTraversalError: the path, which may come from the hub itself, leads out of the data set.
        """
        require_path_inside(path, f"the file of the data set {repo_id},")
        with explained(f"{path} of the data set {repo_id}"):
            downloaded = self.api.hf_hub_download(repo_id, path, repo_type="dataset", cache_dir=self.cache_dir)
            return Path(downloaded)

    def files(self, repo_id: str) -> list[str]:
        """The paths of all files of a data set."""
        with explained(f"the data set {repo_id}"):
            return sorted(self.api.list_repo_files(repo_id, repo_type="dataset"))

    def split_files(self, repo_id: str, split: str, name: str | None = None) -> list[str]:
        """The paths of the data files of a split; of the configuration `name` where there are several."""
        files = self.files(repo_id)
        card = self.file(repo_id, _CARD).read_text(encoding="utf-8", errors="replace") if _CARD in files else ""
        return files_of_split(files, split, name, card)

    def rows(self, repo_id: str, split: str, name: str | None = None) -> Iterator[dict[str, Any]]:
        """Every row of a split.

        Raises:
            HubConfigError: there is no such data set, or no file of it looks like that split.
        """
        paths = self.split_files(repo_id, split, name)
        if not paths:
            raise HubConfigError(
                f"the data set {repo_id} has no file that looks like the split {split!r}"
                f"{f' of {name!r}' if name else ''}; its files: {listed(self.files(repo_id))}. "
                "Name the file itself with `artifact_fpath`"
            )
        for path in paths:
            yield from self.file_rows(repo_id, path)

    def file_rows(self, repo_id: str, path: str) -> Iterator[dict[str, Any]]:
        """Every row of one data file."""
        for _, row in read_rows(self.file(repo_id, path)):
            yield row

    @cached_property
    def api(self) -> "HfApi":
        """The client."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint or os.environ.get("HF_ENDPOINT"), token=self.token)


@contextmanager
def explained(what: str, done: str = "read from") -> Iterator[None]:
    """Turn what the client raises into one line that says what was asked for and what to do."""
    try:
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise MissingLibraryError(
            "the Hugging Face hub needs huggingface_hub, which is not installed: pip install huggingface_hub "
            "(the extra `hf`)"
        ) from error
    of_http_library = [base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    expected: tuple[type[Exception], ...] = (HFValidationError, EntryNotFoundError, OSError, *of_http_library)
    try:
        yield
    except expected as error:
        raise _in_our_words(error, what, done) from error


def _in_our_words(error: BaseException, what: str, done: str) -> GymError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if status in _UNAUTHORIZED or "Gated" in type(error).__name__:
        return HubConfigError(
            f"{what} cannot be {done} the hub with this token, or without one ({reason}): accept its terms on its page "
            "if it has any, and pass +hf_token=<token> or log in with `hf auth login`"
        )
    if status is not None or isinstance(error, ValueError):
        return HubConfigError(
            f"{what} cannot be {done} the hub ({reason}): check the name; if it is private, pass +hf_token=<token>"
        )
    return HubError(f"{what} cannot be {done} the hub: {reason}")
