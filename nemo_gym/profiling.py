"""PUBLIC: what a server spends its time on, as a table, a call graph and a picture of it.

The profile is that of the thread which starts it, measured by Python itself. The call graph is drawn by
gprof2dot and Graphviz, neither of which is installed with this package.
"""

import cProfile
import importlib.util
import io
import logging
import pstats
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PrivateAttr

from nemo_gym.errors import ConfigError

__all__ = ["Profiler"]

logger = logging.getLogger(__name__)

_DRAWING_TIMEOUT_S = 120.0


class Profiler(BaseModel):
    """Measures from `start` to `stop`, and writes `<name>.log`, `.callgrind`, `.dot` and `.png`."""

    name: str
    base_profile_dir: Path
    required_str: str | None = None
    """Of the table, keep only lines that hold this."""
    _profile: cProfile.Profile = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Nothing is measured before `start`."""
        self._profile = cProfile.Profile()

    def start(self) -> None:
        """Begin to measure.

        Raises:
            ModuleNotFoundError: gprof2dot is not installed.
            ConfigError: Graphviz is not.
        """
        _require_programs()
        self.base_profile_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._profile.enable()
        except ValueError:  # Python measures for one at a time
            logger.warning("%s shares its process with what is profiled already: that profile shows it, too", self.name)

    def stop(self) -> None:
        """End measuring, and write what was measured."""
        self._profile.disable()
        self.dump()

    def dump(self) -> None:
        """Write what was measured so far."""
        self._profile.create_stats()
        self.base_profile_dir.mkdir(parents=True, exist_ok=True)
        base = self.base_profile_dir / self.name
        table = io.StringIO()
        statistics = pstats.Stats(self._profile, stream=table).sort_stats("cumulative")
        statistics.print_stats()
        Path(f"{base}.log").write_text(self._chosen(table.getvalue()))
        Path(f"{base}.callgrind").write_text(_callgrind(statistics))
        self._draw(base)

    def _chosen(self, table: str) -> str:
        if self.required_str is None:
            return table
        lines = table.splitlines(keepends=True)
        heads = next((number for number, line in enumerate(lines) if "ncalls" in line), 0) + 1
        return "".join([*lines[:heads], *(line for line in lines[heads:] if self.required_str in line)])

    def _draw(self, base: Path) -> None:
        graph = [sys.executable, "-m", "gprof2dot", "-f", "callgrind", "-o", f"{base}.dot", f"{base}.callgrind"]
        for program in (graph, ["dot", "-Tpng", f"{base}.dot", "-o", f"{base}.png"]):
            subprocess.run(program, check=True, timeout=_DRAWING_TIMEOUT_S)


def _require_programs() -> None:
    if importlib.util.find_spec("gprof2dot") is None:
        raise ModuleNotFoundError("profiling draws with gprof2dot, which is not installed: pip install gprof2dot")
    if shutil.which("dot") is None:
        raise ConfigError("profiling draws with `dot`, which is not installed: install Graphviz")


def _callgrind(statistics: pstats.Stats) -> str:
    """A profile in the format of callgrind, times in microseconds."""
    lines = ["version: 1", "creator: nemo_gym", "events: Microseconds", ""]
    called: dict[Any, list[str]] = {}
    measured: dict[Any, Any] = statistics.stats  # type: ignore[attr-defined]
    for function, (_, _, _, _, callers) in measured.items():
        for caller, (calls, _, _, total_s) in callers.items():
            file, line, name = function
            called.setdefault(caller, []).append(
                f"cfl={file}\ncfn={name}:{line}\ncalls={calls} {line}\n{caller[1]} {round(total_s * 1e6)}"
            )
    for function, (_, _, own_s, _, _) in measured.items():
        file, line, name = function
        lines += [f"fl={file}", f"fn={name}:{line}", f"{line} {round(own_s * 1e6)}", *called.get(function, ()), ""]
    return "\n".join(lines)
