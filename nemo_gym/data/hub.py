"""Data sets to and from the Hugging Face hub, through its own client, and those whose file is not there.

The client (the extra `hf`) is imported when it is needed. It honours `HF_ENDPOINT`, `HF_HOME` and a saved login,
keeps what it downloads, and bounds its own waits and retries. Data files are read directly, so the `datasets`
library is not needed; which files make up a split the data set's card says, else their names. A declared data set
whose file is missing is obtained from where it is published, or refused with the command that makes it.
"""

import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nemo_gym.config.files import load_yaml
from nemo_gym.data.declared import DeclaredDataset, Preparation, check_scripts, missing_script, run_scripts
from nemo_gym.data.metrics_files import writing_to
from nemo_gym.errors import ConfigError, ConfigPathNotFoundError, GymError, listed
from nemo_gym.global_config import maybe_get_global_config_dict
from nemo_gym.jsonl import to_line
from nemo_gym.keys import HF_TOKEN_KEY_NAME, RESOURCES_TYPE, RESPONSES_CREATE_PARAMS_KEY_NAME
from nemo_gym.paths import candidates, install_command, require_path_inside, resolve_for_reading
from nemo_gym.process_inputs import hub_address
from nemo_gym.row_files import MissingLibraryError, is_plain, read_rows
from nemo_gym.schemas.data_config import (
    BaseUploadJsonlDatasetHuggingFaceConfig,
    BenchmarkDatasetConfig,
    DataBackend,
    DataMode,
    DatasetConfig,
    DownloadJsonlDatasetHuggingFaceConfig,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

_DATA_ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".jsonl.gz", ".jsonl.zst")
_FRONT_MATTER = re.compile(r"\A---[^\S\n]*\n(.*?)\n---[^\S\n]*(\n|\Z)", re.DOTALL)
_NAMES = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_ANY_SPLIT = frozenset().union(*_NAMES.values())
SPLITS = ("train", "validation", "test")
_CARD = "README.md"
_UNAUTHORIZED = (401, 403)
_GITLAB_KEYS = ("mlflow_tracking_uri", "mlflow_tracking_token")


def files_of_split(files: Iterable[str], split: str, name: str | None = None, card: str = "") -> list[str]:
    """The paths among `files` that hold a split, in order.

    Args:
        files: every path of the data set.
        split: `train`, `validation`, `test`, or what the card calls it.
        name: the configuration, where the data set has several.
        card: the text of its README.
    """
    data = sorted(path for path in files if path.endswith(_DATA_ENDINGS) and not path.startswith("."))
    patterns = _patterns_on_card(card, split, name)
    if patterns:
        return [path for path in data if any(_fits(path, pattern) for pattern in patterns)]
    if name is not None:
        data = [path for path in data if name in _words(path) or f"{name}/" in path or name in path.rsplit("/")[-1]]
    named = [path for path in data if _words(path) & _NAMES.get(split, {split})]
    if named or split != "train":
        return named
    return [path for path in data if not _words(path) & _ANY_SPLIT]  # a data set without splits is all for training


def _words(path: str) -> set[str]:
    return set(re.split(r"[-_./\s]+", path.lower()))


def _fits(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, pattern.replace("**/", ""))


def _patterns_on_card(card: str, split: str, name: str | None) -> list[str]:
    configs = [entry for entry in _card_data(card).get("configs") or () if isinstance(entry, Mapping)]
    if name is not None:
        chosen = [entry for entry in configs if entry.get("config_name") == name]
    else:
        chosen = [entry for entry in configs if entry.get("default") or entry.get("config_name") == "default"]
        chosen = chosen or configs[:1]
    patterns: list[str] = []
    for entry in chosen[:1]:
        patterns += _patterns(entry.get("data_files"), split)
    return patterns


