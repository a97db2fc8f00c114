"""A tokenizer from its files: text to ids and back, and conversations to text by its chat template.

`tokenizer.json` is read by the library tokenizers, the template by jinja2, as Hugging Face does: sandboxed, with the
same settings, filters and functions. transformers is not needed.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from nemo_gym.config_types import ConfigError, install_command

_TEMPLATE_FILE = "chat_template.jinja"


class ChatTokenizer:
    """The tokenizer in a folder."""

    def __init__(self, folder: str | Path, end_of_turn: str | None = None) -> None:
        """`end_of_turn` is a token that ends answers besides those that the files name.

        Raises:
            ConfigError: a file is missing or cannot be read, or a library is not installed.
        """
        self._folder = Path(folder).expanduser()
        if not self._folder.is_dir():
            raise ConfigError(
                f"tokenizer is {str(folder)!r}, which is no folder; download the model's tokenizer files "
                "(tokenizer.json, tokenizer_config.json) and give the folder that they are in"
            )
        self._tokenizer = _library("tokenizers").Tokenizer.from_str(self._read("tokenizer.json"))
        settings = json.loads(self._read("tokenizer_config.json"))
        self._special = {key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
        self._template = _compiled(self._template_text(settings), self._folder)
        self._ends = self._end_tokens(end_of_turn)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_texts = [token.content for token in added.values() if token.special]

    @property
    def ends(self) -> Mapping[str, int]:
        """The tokens that end what the model says, by their text."""
        return self._ends

    def encode(self, text: str) -> list[int]:
        """The ids of a text, which has all special tokens that it needs."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several lists of ids."""
        return [self.decode(ids) for ids in sequences]

    def without_special(self, text: str) -> str:
        """The text without the special tokens that are left in it."""
        for special in self._special_texts:
            text = text.replace(special, "")
        return text

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return a conversation as the model reads it: text, or ids with `tokenize`."""
        given = {**self._special, "documents": None, **kwargs}
        text: str = self._template.render(
            messages=conversation, tools=tools or None, add_generation_prompt=add_generation_prompt, **given
        )
        return self.encode(text) if tokenize else text

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._folder / name} cannot be read: {error.strerror}") from error

    def _template_text(self, settings: Mapping[str, Any]) -> str:
        if (self._folder / _TEMPLATE_FILE).exists():
            return self._read(_TEMPLATE_FILE)
        template = settings.get("chat_template")
        if isinstance(template, list):
            named = {str(each["name"]): str(each["template"]) for each in template}
            template = named.get("tool_use") or named.get("default")
        if not template:
            raise ConfigError(
                f"{self._folder} has no chat template: neither {_TEMPLATE_FILE} nor chat_template in "
                "tokenizer_config.json; conversations cannot be written without one"
            )
        return str(template)

    def _end_tokens(self, end_of_turn: str | None) -> dict[str, int]:
        texts = [text for text in (end_of_turn, self._special["eos_token"]) if text]
        ends = {text: self._tokenizer.token_to_id(text) for text in texts}
        unknown = [text for text, number in ends.items() if number is None]
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no token of the tokenizer in {self._folder}; correct end_of_turn")
        generation = self._folder / "generation_config.json"
        listed = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.exists() else []
        for number in listed if isinstance(listed, list) else [listed]:
            text = self._tokenizer.id_to_token(number) if isinstance(number, int) else None
            if text is not None:
                ends.setdefault(text, number)
        return ends


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"token_model needs the library {name}, which is not installed; install it with: "
            f"{install_command('tokens')}"
        ) from error


def _token_text(token: Any) -> str:
    return str(token.get("content") or "") if isinstance(token, dict) else str(token or "")


def _compiled(template: str, folder: Path) -> Any:
    jinja2, sandbox = _library("jinja2"), import_module("jinja2.sandbox")

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005, RUF100
    try:
        return environment.from_string(template)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template in {folder} cannot be read: {error}") from error
