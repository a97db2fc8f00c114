"""Which files of a data set on the hub make up a split: what its card says, else what their names say."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

_DATA_ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".jsonl.gz", ".jsonl.zst")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
_NAMES = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_ANY_SPLIT = frozenset().union(*_NAMES.values())


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
    import yaml

    found = _FRONT_MATTER.match(card)
    try:
        data = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        data = None
    return data if isinstance(data, Mapping) else {}
