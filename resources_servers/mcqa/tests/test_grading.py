"""Which letter a text chooses, for every way of reading it."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from nemo_gym.workers import PatternMatcher
from resources_servers.mcqa.boxes import last_box, without_text_wrappers
from resources_servers.mcqa.grading import (
    GradingMode,
    extract_answer,
    extract_by_patterns,
    fold_letter,
    usable,
)

OPTIONS = {"A": "Paris", "B": "Rome", "C": "A Tale of  Two Cities", "D": "Rome and Paris"}
TEN = {letter: f"option {letter}" for letter in "ABCDEFGHIJ"}


@pytest.fixture(scope="module")
def matcher() -> Iterator[PatternMatcher]:
    matcher = PatternMatcher(timeout_s=60.0)
    yield matcher
    matcher.close()


def found(text: str, patterns: Sequence[str], matcher: PatternMatcher) -> str | None:
    return asyncio.run(extract_by_patterns(text, OPTIONS, patterns, matcher))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{A}", "A"),
        (r"\boxed{A} then \boxed{B}", "B"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{\boxed{C}}", "C"),
        (r"\boxed{A} but then \boxed{", "A"),
        (r"\boxed {D}", "D"),
        ("no box }{", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_read(text: str, content: str | None) -> None:
    assert last_box(text) == content


def test_text_wrappers_are_removed_at_any_depth() -> None:
    assert without_text_wrappers(r"\text{(B) \textbf{Rome}} {x} \mathrm{C") == "(B) Rome {x} C"


def test_ten_thousand_open_boxes_are_no_work() -> None:
    text = "\\boxed{\\text{" * 10_000

    assert last_box(text) is None
    assert extract_answer(f"Answer: {text}", TEN, "lenient_answer_colon_md") is None


def check(mode: GradingMode, text: str, letter: str | None, options: dict[str, str] = OPTIONS) -> None:
    assert extract_answer(text, options, mode) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"The answer is \boxed{B}.", "B"),
        (r"\boxed{A}, no: \boxed{B}", "B"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{B: Rome}", "B"),
        (r"\boxed{B) Rome}", "B"),
        (r"\boxed{\text{B. Rome}}", "B"),
        (r"\boxed{B - Rome}", "B"),
        (r"\boxed{b}", None),
        (r"\boxed{E}", None),
        (r"\boxed{Rome}", None),
        (r"\boxed{AB}", None),
        (r"\boxed{}", None),
        ("B", None),
    ],
)
def test_the_strict_mode_wants_one_letter_in_a_box(text: str, letter: str | None) -> None:
    check("strict_single_letter_boxed", text, letter)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{The city of PARIS}", "A"),
        (r"\boxed{\text{a tale of two cities}}", "C"),
        (r"\boxed{rome and paris}", None),  # names three options
        (r"\boxed{London}", None),
        ("Paris", None),
    ],
)
def test_the_lenient_box_may_name_the_option(text: str, letter: str | None) -> None:
    check("lenient_boxed", text, letter)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("answer: b", "B"),
        ("ANSWER:  Rome", "B"),
        ("So the answer: A\nAnswer: B", "A"),
        ("Answer: a tale of two   cities", "C"),
        ("Answer: B because", None),
        ("Answer: E", None),
        ("B", None),
    ],
)
def test_the_first_answer_line_is_a_letter_or_an_option(text: str, letter: str | None) -> None:
    check("lenient_answer_colon", text, letter)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("**Answer: B**", "B"),
        ("**Answer:** B", "B"),
        ("### Answer\n**Answer**: (B)", "B"),
        ("Answer:\n\n**B**", "B"),
        ("Answer: `b`", "B"),
        (r"Answer: $\boxed{B}$", "B"),
        (r"Answer: \(\text{B}\)", "B"),
        ("Answer\uff1aB", "B"),
        ("Answer: B) Rome, since A is not it", "B"),
        ("Answer: B. Unlike A and C it fits.", "B"),
        ("Answer: B Rome", "B"),
        ("Answer: A is wrong, so it must be B", "B"),
        ("Answer: the right one is B, I think", "B"),
        ("Answer: A Tale of Two Cities", "C"),
        ("Answer: A\n\nAnswer: B", "B"),
        ("Answer: B\nAnswer: see above", "B"),
        ("Answer: A or B", None),
        ("Answer: A, B and C", None),
        ("Answer: (A)/(B)", None),
        ("Answer: A\nAnswer: both A and B", None),
        ("Answer: B and B", "B"),
        ("Answer: none", None),
        ("The option B is right", None),
    ],
)
def test_markdown_around_an_answer_does_not_matter(text: str, letter: str | None) -> None:
    check("lenient_answer_colon_md", text, letter)


def test_the_pronoun_is_not_the_ninth_option() -> None:
    check("lenient_answer_colon_md", "Answer: I think it is G", "G", TEN)
    check("lenient_answer_colon_md", "Answer: I believe so", None, TEN)
    check("lenient_answer_colon_md", "Answer: I", "I", TEN)
    check("lenient_answer_colon_md", "Answer: A, I am sure", "A", TEN)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Final: A ... final: b", "B"),
        ("final: \uff22", "B"),
        ("final: \u0628", "B"),
        ("final: \u09ac", "B"),
        ("final: \u0996", "B"),
        ("final: Z", "Z"),  # a single letter is trusted
        ("final: rome", "B"),
        ("final: Oslo", None),
        ("nothing", None),
    ],
)
def test_a_pattern_of_the_row_finds_letters_in_many_scripts(
    text: str, letter: str | None, matcher: PatternMatcher
) -> None:
    assert found(text, [r"final:\s*(\w+)"], matcher) == letter


def test_patterns_are_tried_in_order_until_one_finds_an_option(matcher: PatternMatcher) -> None:
    patterns = [r"first: (\w+)", r"second: (\w+)"]

    assert found("second: A first: B", patterns, matcher) == "B"
    assert found("second: A first: Oslo", patterns, matcher) == "A"
    assert found("the B", ["(nothing)?B"], matcher) == "B"


def test_a_broken_pattern_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert usable(["(", "B"]) == ["B"]
    assert "'('" in caplog.text


def test_only_letters_fold() -> None:
    assert (fold_letter(" c "), fold_letter("1"), fold_letter("AB"), fold_letter("")) == ("C", None, None, None)


def test_a_letter_under_a_heap_of_accents_is_not_even_looked_at() -> None:
    assert fold_letter(" " * 100_000 + "\uff23" + " " * 100_000) == "C"
    assert fold_letter("A" + "\u0316\u0300" * 500_000) is None  # normalising it takes minutes
