"""What turns a function into a program: `command_named` for those with a page, `@command` for any other.

Everything that belongs to the process happens here and nowhere else: reading argv, help pages,
logging, exit codes. The function itself gets typed arguments and returns nothing, or an exit code.

    def version(config: VersionConfig) -> None: ...

Exit codes: 0 ok, 1 a failed run, 2 the user's mistake, 130 Ctrl-C. A user's mistake is one message
on stderr (`NEMO_GYM_DEBUG=1` adds the traceback); anything unexpected is a bug and keeps its traceback.

The help page is made from the words of the command and the fields of its config class, so it needs no
configuration and cannot disagree with what the command accepts. OmegaConf and Hydra's grammar are imported only
when there is something to parse, with `cli.config`.
"""

import contextlib
import functools
import gc
import inspect
import logging
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TextIO, TypeVar

from pydantic import BaseModel

from nemo_gym.cli.entry import end_after_a_page, interruptible, is_script
from nemo_gym.cli.pages import Loading
from nemo_gym.cli.registry import (
    HELP_OPTIONS,
    all_options,
    bare_name,
    config_class_of,
    find_command,
    loaded,
    shortcuts_of,
)
from nemo_gym.cli.tree import spelled_as_gym
from nemo_gym.config.options import Option, meanings_of, options_of, validate_options
from nemo_gym.errors import (
    ConfigError,
    GymError,
    UnknownOptionError,
    did_you_mean,
    file_problem,
    listed,
    names_a_file,
)
from nemo_gym.keys import ALLOW_UNKNOWN_KEYS_KEY_NAME, NEMO_GYM_DEBUG_ENV_VAR_NAME, VERBOSE_KEY_NAME
from nemo_gym.log import setup_logging
from nemo_gym.schemas.cli_config import Shortcuts
from nemo_gym.terminal import exit_code_of_lost_output, harmless, print_traceback

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

_HELP_OPTION = re.compile(r"(\+\+|\+)?(h|help)=(true|yes|on|1)", re.IGNORECASE)
_LACKING = re.compile(r"\+(?P<key>\w+)=<(?P<kind>[^<>]*)> is required")
_EXAMPLES = re.compile(r"^Examples?:[ \t]*$", re.MULTILINE)
_FIXED_LINE = re.compile(r"^(\s|[-*] |\d+\. |```)", re.MULTILINE)
ConfigT = TypeVar("ConfigT", bound=BaseModel)
EXIT_FAILED_RUN = 1
EXIT_USER_MISTAKE = 2
EXIT_CTRL_C = 130
_MIN_WIDTH, _MAX_WIDTH = 40, 120


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether the help page is asked for, in any of its spellings."""
    return any(argument in ("-h", "--help") or _HELP_OPTION.fullmatch(argument) for argument in arguments)


def config_of_this_process() -> Mapping[str, Any] | None:
    """The configuration this process already has, if any."""
    module = sys.modules.get("nemo_gym.global_config")
    config: Mapping[str, Any] | None = getattr(module, "_GLOBAL_CONFIG_DICT", None)
    return config


def page_width() -> int:
    """The terminal's width, within what can be read comfortably."""
    return max(_MIN_WIDTH, min(_MAX_WIDTH, shutil.get_terminal_size().columns))


def is_styled(stream: TextIO) -> bool:
    """Whether headings may be set in bold: on a terminal that can, unless `NO_COLOR` is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def heading(text: str, *, styled: bool) -> str:
    """A line that stands out where the terminal can show it."""
    return f"\033[1m{text}\033[0m" if styled else text


def help_page(
    program: str,
    doc: str | None,
    config_class: type[BaseModel],
    *,
    reads_config: bool = True,
    width: int = 80,
    styled: bool = False,
) -> str:
    """The whole page, required options first.

    Examples are what follows the line `Examples:` in `doc` or in the class's docstring.
    """
    description, examples = _split_doc(doc)
    if not examples:
        examples = _split_doc(config_class.__doc__)[1]
    options = sorted(options_of(config_class), key=lambda option: option.default is not None)
    usage = _usage(program, options, open_ended=reads_config)
    options += shortcuts_of(config_class)
    parts = [_filled(usage, width, " " * len("Usage: ")), _rewrapped(description, width)]
    if examples:
        parts.append(f"{heading('Examples:', styled=styled)}\n{textwrap.indent(examples, '  ')}")
    if options:
        meanings = meanings_of(Shortcuts) | meanings_of(config_class)
        listed = "\n".join(_option_lines(option, meanings.get(option.field, ""), width) for option in options)
        parts.append(f"{heading('Options:', styled=styled)}\n{listed}")
    else:
        parts.append("This command has no options of its own.")
    parts.append(_rewrapped(_closing(program, reads_config=reads_config), width))
    return "\n\n".join(part for part in parts if part) + "\n"


def print_help(program: str, doc: str | None, config_class: type[BaseModel], *, reads_config: bool = True) -> NoReturn:
    """Print the page as this terminal can show it, and exit."""
    page = help_page(
        program, doc, config_class, reads_config=reads_config, width=page_width(), styled=is_styled(sys.stdout)
    )
    print(page, end="", flush=True)
    end_after_a_page()
    raise SystemExit(0)


def show_help_of(config_class: type[BaseModel]) -> NoReturn:
    """The page of arguments that a program reads by itself, without a command of ours."""
    print(f"Displaying help for {config_class.__name__}")
    print_help(Path(sys.argv[0]).name, vars(config_class).get("__doc__"), config_class)


def _split_doc(doc: str | None) -> tuple[str, str]:
    description, *rest = _EXAMPLES.split(cleandoc(doc or ""), maxsplit=1)
    return description.strip(), textwrap.dedent(rest[0]).strip("\n").rstrip() if rest else ""


def _usage(program: str, options: list[Option], *, open_ended: bool) -> str:
    required = [f"+{option.name}=<{option.expects}>" for option in options if option.default is None]
    more = open_ended or len(options) > len(required)
    return " ".join(["Usage:", program, *required, *(["[+option=value ...]"] if more else [])])


def _filled(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _rewrapped(text: str, width: int) -> str:
    """Paragraphs filled to `width`; lists and indented blocks keep their lines."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        paragraph if _FIXED_LINE.search(paragraph) else _filled(paragraph, width) for paragraph in paragraphs
    )


