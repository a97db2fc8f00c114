"""Instructions on the form of an answer: its marks, its beginning and end, its parts."""

import json
import re
from typing import ClassVar, NoReturn

from resources_servers.instruction_following.instructions import Count, Instruction, Text

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCE, _OPENING = "```", re.compile(r"```(?:json)?", re.IGNORECASE)
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
_RESPONSE_SEPARATOR = "******"


class NumberPlaceholders(Instruction):
    """At least so many placeholders in square brackets, such as `[address]`."""

    ID: ClassVar[str] = "detectable_content:number_placeholders"

    num_placeholders: Count

    def is_followed(self, text: str) -> bool:  # noqa: D102 - the class says it
        found: list[str] = re.findall(r"\[[^\]\n]*\]?", text)
        return sum(each.endswith("]") for each in found) >= self.num_placeholders


class Postscript(Instruction):
    """There is a postscript that begins with a marker, such as `P.S.`."""

    ID: ClassVar[str] = "detectable_content:postscript"

    postscript_marker: Text

    def is_followed(self, text: str) -> bool:  # noqa: D102
        marker = self.postscript_marker.strip()
        return re.search(_POSTSCRIPTS.get(marker, re.escape(marker)), text, re.IGNORECASE) is not None


class NumberBulletLists(Instruction):
    """Exactly so many lines that begin with `*` or `-`."""

    ID: ClassVar[str] = "detectable_format:number_bullet_lists"

    num_bullets: Count

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-).*$", text, re.MULTILINE)) == self.num_bullets


class ConstrainedResponse(Instruction):
    """One of three given sentences occurs."""

    ID: ClassVar[str] = "detectable_format:constrained_response"

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return any(answer in text for answer in _ANSWERS)


class NumberHighlightedSections(Instruction):
    """At least so many pieces in `*` or `**`."""

    ID: ClassVar[str] = "detectable_format:number_highlighted_sections"

    num_highlights: Count

    def is_followed(self, text: str) -> bool:  # noqa: D102
        pieces = [*re.findall(r"\*[^\n*]*\*", text), *re.findall(r"\*\*[^\n*]*\*\*", text)]
        return sum(bool(piece.strip("*").strip()) for piece in pieces) >= self.num_highlights


class MultipleSections(Instruction):
    """At least so many sections that begin with a word and a number, such as `Section 1`."""

    ID: ClassVar[str] = "detectable_format:multiple_sections"

    section_spliter: Text
    num_sections: Count

    def is_followed(self, text: str) -> bool:  # noqa: D102
        beginnings = re.findall(rf"{re.escape(self.section_spliter.strip())}\s?\d+", text)
        return len(beginnings) >= self.num_sections


class JsonFormat(Instruction):
    """The whole answer is JSON, perhaps in a fenced block."""

    ID: ClassVar[str] = "detectable_format:json_format"

    def is_followed(self, text: str) -> bool:  # noqa: D102
        whole = text.strip()
        opening = _OPENING.match(whole)
        is_fenced = opening is not None and whole.endswith(_FENCE) and len(whole) >= opening.end() + len(_FENCE)
        try:
            inner = whole[opening.end() : -len(_FENCE)].strip() if opening and is_fenced else text
            json.loads(inner, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return False
        return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class Title(Instruction):
    """There is a title in double angular brackets, such as `<<poem of joy>>`."""

    ID: ClassVar[str] = "detectable_format:title"

    def is_followed(self, text: str) -> bool:  # noqa: D102
        lines = [line for line in text.split("\n") if "<<" in line and ">>" in line]
        return any(line[line.find("<<") : line.rfind(">>")].strip("<> ") for line in lines)


class TwoResponses(Instruction):
    """Two different answers, separated by six asterisks."""

    ID: ClassVar[str] = "combination:two_responses"

    def is_followed(self, text: str) -> bool:  # noqa: D102
        parts = [part.strip() for part in text.split(_RESPONSE_SEPARATOR)]
        if not all(parts[1:-1]):
            return False
        answers = [part for part in parts if part]
        return len(answers) == 2 and answers[0] != answers[1]


class RepeatPrompt(Instruction):
    """The answer begins with the request, word for word."""

    ID: ClassVar[str] = "combination:repeat_prompt"

    prompt_to_repeat: Text

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return text.strip().lower().startswith(self.prompt_to_repeat.strip().lower())


class EndChecker(Instruction):
    """The answer ends with a phrase, and nothing after it."""

    ID: ClassVar[str] = "startend:end_checker"

    end_phrase: Text

    def is_followed(self, text: str) -> bool:  # noqa: D102
        return text.strip().strip('"').lower().endswith(self.end_phrase.strip().lower())


class Quotation(Instruction):
    """The whole answer is in double quotation marks."""

    ID: ClassVar[str] = "startend:quotation"

    def is_followed(self, text: str) -> bool:  # noqa: D102
        stripped = text.strip()
        return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


FORM: tuple[type[Instruction], ...] = (
    NumberPlaceholders,
    Postscript,
    NumberBulletLists,
    ConstrainedResponse,
    NumberHighlightedSections,
    MultipleSections,
    JsonFormat,
    Title,
    TwoResponses,
    RepeatPrompt,
    EndChecker,
    Quotation,
)
