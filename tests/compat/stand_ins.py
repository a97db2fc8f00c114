"""Stand-ins for what the original brings along, so small that an installer needs no network and no time for them."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

from nemo_gym.launch.requirements import compat_packages, unmet_package

_ASYNC_PLUGIN = """
import asyncio, inspect

def pytest_addoption(parser):
    parser.addini("asyncio_mode", "as in the real one", default="strict")

def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or pyfuncitem.config.getini("asyncio_mode") != "auto":
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
"""


def write_wheel(folder: Path, name: str, files: Mapping[str, str], version: str = "99.0", **metadata: str) -> None:
    """A package with these files; `metadata` holds more files of its `.dist-info`, dots in names as `_dot_`."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        info = f"{stem}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        for file, text in metadata.items():
            archive.writestr(f"{info}/{file.replace('_dot_', '.')}", text)
        archive.writestr(f"{info}/RECORD", "")


def write_compat_wheels(folder: Path) -> None:
    """Every package of the extra `compat` that is missing here."""
    missing = [name for name in compat_packages() if unmet_package(name)]
    assert {"defusedxml", "pytest-asyncio"} <= {*missing}
    for name in missing:
        module = name.replace("-", "_")
        if name == "pytest-asyncio":
            plugin = "[pytest11]\nasyncio = pytest_asyncio\n"
            write_wheel(folder, name, {"pytest_asyncio.py": _ASYNC_PLUGIN}, entry_points_dot_txt=plugin)
        else:
            write_wheel(folder, name, {f"{module}/__init__.py": f"NAME = {name!r}\n"})