def _patterns(data_files: Any, split: str) -> list[str]:
    """`data_files` of a card: patterns for everything, or a list of `{split, path}`."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: list[str] = []
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("split") == split:
            paths = entry.get("path")
            patterns += [str(path) for path in (paths if isinstance(paths, list) else [paths])]
        elif isinstance(entry, str) and split == "train":
            patterns.append(entry)
    return patterns


def _card_data(card: str) -> Mapping[str, Any]:
    found = _FRONT_MATTER.match(card)
    try:
        data = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        data = None
    return data if isinstance(data, Mapping) else {}


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
        """A client of the hub, at this address and with this token."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint or hub_address(), token=self.token)


@contextmanager
def explained(what: str, done: str = "read from") -> Iterator[None]:
    """Turn what the client raises into one line that says what was asked for and what to do."""
    try:
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise MissingLibraryError(
            "the Hugging Face hub needs huggingface_hub, which is not installed; install it with: "
            f"{install_command('hf')}"
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
    return HubError(
        f"{what} cannot be {done} the hub: {reason}. Without a network to it, put the file in its place by hand, or "
        "name a mirror with the variable HF_ENDPOINT"
    )


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines, the file as a whole or not at all; how many there were."""
    count = 0
    with writing_to(path) as file:
        for row in rows:
            file.write(to_line(row))
            count += 1
    return count


def fetch_file(hub: Hub, repo_id: str, artifact: str, target: Path) -> None:
    """Copy a file of a data set as it is."""
    source = hub.file(repo_id, artifact)
    with writing_to(target) as file, source.open("rb") as downloaded:
        shutil.copyfileobj(downloaded, file)


def download_dataset(config: DownloadJsonlDatasetHuggingFaceConfig, hub: Hub) -> list[Path]:
    """Download what the command asks for; the files that were written."""
    if config.artifact_fpath:
        folder = Path(config.output_dirpath or "")
        target = Path(config.output_fpath) if config.output_fpath else folder / Path(config.artifact_fpath).name
        fetch_file(hub, config.repo_id, config.artifact_fpath, target)
        return [target]
    if config.output_fpath and config.split:
        return [_download_split(hub, config.repo_id, config.split, Path(config.output_fpath))]
    folder = Path(config.output_dirpath or "")
    splits = [config.split] if config.split else [each for each in SPLITS if hub.split_files(config.repo_id, each)]
    if not splits:
        raise HubConfigError(
            f"no file of {config.repo_id} looks like a split; its files: {listed(hub.files(config.repo_id))}. "
            "Name the one you want with +artifact_fpath=<path>"
        )
    return [_download_split(hub, config.repo_id, split, folder / f"{split}.jsonl") for split in splits]


def _download_split(hub: Hub, repo_id: str, split: str, target: Path) -> Path:
    count = write_jsonl(target, hub.rows(repo_id, split))
    logger.info("%s: %d rows of the split %r of %s", target, count, split, repo_id)
    return target


def upload_dataset(config: BaseUploadJsonlDatasetHuggingFaceConfig, hub: Hub) -> str:
    """Upload a file, making the repository and adding it to the collection where needed; the address of the commit."""
    source = resolve_for_reading(config.input_jsonl_fpath, Path.is_file)
    if not source.is_file():
        raise ConfigPathNotFoundError(f"input file {config.input_jsonl_fpath!r} not found (looked for {source})")
    if config.split == "train":
        _require_params(source)
    repo_id = repo_id_of(config)
    commit_options = {
        "revision": config.revision,
        "create_pr": config.create_pr,
        "commit_message": config.commit_message,
        "commit_description": config.commit_description,
    }
    address = push_file(hub, repo_id, source, config.split, **commit_options)
    with explained(f"the data set {repo_id}", "written to"):
        hub.api.add_collection_item(collection_of(config), repo_id, "dataset", exists_ok=True)
    return address


def push_file(hub: Hub, repo_id: str, source: Path, split: str, **commit_options: Any) -> str:
    """Upload a file of rows as a split of a data set, which is made, private, if need be; the address of the commit."""
    with explained(f"the data set {repo_id}", "written to"):
        hub.api.create_repo(repo_id, repo_type="dataset", private=True, exist_ok=True)
        commit = hub.api.upload_file(
            path_or_fileobj=source if is_plain(source) else b"".join(to_line(row) for _, row in read_rows(source)),
            path_in_repo=f"{split}.jsonl",
            repo_id=repo_id,
            repo_type="dataset",
            **commit_options,
        )
    return str(commit.pr_url or commit.commit_url)


def repo_id_of(config: BaseUploadJsonlDatasetHuggingFaceConfig) -> str:
    """`<organisation>/<prefix>-<domain>-<name>`, without the parts that are empty."""
    implementation, domain = _resources_server(config.resource_config_path)
    parts = [config.hf_dataset_prefix, domain.lower(), config.dataset_name or implementation.replace("/", "-")]
    return f"{config.hf_organization}/{'-'.join(part for part in parts if part)}"


def collection_of(config: BaseUploadJsonlDatasetHuggingFaceConfig) -> str:
    """The collection as the hub addresses it."""
    name = config.hf_collection_name.lower().replace(" ", "-")
    return f"{config.hf_organization}/{name}-{config.hf_collection_slug}"


def _resources_server(config_path: str) -> tuple[str, str]:
    """The folder name and the domain of the resources server that a config file defines."""
    path = resolve_for_reading(config_path, Path.is_file)
    if not path.is_file():
        raise ConfigPathNotFoundError(f"resource_config_path {config_path!r} not found (looked for {path})")
    for block in load_yaml(path).values():
        servers = block.get(RESOURCES_TYPE) if isinstance(block, Mapping) else None
        for implementation, inner in (servers or {}).items():
            return str(implementation), str((inner or {}).get("domain") or "")
    raise ConfigError(f"{path} defines no resources server, whose domain and name go into the repository's name")


def _require_params(source: Path) -> None:
    lacking = [line.number for line, row in read_rows(source) if RESPONSES_CREATE_PARAMS_KEY_NAME not in row]
    if lacking:
        raise ConfigError(
            f"{source} is not uploaded: rows of a train split need {RESPONSES_CREATE_PARAMS_KEY_NAME}, which lines "
            f"{listed(lacking)} lack"
        )


class MissingDatasetError(ConfigError, AssertionError):
    """Data sets that are declared but not there."""


def validate_backend_credentials(backend: DataBackend) -> tuple[bool, str]:
    """Whether the configuration has what a place to download from asks for, and if not, what is missing.

    Public data sets of the hub need no token.
    """
    config = _config()
    wanted = (HF_TOKEN_KEY_NAME,) if backend == "huggingface" else _GITLAB_KEYS
    lacking = [key for key in wanted if not config.get(key)]
    if not lacking:
        return True, ""
    name = "HuggingFace" if backend == "huggingface" else "GitLab"
    return False, f"{name} backend selected but missing credentials: set {', '.join(lacking)} in env.yaml"


def missing_of(datasets: Sequence[DeclaredDataset]) -> list[DeclaredDataset]:
    """Those whose file is not there, each file once."""
    missing = {str(dataset.config.jsonl_fpath): dataset for dataset in datasets if not dataset.path.is_file()}
    found = [dataset for dataset in datasets if str(dataset.config.jsonl_fpath) not in missing]
    for dataset in found:
        logger.info("Found: %s", dataset)
    return list(missing.values())


def obtain(
    missing: Sequence[DeclaredDataset], mode: DataMode, *, should_download: bool, data_source: DataBackend
) -> None:
    """Get every missing data set.

    Raises:
        MissingDatasetError: examples, which their author must write; or nothing may be downloaded; or nothing says
            from where.
    """
    if not missing:
        return
    listed = "".join(f"\n  {dataset}" for dataset in missing)
    if mode == "example_validation":
        raise MissingDatasetError(
            f"Missing:{listed}\nYou must provide the above missing example jsonl files ({_looked(missing)})"
        )
    if not should_download:
        raise MissingDatasetError(
            f"Missing local datasets:{listed}\nPass +should_download=true to get them ({_ways(missing)})"
        )
    for dataset in missing:
        _refuse_unobtainable(dataset, data_source)
    scripts = [
        Preparation(dataset.agent, dataset.config)
        for dataset in missing
        if isinstance(dataset.config, BenchmarkDatasetConfig)
    ]
    check_scripts(scripts)
    for dataset in missing:
        if isinstance(dataset.config, DatasetConfig):
            _download(dataset.config)
    run_scripts(scripts)


def problems_of_missing(datasets: Sequence[DeclaredDataset]) -> Iterator[tuple[DeclaredDataset, ConfigError]]:
    """One error for each data set whose rows are not there and cannot come from anywhere, or whose prompt is missing.

    Nothing is downloaded and no script is loaded: that a source is named is enough.
    """
    for dataset in datasets:
        try:
            _ = dataset.prompt
        except ConfigError as error:
            yield dataset, type(error)(f"the data set {dataset}: {error}")
    for dataset in missing_of(datasets):
        if isinstance(dataset.config, BenchmarkDatasetConfig):
            found = missing_script(Preparation(dataset.agent, dataset.config))
            if found is not None:
                yield dataset, MissingDatasetError(f"the data set {dataset} is {found[0]}: {found[1]}")
        elif not _identifiers(dataset.config):
            yield dataset, _nowhere_to_get(dataset)


def _identifiers(config: DatasetConfig) -> list[object]:
    return [each for each in (config.huggingface_identifier, config.gitlab_identifier) if each is not None]


def _nowhere_to_get(dataset: DeclaredDataset) -> MissingDatasetError:
    return MissingDatasetError(
        f"the data set {dataset} is not there and nothing says where to get it: write the file "
        f"({_looked([dataset])}), or add `source: {{type: huggingface, repo_id: ...}}` to its declaration"
    )


def _looked(missing: Sequence[DeclaredDataset]) -> str:
    first = missing[0].config.jsonl_fpath
    return f"looked for {', '.join(map(str, candidates(first)))}"


def _ways(missing: Sequence[DeclaredDataset]) -> str:
    scripted = any(isinstance(dataset.config, BenchmarkDatasetConfig) for dataset in missing)
    return "benchmarks by ng_prepare_benchmark, too" if scripted else "from their source"


def _refuse_unobtainable(dataset: DeclaredDataset, data_source: DataBackend) -> None:
    config = dataset.config
    if isinstance(config, BenchmarkDatasetConfig):
        return
    if not _identifiers(config):
        raise _nowhere_to_get(dataset)
    wants_gitlab = config.huggingface_identifier is None or (config.gitlab_identifier and data_source == "gitlab")
    if wants_gitlab:
        raise MissingDatasetError(
            f"the data set {dataset} is not there, and downloading from GitLab is not supported here: fetch it "
            "yourself, or name a Hugging Face source"
            + ("" if config.huggingface_identifier is None else " with +data_source=huggingface")
        )


def _download(config: DatasetConfig) -> None:
    source = config.huggingface_identifier
    assert source is not None
    target = Path(config.jsonl_fpath).expanduser()
    hub = configured_hub()
    logger.info("Downloading %s from %s", config.jsonl_fpath, source.repo_id)
    if source.artifact_fpath:
        fetch_file(hub, source.repo_id, source.artifact_fpath, target)
    else:
        write_jsonl(target, hub.rows(source.repo_id, config.type))


def configured_hub() -> Hub:
    """The hub with the token of this process's configuration, if it has one."""
    return Hub(token=_config().get(HF_TOKEN_KEY_NAME) or None)


def _config() -> Mapping[str, Any]:
    config: Mapping[str, Any] | None = maybe_get_global_config_dict()
    return {} if config is None else config