def _option_lines(option: Option, meaning: str, width: int) -> str:
    state = "[required]" if option.default is None else f"[default: {option.default}]"
    lines = [f"  +{option.name}=<{option.expects}>  {state}"]
    if meaning:
        indent = " " * 6
        lines.append(textwrap.fill(meaning, width, initial_indent=indent, subsequent_indent=indent))
    return "\n".join(lines)


def _closing(program: str, *, reads_config: bool) -> str:
    prefix = "nemo_gym_" if program.startswith("nemo_gym_") else "ng_"
    other = spelled_as_gym(bare_name(program))
    listing = f"{f'Also typed as `{other}`; ' if other else ''}{prefix}help lists every command."
    if not reads_config:
        return listing
    return (
        'Config files are given as "+config_paths=[first.yaml,second.yaml]"; any key in them can be set like an '
        f"option, +key.inner=value, or removed, ~key.\n\n{listing}"
    )


def command(
    config_class: type[ConfigT],
    *,
    name: str | None = None,
    needs_model: bool = True,
    initial: Mapping[str, Any] | None = None,
    offline: bool = False,
    reads_config: bool = True,
    starts_servers: bool = False,
    takes_over: bool = True,
    further_checks: str | None = None,
) -> Callable[[Callable[[ConfigT], Any]], "Command[ConfigT]"]:
    """Make `main(config)`, plain or async, a command with the options of `config_class`.

    The options are the fields of `config_class`; a help page takes what they mean from their docstrings, what the
    command does and its examples from the docstring of `main`. `name` is the script's name when it is not `ng_`
    and the name of the module; everything else is explained at `Loading`.
    """
    loading = Loading(needs_model, initial, offline, reads_config, starts_servers, takes_over, further_checks)

    def wrap(main: Callable[[ConfigT], Any]) -> Command[ConfigT]:
        return Command(main, config_class, name or f"ng_{main.__module__.rpartition('.')[2]}", loading)

    return wrap


