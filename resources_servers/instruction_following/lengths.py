"""Instructions on length: sentences, words, paragraphs."""

import re
from typing import Annotated, ClassVar

from pydantic import Field

from resources_servers.instruction_following.instructions import Count, Instruction, Relation, Text, holds
from resources_servers.instruction_following.text import paragraphs, sentences, words

_STARS = r"\s?\*\*\*\s?"
_FIRST_WORD = re.compile(r"[\"'\u2018\u201c]*([^\s.,?!'\"\u2019\u201d]*)")


class NumberSentences(Instruction):
    """Many or few sentences."""

    ID: ClassVar[str] = "length_constraints:number_sentences"

    num_sentences: Count
    relation: Relation

    def is_followed(self, text: str) -> bool:  # noqa: D102 - the class says it
        return holds(len(sentences(text)), self.relation, self.num_sentences)


class NumberParagraphs(Instruction):
    """Exactly so many paragraphs, separated by `***`."""

    ID: ClassVar[str] = "length_constraints:number_paragraphs"

    num_paragraphs: Count

    def is_followed(self, text: str) -> bool:  # noqa: D102
        found = paragraphs(text, _STARS)
        return found is not None and len(found) == self.num_paragraphs


class NumberWords(Instruction):
    """Many or few words."""

    ID: ClassVar[str] = "length_constraints:number_words"

    num_words: Count
    relation: Relation

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return holds(len(words(text)), self.relation, self.num_words)


class NthParagraphFirstWord(Instruction):
    """Exactly so many paragraphs, separated by blank lines, of which one begins with a word."""

    ID: ClassVar[str] = "length_constraints:nth_paragraph_first_word"

    num_paragraphs: Count
    nth_paragraph: Annotated[int, Field(ge=1)]
    first_word: Text

    def is_followed(self, text: str) -> bool:  # noqa: D102
        found = [part.strip() for part in text.split("\n\n") if part.strip()]
        if len(found) != self.num_paragraphs or self.nth_paragraph > len(found):
            return False
        match = _FIRST_WORD.match(found[self.nth_paragraph - 1])
        return match is not None and match[1].lower() == self.first_word.strip().lower()


LENGTHS: tuple[type[Instruction], ...] = (NumberSentences, NumberParagraphs, NumberWords, NthParagraphFirstWord)
