"""The types of fields that hold a path on this machine, and refuse a URL.

Python takes `s3://bucket/out.jsonl` for a path below the folder `s3:`, so a URL would be written to a local folder.
"""

import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, ValidationInfo

from nemo_gym.errors import ConfigError

_URL = re.compile(r"(?<![\w+.\-])([\w+.\-]++://)([^\s,]*+)")


def refuse_url(name: str, value: object) -> None:
    """Raise if a value that should be a path has a URL in it.

    Args:
        name: The option or key that has the value.
        value: What was given; anything but text passes.

    Raises:
        ConfigError: naming the option and the URL, without what may be secret in it.
    """
    found = _URL.search(value) if isinstance(value, str) else None
    if found is not None:
        scheme, rest = found.groups()
        _, has_user, place = rest.rpartition("@")
        shown = scheme + ("****@" if has_user else "") + place.partition("?")[0].partition("#")[0]
        raise ConfigError(
            f"{name}={shown}: a path on this machine is wanted, no URL; copy files from or to there by other means"
        )


def _checked(value: Any, info: ValidationInfo) -> Any:
    refuse_url(info.field_name or "a path", value)
    return value


_LOCAL = BeforeValidator(_checked)
PathText = Annotated[str, _LOCAL]
"""A path as it was typed; globs, and several paths separated by commas, are paths, too."""
LocalPath = Annotated[Path, _LOCAL]
"""The same as a `Path`."""


def holds_paths(annotation: Any, metadata: list[Any]) -> bool:
    """Return whether a field of this type holds paths, alone or in a list or mapping."""
    if annotation is Path or _LOCAL in metadata:
        return True
    inner = get_args(annotation)
    own = list(getattr(annotation, "__metadata__", ()))
    return _LOCAL in own or any(holds_paths(each, []) for each in inner if not isinstance(each, BeforeValidator))
