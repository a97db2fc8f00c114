"""The pages of docs/start and docs/guides, followed to the letter: what they show is typed, run and compared.

| block | is |
|---|---|
| `bash` | typed, line by line; `# exit code 2` says how a line ends; `ng_run` stays up until the next one, or the end |
| `python` | run as a program |
| any language and a name | written to that file |
| `text` right after one of the first two | what it prints; `…` stands for anything, alone for any lines |
| `console` | only shown: it would install something, or needs a key or a machine that tests do not have |

Tests run side by side, so the head server has a port of its own.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nemo_gym.paths import PARENT_DIR
from tests.ports import free_port
from tests.programs import Program
from tests.readmes import clean_environment, servers

_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXIT_CODE = re.compile(r"# exit code (\d+)$")
_COMMENT = re.compile(r"(?:^|\s)#\s.*$")  # `shlex` would take the `#` in `url#name` for one, too
_NEEDS_A_SHELL = re.compile(r"[|<>;&$*]")
_PROGRAM = "block.py"
_RUN = ("bash", "python")


class Walk:
    """A folder in which pages are followed one after the other."""

    def __init__(self, folder: Path, up: ExitStack) -> None:
        self.folder = folder
        self._up = up
        self._environment = {**clean_environment(), "XDG_CACHE_HOME": str(folder / ".cache")}
        self._head = f"head_server:\n  port: {free_port()}\n"
        self.write("env.yaml", "")

    def beside(self, folder: Path) -> "Walk":
        """A walk in another folder, with the same servers."""
        other = Walk(folder, self._up)
        other._head = self._head
        other.write("env.yaml", "")
        return other

    def follow(self, page: str, replaced: Mapping[str, str] | None = None) -> str:
        """Do what a page of docs/ says; `replaced` has what stands for something on it. Returns what was printed."""
        text = (PARENT_DIR / "docs" / page).read_text(encoding="utf-8")
        for written, real in (replaced or {}).items():
            assert written in text, f"{page} does not mention {written}"
            text = text.replace(written, real)
        everything, printed, end_of_last = "", None, 0
        for match in _BLOCK.finditer(text):
            language, name, content = match.groups()
            if name:
                self.write(name, content)
            elif language in _RUN:
                printed = self.type(content) if language == "bash" else self._python(content)
                everything += printed
            elif language == "text" and printed is not None and not text[end_of_last : match.start()].strip():
                assert_shown(content, printed, page)
            if language not in _RUN or name:
                printed = None
            end_of_last = match.end()
        return everything

    def write(self, name: str, content: str) -> None:
        """Put a file into the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + self._head if name == "env.yaml" else content)

    def type(self, block: str) -> str:
        """Type the lines of a block of shell commands; what they print."""
        printed = ""
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(_COMMENT.sub("", line))
            if not words:
                continue
            if words[0] == "ng_run" and not _EXIT_CODE.search(line):
                self._up.pop_all().close()
                self._up.enter_context(servers(words, self.folder))
                printed += (self.folder / "ng_run.out").read_text()
            elif (
                re.match(r"ng_|(gym|python)$", words[0])
                and words[1:2] != ["-c"]
                and not _NEEDS_A_SHELL.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", line))
            ):
                printed += self._command(words, int((_EXIT_CODE.findall(line) or ["0"])[0]))
            else:
                printed += self._bash(["bash", "-e", "-o", "pipefail", "-c", line])
        return printed

    def _python(self, program: str) -> str:
        self.write(_PROGRAM, program)
        try:
            return self._command(["python", _PROGRAM], 0)
        finally:
            (self.folder / _PROGRAM).unlink()

    def _command(self, words: list[str], wanted: int) -> str:
        program = Program(*words, folder=self.folder, environment=self._environment)
        try:
            code = program.wait()
            assert code == wanted, f"{shlex.join(words)}: {code}\n{program.stdout}{program.stderr}"
            return program.stderr + program.stdout  # the result comes last
        finally:
            program.stop()

    def _bash(self, command: list[str]) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**self._environment, "PATH": path}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
        return done.stdout


@contextmanager
def walk(folder: Path) -> Iterator[Walk]:
    """A walk that begins in an empty folder; servers that a page started stop at its end."""
    with ExitStack() as up:
        yield Walk(folder, up)


def assert_shown(expected: str, printed: str, page: str) -> None:
    """Every line of a page's output was printed, in the page's order; white space between words may differ."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    position = 0
    for line in expected.splitlines():
        wanted = " ".join(line.split())
        if wanted in ("", "…"):
            continue
        pattern = re.compile(re.escape(wanted).replace("…", ".*"))
        found = next((number for number in range(position, len(lines)) if pattern.fullmatch(lines[number])), None)
        assert found is not None, f"{page} shows {wanted!r}, which was not printed after line {position}:\n{printed}"
        position = found + 1
