"""Instructions on words, letters, language and case."""

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from nemo_gym.config_types import listed
from resources_servers.instruction_following.instructions import Count, Instruction, Relation, Text, Words, holds
from resources_servers.instruction_following.languages import LANGUAGES, is_in, language_of
from resources_servers.instruction_following.text import whole_words


def _known_language(code: str) -> str:
    language = language_of(code)
    if language is None:
        raise ValueError(
            f"{code!r} is not one of the languages that can be told apart: {listed(sorted(LANGUAGES), 99)}"
        )
    return language


class KeywordExistence(Instruction):
    """Every keyword occurs, in any case."""

    ID: ClassVar[str] = "keywords:existence"

    keywords: Words

    def is_followed(self, text: str) -> bool:  # noqa: D102 - the class says it
        return all(keyword.casefold() in text.casefold() for keyword in self.keywords)


class KeywordFrequency(Instruction):
    """A keyword occurs often or seldom, in any case."""

    ID: ClassVar[str] = "keywords:frequency"

    keyword: Text
    frequency: Count
    relation: Relation

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return holds(text.casefold().count(self.keyword.strip().casefold()), self.relation, self.frequency)


class ForbiddenWords(Instruction):
    """None of the words occurs as a word of its own."""

    ID: ClassVar[str] = "keywords:forbidden_words"

    forbidden_words: Words

    def is_followed(self, text: str) -> bool:  # noqa: D102
        patterns = (rf"(?<!\w){re.escape(word)}(?!\w)" for word in self.forbidden_words)
        return not any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


class LetterFrequency(Instruction):
    """A letter occurs often or seldom, in any case."""

    ID: ClassVar[str] = "keywords:letter_frequency"

    letter: Annotated[str, Field(min_length=1, max_length=1)]
    let_frequency: Count
    let_relation: Relation

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return holds(text.lower().count(self.letter.lower()), self.let_relation, self.let_frequency)


class ResponseLanguage(Instruction):
    """The whole answer is in one language."""

    ID: ClassVar[str] = "language:response_language"

    language: Annotated[str, AfterValidator(_known_language)]

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return is_in(text, self.language)


class CapitalWordFrequency(Instruction):
    """Many or few words are in capital letters."""

    ID: ClassVar[str] = "change_case:capital_word_frequency"

    capital_frequency: Count
    capital_relation: Relation

    def is_followed(self, text: str) -> bool:  # noqa: D102
        capital = sum(word.isupper() for word in whole_words(text))
        return holds(capital, self.capital_relation, self.capital_frequency)


class EnglishCapital(Instruction):
    """English, and no small letter."""

    ID: ClassVar[str] = "change_case:english_capital"

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return text.isupper() and is_in(text.lower(), "en")


class EnglishLowercase(Instruction):
    """English, and no capital letter."""

    ID: ClassVar[str] = "change_case:english_lowercase"

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return text.islower() and is_in(text, "en")


class NoComma(Instruction):
    """No comma."""

    ID: ClassVar[str] = "punctuation:no_comma"

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return "," not in text


WORDING: tuple[type[Instruction], ...] = (
    KeywordExistence,
    KeywordFrequency,
    ForbiddenWords,
    LetterFrequency,
    ResponseLanguage,
    CapitalWordFrequency,
    EnglishCapital,
    EnglishLowercase,
    NoComma,
)
