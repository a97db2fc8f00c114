"""`+benchmark=gsm8k`, `+environment=mcqa`, `+model=openai:gpt-x`: a word for the config paths and keys it stands for.

`expand` turns such arguments into those of the long way, so whatever reads arguments knows the long way only. They
count as text on the command line; a key of the same name that a config file has, or refers to, stays that key.

Whose key goes where: `policy_api_key` of env.yaml belongs to `policy_base_url` of env.yaml if there is one, a vendor's
environment variable to that vendor. No key is sent anywhere else because of a short way.
"""

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from nemo_gym.cli.registry import shortcuts_of
from nemo_gym.config.components import KINDS, Kind, benchmark_configs, environment_configs, server_configs
from nemo_gym.config.files import config_paths_in, load_config_files, load_env_file
from nemo_gym.config.overrides import Change, parse_overrides
from nemo_gym.config.references import apply_directives, names_used_by_interpolations
from nemo_gym.config.secrets import mask_url_passwords
from nemo_gym.config.trees import Tree, merge_trees
from nemo_gym.errors import ConfigError, did_you_mean, listed, similar_names
from nemo_gym.keys import (
    AGENTS_TYPE,
    CONFIG_PATHS_KEY_NAME,
    MODELS_TYPE,
    POLICY_API_KEY_KEY_NAME,
    POLICY_BASE_URL_KEY_NAME,
    POLICY_MODEL_KEY_NAME,
    POLICY_MODEL_NAME_KEY_NAME,
)
from nemo_gym.paths import candidates, near_files, resolve_for_reading
from nemo_gym.runs.manifest import masked_command

BENCHMARK, ENVIRONMENT, MODEL = "benchmark", "environment", "model"
_SPLIT, _OUTPUT = "split", "output_jsonl_fpath"
_POLICY = (POLICY_BASE_URL_KEY_NAME, POLICY_API_KEY_KEY_NAME, POLICY_MODEL_NAME_KEY_NAME)
_SCRIPTED = "scripted_model"
_SCRIPT = f"{POLICY_MODEL_KEY_NAME}.{MODELS_TYPE}.{_SCRIPTED}.script"
_UNFIT = re.compile(r"[^\w.\-]+")
_PLAIN = re.compile(r"[\w./:\-${}]+")
_NO_KEY = "EMPTY"
"""What vLLM takes for a key when it wants none."""


_OTHER_SHAPE = "<model server>[:<url>#<name>] (ng_list_models lists them)"


def option_for(config_class: type[BaseModel], word: str) -> str | None:
    """The option of a command whose value a lone word is, if it is the name of something."""
    taken = {option.name for option in shortcuts_of(config_class)}
    if MODEL in taken and word.partition(":")[0] in KINDS:
        return MODEL
    for name, configs in ((BENCHMARK, benchmark_configs), (ENVIRONMENT, environment_configs)):
        if name in taken and word in configs():
            return name
    return "query" if "query" in config_class.model_fields and _PLAIN.fullmatch(word) else None


def shape_of(name: str) -> str:
    """How the model server of this name is written after `+model=`."""
    by_config = {kind.config: kind.shape for kind in KINDS.values()}
    return by_config.get(name, f"{name}:<url>#<name>")


def expand(arguments: Sequence[str], config_class: type[BaseModel], *, needs_key: bool = True) -> list[str]:
    """`arguments` with those of the long way in place of the short ones.

    With `needs_key`, a model without the key that it needs is an error; else its key is left open.

    Raises:
        ConfigError: a name is unknown, has the wrong shape, or contradicts another argument.
    """
    names = {option.name for option in shortcuts_of(config_class)}
    named = [argument for argument in arguments if argument.lstrip("+").partition("=")[0] in names and "=" in argument]
    if not named:
        return list(arguments)
    changes = dict(zip(named, parse_overrides(named, names), strict=True))
    around = _Surroundings.of([argument for argument in arguments if argument not in changes])
    for change in changes.values():
        if isinstance(change.value, list) and change.key not in around.own_names:
            raise ConfigError(f"{change.argument}: one name is wanted; what comes beside it goes into config_paths")
    short = {
        argument: change
        for argument, change in changes.items()
        if isinstance(change.value, str) and change.key not in around.own_names
    }
    if not short:
        return list(arguments)
    asked = {change.key: change for change in short.values()}
    stands_for = _LongWay(around)
    for name, configs in ((BENCHMARK, benchmark_configs), (ENVIRONMENT, environment_configs)):
        if name in asked:
            stands_for.add_path(_path_of(asked[name], configs()))
    if MODEL in asked:
        stands_for.add_model(asked[MODEL], needs_key=needs_key)
    if _SPLIT in config_class.model_fields:
        stands_for.imply(asked)
    left = (argument for argument in arguments if argument not in short and not _sets(argument, CONFIG_PATHS_KEY_NAME))
    return [*stands_for.arguments(), *left]


