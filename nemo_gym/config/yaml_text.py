"""YAML as OmegaConf reads it, ten times as fast: libyaml does the parsing where it is installed.

The dialect: `1e3` is a number, dates are text, a key given twice is an error.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from nemo_gym.config.trees import Tree
from nemo_gym.errors import ConfigError

_FLOAT = re.compile(
    r"""^(?:
     [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_STRING_TAG = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != _STRING_TAG:
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP_TAG]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
for _path_class in ("Path", "PosixPath", "WindowsPath"):  # the way OmegaConf writes the paths in a config
    _Loader.add_constructor(
        f"tag:yaml.org,2002:python/object/apply:pathlib.{_path_class}",
        lambda loader, node: Path(*loader.construct_sequence(node)),
    )


def parse_yaml(text: str, where: str) -> Tree:
    """The mapping that `text` spells, empty for empty text; `where` is how errors call it."""
    try:
        loaded = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"Malformed YAML in {where}{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"Malformed YAML in {where}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = "a list" if isinstance(loaded, list) else f"the single value {loaded!r}"
        raise ConfigError(f"{where} holds {kind}; a configuration is a mapping of names to values (`name: value`)")
    return loaded


def load_yaml(path: Path) -> Tree:
    """The mapping in one YAML file; an empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"Malformed YAML in {path}: not UTF-8 text ({error.reason} at {error.start})") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_yaml(text, str(path))
