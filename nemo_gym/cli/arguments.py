"""What stands on a command line before anything is parsed: a call for help, or something that is no option."""

import re
import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from nemo_gym.errors import OverrideSyntaxError
from nemo_gym.keys import MASK

_HELP_OPTION = re.compile(r"(\+\+|\+)?(h|help)=(true|yes|on|1)", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"[^\s\-][^\s=]*=", re.DOTALL)
_FLAG_MEANS = {
    "a": "agent_name",
    "agent": "agent_name",
    "concurrency": "num_samples_in_parallel",
    "config": "config_paths",
    "i": "input_jsonl_fpath",
    "input": "input_jsonl_fpath",
    "m": "policy_model_name",
    "model": "policy_model_name",
    "model_api_key": "policy_api_key",
    "model_url": "policy_base_url",
    "o": "output_jsonl_fpath",
    "output": "output_jsonl_fpath",
    "resume": "resume_from_cache",
    "v": "verbose",
}
"""Flags that people know from similar programs, and the option that does it here."""


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether the help page is asked for, in any of its spellings."""
    return any(argument in ("-h", "--help") or _HELP_OPTION.fullmatch(argument) for argument in arguments)


def check_arguments(arguments: Sequence[str], known: Collection[str]) -> None:
    """Refuse arguments that are no options, all at once, each with the spelling that was probably meant."""
    complaints = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument.startswith("-"):
            value = remaining.pop(0) if _takes_next(argument, remaining) else None
            complaints.append(_flag_complaint(argument, value, known))
        elif not argument.startswith("~") and not _ASSIGNMENT.match(argument):
            complaints.append(_word_complaint(argument, known))
    if complaints:
        lead = "cannot read this argument:" if len(complaints) == 1 else f"cannot read {len(complaints)} arguments:"
        close = "\nOptions are written +name=value; --help lists the options of this command."
        raise OverrideSyntaxError("\n  ".join([lead, *complaints]) + close)


def _takes_next(flag: str, following: Sequence[str]) -> bool:
    if "=" in flag or not following:
        return False
    return not re.match(r"[+~]|-\D", following[0]) and not _ASSIGNMENT.match(following[0])


def _flag_complaint(flag: str, following: str | None, known: Collection[str]) -> str:
    from nemo_gym.config.secrets import is_secret_key, mask_url_passwords

    dashed, equals, inline = flag.partition("=")
    name = dashed.lstrip("-").replace("-", "_")
    option = _nearest(name, known)
    value = inline if equals else following
    if value is not None:
        value = MASK if is_secret_key(name) or is_secret_key(option) else mask_url_passwords(value)
    given = dashed if value is None else f"{dashed}{equals or ' '}{value}"
    return f"{given}: no such option" if option is None else f"{given}: write {_spelled(option, value)}"


def _word_complaint(word: str, known: Collection[str]) -> str:
    name = word.lstrip("+")
    if name.endswith((".yaml", ".yml")):
        return f"{word}: a config file is given as {_spelled('config_paths', name)}"
    if name in ("h", "help"):
        return f"{word}: write --help"
    option = _nearest(name, known)
    return f"{word or repr(word)}: " + ("no such option" if option is None else f"write {_spelled(option, None)}")


def _nearest(name: str, known: Collection[str]) -> str | None:
    if name in known:
        return name
    if name in _FLAG_MEANS:
        return _FLAG_MEANS[name]
    close = get_close_matches(name, sorted({*known, "config_paths"}), n=1, cutoff=0.6)
    return close[0] if close else None


def _spelled(option: str, value: str | None) -> str:
    if value is None or value == MASK:
        return f"+{option}=<value>"
    return f'"+{option}=[{value}]"' if option == "config_paths" else shlex.quote(f"+{option}={value}")