def _sets(argument: str, key: str) -> bool:
    return argument.startswith(("+", key)) and argument.lstrip("+").partition("=")[0] == key


def _path_of(change: Change, configs: Mapping[str, str]) -> str:
    name = change.value.strip()
    if name in configs:
        return configs[name]
    below = [other for other in configs if other.startswith(f"{name}/")]
    other_kind, others = _other_kind(change.key)
    if name.endswith((".yaml", ".yml")):
        hint = f'; a config file is given as "+{CONFIG_PATHS_KEY_NAME}=[{name}]".'
    elif below:
        hint = f"; it has several configs: {listed(below)}."
    elif name in others:
        hint = f"; that is the name of another thing: +{other_kind}={name}."
    else:
        by_small_letters = {other.lower(): other for other in configs}
        close = by_small_letters.get(name.lower())
        hint = f"; did you mean {close!r}?" if close else did_you_mean(name, configs) or "."
    raise ConfigError(f"{change.argument}: there is no such {change.key}{hint} ng_list_{change.key}s lists them")


def _other_kind(key: str) -> tuple[str, Mapping[str, str]]:
    """What a name may be that was given as the other of the two."""
    return (ENVIRONMENT, environment_configs()) if key == BENCHMARK else (BENCHMARK, benchmark_configs())


@dataclass(frozen=True)
class _Surroundings:
    """What the other arguments, env.yaml and the config files they name say already."""

    given: Tree
    """On the command line."""
    stored: Tree
    """In files."""
    config_paths: list[str]
    own_names: Collection[str]
    """Keys that files define as something else than a mapping, or refer to: they are no short ways."""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "_Surroundings":
        wanted = (CONFIG_PATHS_KEY_NAME, *_POLICY, _SPLIT, _OUTPUT)
        named = [argument for argument in arguments if any(_sets(argument, key) for key in wanted)]
        given = {change.key: change.value for change in parse_overrides(named, {*_POLICY, _OUTPUT})}
        env_file = load_env_file(None)
        env = env_file.tree if env_file else {}
        context = merge_trees([env, given])
        where = "the command line" if CONFIG_PATHS_KEY_NAME in given or env_file is None else str(env_file.path)
        files = load_config_files(config_paths_in(context, where), where, context).files
        stored = merge_trees([*(file.tree for file in files), env])
        own = {name for name, value in stored.items() if not isinstance(value, Mapping)}
        return cls(
            given, stored, list(context.get(CONFIG_PATHS_KEY_NAME) or ()), own | names_used_by_interpolations(stored)
        )

    def value(self, key: str) -> Any:
        """What holds for `key` so far; None when nobody says anything."""
        return self.given.get(key, self.stored.get(key))


