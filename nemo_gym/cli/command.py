"""`@command`: what turns a function into a program.

Everything that belongs to the process happens here and nowhere else: reading argv, help pages,
logging, exit codes. The function itself gets typed arguments and returns nothing, or an exit code.

    @command(VersionConfig)
    def main(config: VersionConfig) -> None: ...

Exit codes: 0 ok, 1 a failed run, 2 the user's mistake, 130 Ctrl-C. A user's mistake is one message
on stderr (`NEMO_GYM_DEBUG=1` adds the traceback); anything unexpected is a bug and keeps its traceback.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from pydantic import BaseModel

from nemo_gym.cli.arguments import wants_help
from nemo_gym.errors import ConfigError, GymError
from nemo_gym.keys import NEMO_GYM_DEBUG_ENV_VAR_NAME, VERBOSE_KEY_NAME
from nemo_gym.terminal import harmless, print_traceback

if TYPE_CHECKING:
    from nemo_gym.global_config import GlobalConfigDictParserConfig

ConfigT = TypeVar("ConfigT", bound=BaseModel)

EXIT_FAILED_RUN = 1
EXIT_USER_MISTAKE = 2
EXIT_CTRL_C = 130
EXIT_READER_GONE = 141
"""What shells show for a program whose reader went away, as in `ng_help | head -1`."""


@dataclass(frozen=True)
class Loading:
    """How a command comes to its configuration."""

    needs_model: bool = True
    """False puts a stand-in model under the configuration, for commands that call no model."""
    initial: Mapping[str, Any] | None = None
    """Configuration below the command line and above config files and env.yaml."""
    offline: bool = False
    """Probe no port and look up no host name."""
    reads_config: bool = True
    """False for commands that depend on nothing but their options: no file is read."""
    parse: "Callable[[GlobalConfigDictParserConfig], Mapping[str, Any]] | None" = None
    """Parses in place of `set_global_config_dict`; a configuration handed over by a launcher is then left aside."""


def command(
    config_class: type[ConfigT],
    *,
    name: str | None = None,
    needs_model: bool = True,
    initial: Mapping[str, Any] | None = None,
    offline: bool = False,
    reads_config: bool = True,
    parse: "Callable[[GlobalConfigDictParserConfig], Mapping[str, Any]] | None" = None,
) -> Callable[[Callable[[ConfigT], Any]], "Command[ConfigT]"]:
    """Make `main(config)`, plain or async, a command with the options of `config_class`.

    The options are the fields of `config_class`; a help page takes what they mean from their docstrings, what the
    command does and its examples from the docstring of `main`. `name` is the script's name when it is not `ng_`
    and the name of the module; everything else is explained at `Loading`.
    """
    loading = Loading(needs_model, initial, offline, reads_config, parse)

    def wrap(main: Callable[[ConfigT], Any]) -> Command[ConfigT]:
        return Command(main, config_class, name or f"ng_{main.__module__.rpartition('.')[2]}", loading)

    return wrap


class Command(Generic[ConfigT]):
    """A program: called without arguments it runs on `sys.argv`, called with a config it is its function."""

    def __init__(
        self, main: Callable[[ConfigT], Any], config_class: type[ConfigT], name: str, loading: Loading
    ) -> None:
        functools.update_wrapper(self, main)
        self.main = main
        self.config_class = config_class
        self.name = name
        self.loading = loading

    def __call__(self, config: ConfigT | None = None) -> Any:
        """Run the program, or just the function when its arguments are given."""
        return self.run() if config is None else self.main(config)

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Do what the program does for these arguments; an exit code other than 0 is raised as SystemExit.

        Without arguments those of the process count, unless the process already has a configuration: then it does.
        """
        try:
            exit_code = self._run_and_flush(arguments)
        except ConfigError as error:
            exit_code = _report(error, EXIT_USER_MISTAKE)
        except GymError as error:
            exit_code = _report(error, EXIT_FAILED_RUN)
        except KeyboardInterrupt:
            print("\nInterrupted.", file=sys.stderr)
            exit_code = EXIT_CTRL_C
        except BrokenPipeError:
            if not _reader_is_gone():
                raise
            exit_code = EXIT_READER_GONE
        if exit_code:
            raise SystemExit(exit_code)

    def show_help(self) -> NoReturn:
        """Print the help page and exit."""
        from nemo_gym.cli.help import help_page, is_styled, page_width

        page = help_page(
            self.program,
            self.main.__doc__,
            self.config_class,
            reads_config=self.loading.reads_config,
            width=page_width(),
            styled=is_styled(sys.stdout),
        )
        print(page, end="")
        raise SystemExit(0)

    @property
    def program(self) -> str:
        """The name it was started under, where that is one of its own."""
        script = Path(sys.argv[0]).name
        return script if script == f"nemo_gym_{self.name.removeprefix('ng_')}" else self.name

    def _run_and_flush(self, arguments: Sequence[str] | None) -> int:
        """Flushing here, not at interpreter exit, lets a reader that went away be noticed in time."""
        try:
            exit_code = self._run(arguments)
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return exit_code

    def _run(self, given: Sequence[str] | None) -> int:
        if given is None:
            sys.excepthook = print_traceback
        arguments = sys.argv[1:] if given is None else given
        if wants_help(arguments):
            self.show_help()

        from nemo_gym.cli.loading import config_of_this_process, load_config
        from nemo_gym.cli.registry import HELP_OPTIONS
        from nemo_gym.cli.validation import validate_options
        from nemo_gym.log import setup_logging

        setup_logging()
        config = config_of_this_process() if given is None else None
        if config is None:
            config = load_config(arguments, self.config_class, self.loading)
        if any(config.get(option) for option in HELP_OPTIONS):
            self.show_help()
        setup_logging(verbose=bool(config.get(VERBOSE_KEY_NAME)))
        result = self._call_main(validate_options(self.config_class, config, self.program))
        return result if type(result) is int else 0

    def _call_main(self, config: ConfigT) -> Any:
        if not inspect.iscoroutinefunction(self.main):
            return self.main(config)
        from nemo_gym import event_loop

        return event_loop.run(self.main(config))


def _report(error: GymError, exit_code: int) -> int:
    if os.environ.get(NEMO_GYM_DEBUG_ENV_VAR_NAME, "0") not in ("", "0", "false"):
        import traceback

        print(harmless("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    print(harmless(f"Error: {error}"), file=sys.stderr)
    return exit_code


def _reader_is_gone() -> bool:
    """Whether whoever read our stdout has closed it; if so, nothing more is written there."""
    import select

    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return True
