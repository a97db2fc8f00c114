"""Why a server process ended, in words that help: how it ended, its last lines, and what to do about it."""

import re
from collections.abc import Sequence
from pathlib import Path

from nemo_gym.cli.requirements import OWN_NAME, PROJECT_FILE, canonical
from nemo_gym.keys import SERVER_TYPES

_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<module>[\w.]+)'")
_PACKAGE_OF_MODULE = {
    "Crypto": "pycryptodome",
    "OpenSSL": "pyOpenSSL",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "git": "GitPython",
    "jwt": "PyJWT",
    "magic": "python-magic",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Where the package to install is not called like the module."""


def missing_import_remedy(lines: Sequence[str], requirements_file: Path) -> str | None:
    """What to add where, when the last lines show that a module is not installed."""
    found = [match["module"] for line in lines if (match := _MISSING_MODULE.search(line))]
    if not found:
        return None
    module = found[-1].partition(".")[0]
    if canonical(module) == OWN_NAME or module in SERVER_TYPES:
        return None
    package = _PACKAGE_OF_MODULE.get(module, module.replace("_", "-"))
    what = f'"{package}" to `dependencies`' if requirements_file.name == PROJECT_FILE else f"the line `{package}`"
    return f"The package {package!r} (module {found[-1]!r}) is not installed: add {what} in {requirements_file}"


def with_output(message: str, lines: Sequence[str], log_files: Sequence[Path], remedy: str | None = None) -> str:
    """`message` followed by where the log is, the last lines, and the remedy."""
    parts = [message]
    parts += [f"  log: {file}" for file in log_files]
    if lines:
        parts += ["  last lines:", *(f"  | {line}" for line in lines)]
    else:
        parts.append("  It has printed nothing.")
    if remedy:
        parts.append(remedy)
    return "\n".join(parts)