class _LongWay:
    """The arguments that short ones stand for."""

    def __init__(self, around: _Surroundings) -> None:
        self._around = around
        self._paths = list(around.config_paths)
        self._settings: dict[str, Any] = {}

    def arguments(self) -> list[str]:
        """In the spelling of a command line."""
        settings = {CONFIG_PATHS_KEY_NAME: self._paths, **self._settings}
        return [f"+{key}={_typed(value)}" for key, value in settings.items()]

    def add_path(self, path: str) -> None:
        """Read this config, too."""
        if path not in self._paths:
            self._paths.append(path)

    def add_model(self, change: Change, *, needs_key: bool) -> None:
        """Have `policy_model` be the model that is asked for."""
        model = _Model.of(change)
        self.add_path(model.path)
        if model.script is not None:
            self._settings[_SCRIPT] = _existing(change, model.script)
        self._settings.update(self._agreed(change, model.says))
        if model.kind is None or model.kind.config == _SCRIPTED:
            return
        if not self._value(POLICY_MODEL_NAME_KEY_NAME):
            raise _misshapen(change, "it names no model")
        url = self._url(change, model.kind)
        if self._key_is_missing(model.kind, url):
            self._settings[POLICY_API_KEY_KEY_NAME] = self._key(change, model.kind, url, needs_key=needs_key)

    def _agreed(self, change: Change, says: Mapping[str, Any]) -> Mapping[str, Any]:
        for key, value in says.items():
            other = self._around.given.get(key, value)
            if other != value:
                raise ConfigError(
                    f"{change.argument} and {mask_url_passwords(f'+{key}={_typed(other)}')} contradict each other; "
                    "leave one of them out"
                )
        return says

    def _value(self, key: str) -> Any:
        return self._settings.get(key) or self._around.value(key)

    def _url(self, change: Change, kind: Kind) -> Any:
        """Where the model is; the endpoint of the kind counts when nobody names another."""
        if kind.has_own_url:
            return kind.url
        url = self._value(POLICY_BASE_URL_KEY_NAME)
        if not url:
            url = os.environ.get(kind.url_variable or "") or kind.url
            if not url:
                raise _misshapen(change, "it does not say where the model is")
            self._settings[POLICY_BASE_URL_KEY_NAME] = url
        return url

    def _key_is_missing(self, kind: Kind, url: Any) -> bool:
        """Whether no key is given for this endpoint; one that is stored for another is none."""
        if self._around.given.get(POLICY_API_KEY_KEY_NAME):
            return False
        stored_url = self._around.stored.get(POLICY_BASE_URL_KEY_NAME)
        is_for_others = bool(stored_url) and not _origins(url) <= _origins(stored_url)
        return is_for_others or not self._around.stored.get(POLICY_API_KEY_KEY_NAME)

    def _key(self, change: Change, kind: Kind, url: Any, *, needs_key: bool) -> str:
        own_urls = filter(None, (kind.url, os.environ.get(kind.url_variable or "")))
        is_own = kind.url is None or any(_origins(url) <= _origins(own) for own in own_urls)
        variable = kind.key_variable if is_own else None
        if variable and os.environ.get(variable):
            return os.environ[variable]
        if not kind.needs_key:
            return _NO_KEY
        if not needs_key:
            return f"${{oc.env:{variable}}}" if variable else ""
        by_variable = f"export {variable}=<key>, or " if variable else ""
        any_text = "" if variable else "; any text will do for an endpoint that wants none"
        elsewhere = self._around.stored.get(POLICY_API_KEY_KEY_NAME)
        not_for = " (the policy_api_key in your files is for another policy_base_url)" if elsewhere else ""
        raise ConfigError(
            f"{change.argument} needs an API key{not_for}: {by_variable}give it as +{POLICY_API_KEY_KEY_NAME}=<key> or "
            f"as `{POLICY_API_KEY_KEY_NAME}: <key>` in env.yaml{any_text}"
        )

    def imply(self, asked: Mapping[str, Change]) -> None:
        """Say which rows to take and where rollouts go, where a name tells and nobody else does."""
        about = asked.get(BENCHMARK) or asked.get(ENVIRONMENT)
        if about is None:
            return
        split = "benchmark" if about.key == BENCHMARK else _sole_split(self._paths)
        model = self._value(POLICY_MODEL_NAME_KEY_NAME)
        if MODEL in asked and POLICY_MODEL_NAME_KEY_NAME not in self._settings:
            model = asked[MODEL].value
        parts = [_UNFIT.sub("_", str(part)).strip("._") or "_" for part in (about.value, model or "rollouts")]
        implied = {_SPLIT: split, _OUTPUT: f"results/{parts[0]}/{parts[1]}.jsonl"}
        self._settings.update({key: value for key, value in implied.items() if value and not self._around.value(key)})


@dataclass(frozen=True)
class _Model:
    """What stands after `+model=`, taken apart."""

    kind: Kind | None
    """None for a model server without a short name."""
    path: str
    says: Mapping[str, Any]
    script: str | None = None

    @classmethod
    def of(cls, change: Change) -> "_Model":
        server, colon, rest = (part.strip() for part in change.value.partition(":"))
        configs = server_configs(MODELS_TYPE)
        name = KINDS[server].config if server in KINDS else server
        if name not in configs:
            raise _misshapen(change, _unknown_server(change.value.strip(), configs))
        kind = KINDS.get(server) or next((kind for kind in KINDS.values() if name.split("/")[0] == kind.config), None)
        if colon and not rest:
            raise _misshapen(change, "nothing follows the colon")
        if kind is not None and kind.config == _SCRIPTED:
            return cls(kind, configs[name], {}, rest or None)
        return cls(kind, configs[name], _endpoint(change, kind, rest))