class Command(Generic[ConfigT]):
    """A program: called without arguments it runs on `sys.argv`, called with a config it is its function."""

    def __init__(
        self,
        main: Callable[[ConfigT], Any] | str,
        config_class: type[ConfigT],
        name: str,
        loading: Loading,
        words: str | None = None,
    ) -> None:
        """Of a function, or of what `module:function` stands for, which is loaded when it is to be called.

        Args:
            main: The function.
            config_class: Its arguments.
            name: The program, as it is typed.
            loading: How it comes to its configuration.
            words: For the help page; if unset, the docstring of the function.
        """
        if not isinstance(main, str):
            functools.update_wrapper(self, main)
        self._main = main
        self.config_class = config_class
        self.name = name
        self.loading = loading
        self.words = words or self.main.__doc__
        self.flags: Mapping[str, str] = {}
        """How its options are typed in another spelling, if it was started in that."""

    @functools.cached_property
    def main(self) -> Callable[[ConfigT], Any]:
        """The function that does the work."""
        return loaded(self._main) if isinstance(self._main, str) else self._main

    def __call__(self, config: ConfigT | None = None) -> Any:
        """Run the program, or just the function when its arguments are given."""
        if config is None:
            return self.run()
        with _garbage_collector_restored():
            return self.main(config)

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Do what the program does for these arguments; an exit code other than 0 is raised as SystemExit.

        Without arguments those of the process count, unless the process already has a configuration: then it does.
        """
        try:
            with _garbage_collector_restored():
                exit_code = self._run_and_flush(arguments)
        except GymError as error:
            exit_code = _report(error, exit_code_of(error), self.flags)
        except KeyboardInterrupt as error:
            print("\nInterrupted.", file=sys.stderr)
            exit_code = exit_code_of(error)
        except OSError as error:
            lost = exit_code_of_lost_output(error)
            if lost is None and not names_a_file(error):
                raise
            exit_code = _report_file(error) if lost is None else lost
        if exit_code:
            raise SystemExit(exit_code)

    def show_help(self) -> NoReturn:
        """Print the help page and exit."""
        print_help(self.program, self.words, self.config_class, reads_config=self.loading.reads_config)

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
        if is_script():
            sys.excepthook = print_traceback
        arguments = sys.argv[1:] if given is None else given
        if wants_help(arguments):
            self.show_help()
        setup_logging()
        config = config_of_this_process() if given is None else None
        if config is None:
            config = self._load_config(arguments)
        else:
            arguments = []
        if any(config.get(option) for option in HELP_OPTIONS):
            self.show_help()
        setup_logging(verbose=bool(config.get(VERBOSE_KEY_NAME)))
        main, options = self.main, self._options_in(config, arguments)
        with interruptible:
            result = _called(main, options)
        return result if type(result) is int else 0

    def _options_in(self, config: Mapping[str, Any], arguments: Sequence[str]) -> ConfigT:
        unread = self._unread(arguments)
        try:
            options = validate_options(self.config_class, config, self.program)
        except ConfigError as error:
            if not unread:
                raise
            raise ConfigError(f"{error} It does not read {listed(unread)}.") from error
        if unread and not self.loading.reads_config and not config.get(ALLOW_UNKNOWN_KEYS_KEY_NAME):
            raise UnknownOptionError(self._in_place_of(unread))
        return options

    def _unread(self, arguments: Sequence[str]) -> list[str]:
        """The arguments that set options of other commands."""
        if not arguments:
            return []
        own = {name for option in options_of(self.config_class) for name in option.names}
        others = {name for option in all_options() for name in option.names} - own
        return [f"+{name}" for name in dict.fromkeys(map(_name_in, arguments)) if name in others]

    def _in_place_of(self, unread: Sequence[str]) -> str:
        """What a command that depends on nothing but its options says to others, which would have no effect."""
        own = [f"+{option.name}" for option in options_of(self.config_class)]
        meant = "".join(did_you_mean(option, own) for option in unread) or f"; it takes {listed(own)}"
        return f"{self.program} does not read {listed(unread)}{meant}"

    def _load_config(self, arguments: Sequence[str]) -> Mapping[str, Any]:
        if not arguments and not self.loading.reads_config:
            return {}
        from nemo_gym.cli.config import load_config

        return load_config(arguments, self.config_class, self.loading)


@contextlib.contextmanager
def _garbage_collector_restored() -> Iterator[None]:
    """Undo `runtime.collect_garbage_less_often` at the end, unless the process ends with the command."""
    thresholds, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    try:
        yield
    finally:
        if not is_script():
            gc.set_threshold(*thresholds)
            if not was_frozen:
                gc.unfreeze()


def command_named(name: str) -> Command[Any]:
    """The command `ng_<name>`; its work is loaded when it is run.

    Raises:
        LookupError: there is none.
    """
    info = find_command(name)
    config_class = config_class_of(info) if info else None
    if info is None or config_class is None:
        raise LookupError(f"there is no command {name!r}")
    return Command(info.body, config_class, f"ng_{info.name}", info.loading, info.words)


def _called(main: Callable[[ConfigT], Any], config: ConfigT) -> Any:
    if not inspect.iscoroutinefunction(main):
        return main(config)
    from nemo_gym import runtime

    return runtime.run(main(config))


def _name_in(argument: str) -> str:
    return argument.lstrip("+").partition("=")[0].partition(".")[0]


def exit_code_of(error: BaseException) -> int:
    """Return how a command ends that is ended by this error."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_CTRL_C
    if isinstance(error, OSError) and not isinstance(error, GymError) and names_a_file(error):
        error = file_problem(error)
    return EXIT_USER_MISTAKE if isinstance(error, ConfigError) else EXIT_FAILED_RUN


def _report_file(error: OSError) -> int:
    """Report what the system says about a file, which is no fault of the program, in one line."""
    problem = file_problem(error)
    problem.__cause__ = error
    return _report(problem, exit_code_of(problem))


def _report(error: GymError, exit_code: int, flags: Mapping[str, str] | None = None) -> int:
    if os.environ.get(NEMO_GYM_DEBUG_ENV_VAR_NAME, "0") not in ("", "0", "false"):
        print(harmless("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    text = _LACKING.sub(lambda match: _with_flag(match, flags), str(error)) if flags else str(error)
    print(harmless(f"Error: {text}"), file=sys.stderr)
    return exit_code


def _with_flag(lacking: re.Match[str], flags: Mapping[str, str]) -> str:
    """`--output <text> (+output_jsonl_fpath) is required`, for whoever types flags."""
    key, kind = lacking["key"], lacking["kind"]
    return f"{flags[key]} <{kind}> (+{key}) is required" if key in flags else lacking[0]