def _existing(change: Change, script: str) -> str:
    if not resolve_for_reading(script, Path.is_file).is_file():
        near = near_files(script, limit=1)
        hint = f"; did you mean {near[0]!r}?" if near else f" (looked for {', '.join(map(str, candidates(script)))})"
        raise ConfigError(f"{change.argument}: there is no such script{hint}")
    return script


def _endpoint(change: Change, kind: Kind | None, text: str) -> dict[str, Any]:
    """`url#name`, `url` or `name` as the keys that they set."""
    places, hash_mark, name = text.partition("#") if "#" in text or "://" in text else ("", "", text)
    urls = [url.strip() for url in places.split(",")] if places else []
    says: dict[str, Any] = {}
    if urls:
        says[POLICY_BASE_URL_KEY_NAME] = urls if len(urls) > 1 else urls[0]
    if name:
        says[POLICY_MODEL_NAME_KEY_NAME] = name
    if hash_mark and len(says) < 2:
        raise _misshapen(change, "a URL stands before the # and a name after it")
    if any(not urlsplit(url).netloc or urlsplit(url).scheme not in ("http", "https") for url in urls):
        raise _misshapen(change, "a URL begins with http:// or https://")
    if urls and kind is not None and kind.has_own_url:
        raise _misshapen(change, "its models are at one place, which needs no URL")
    return says


def with_server(text: str) -> str:
    """What may be meant by a URL, or a name, that is given without a model server."""
    if text.startswith(("http://", "https://")):
        return f"vllm:{text}" if "#" in text else f"vllm:{text}#<name>"
    return text if not text or ":" in text or similar_names(text, KINDS) else f"openai:{text}"


def _unknown_server(text: str, configs: Collection[str]) -> str:
    if text.endswith((".yaml", ".yml")):
        return f'a config file is given as "+{CONFIG_PATHS_KEY_NAME}=[{text}]"'
    server = text.partition(":")[0]
    close = did_you_mean(server, [*KINDS, *configs])
    meant = with_server(text)
    if meant != text and not close:
        return f"no model server is called {server!r}; did you mean {mask_url_passwords(meant)}?"
    return f"no model server is called {server!r}{close}"


def _misshapen(change: Change, why: str) -> ConfigError:
    shapes = ", ".join([*(kind.shape for kind in KINDS.values()), _OTHER_SHAPE])
    return ConfigError(f"{change.argument}: {why}{'' if why.endswith('?') else '.'} A model is written as {shapes}")


def _origins(url: Any) -> set[str]:
    """Scheme, host and port of a URL, or of each in a list."""
    parts = [urlsplit(str(one)) for one in (url if isinstance(url, list) else [url])]
    return {
        f"{part.scheme}://{part.netloc.rpartition('@')[2].lower()}" if part.netloc else part.geturl() for part in parts
    }


def _sole_split(paths: Sequence[str]) -> str | None:
    """The type of the data sets that the agents of these configs have, if it is one."""
    tree = apply_directives(merge_trees([file.tree for file in load_config_files(paths).files]))
    agents = (agent for block in tree.values() if isinstance(block, Mapping) for agent in _agents_in(block))
    types = {dataset.get("type") for agent in agents for dataset in agent.get("datasets") or ()}
    return types.pop() if len(types) == 1 else None


def _agents_in(block: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    agents = block.get(AGENTS_TYPE)
    return [agent for agent in agents.values() if isinstance(agent, Mapping)] if isinstance(agents, Mapping) else []


def _typed(value: Any) -> str:
    """A value as it is typed; lists are of texts."""
    return f"[{','.join(map(_typed_text, value))}]" if isinstance(value, list) else _typed_text(value)


def _typed_text(text: Any) -> str:
    return str(text) if _PLAIN.fullmatch(str(text)) else "'" + str(text).replace("'", "\\'") + "'"


def shown_expansion(arguments: Sequence[str], config_class: type[BaseModel]) -> str | None:
    """What the short ones among `arguments` stand for, on one line and without secrets; None when there are none."""
    expanded = expand(arguments, config_class, needs_key=False)
    if expanded == list(arguments):
        return None
    long_ones = [argument for argument in expanded if argument not in arguments]
    short_ones = [argument for argument in arguments if argument not in expanded]
    return f"{shlex.join(masked_command(short_ones))} stands for {shlex.join(masked_command(long_ones))}"
