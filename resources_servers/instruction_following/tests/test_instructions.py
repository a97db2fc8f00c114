"""Every instruction: a text that follows it and texts that do not."""

from typing import Any

import pytest

from resources_servers.instruction_following.languages import LANGUAGES, is_in, language_of
from resources_servers.instruction_following.registry import INSTRUCTIONS, instructions_of
from resources_servers.instruction_following.text import sentences, whole_words, words

GERMAN = "Der Zug fährt heute leider erst eine Stunde später ab."
ENGLISH = "the train leaves an hour later today because of the snow."
SECOND_OF_TWO = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weeks"}
TWO_SECTIONS = {"section_spliter": "Section", "num_sections": 2}
TWO_CAPITAL = {"capital_frequency": 2, "capital_relation": "at least"}

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["C++", "rust"]}, "Rust or c++?", "Rust or C?"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "at least"}, "Sea to sea", "The sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "less than"}, "The sea", "Sea, seaside"),
    ("keywords:forbidden_words", {"forbidden_words": ["art", "c++"]}, "Start a party", "Fine Art."),
    ("keywords:forbidden_words", {"forbidden_words": ["c++"]}, "Written in C", "Written in C++!"),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "at least"}, "Quiet q", "Quiz"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 1, "let_relation": "less than"}, "x", "#x"),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
    ("language:response_language", {"language": "zh-cn"}, "今天的天气非常好我们去公园吧。", "とても良い天気です。"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Hi. Dr. No!", "Dr. No."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "One.", "One. Two."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb\n***\n", "a\n***\n\n***\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, "a\n\nb", "a *** b"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a-b c", "a b"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a b", "a b c"),
    ("length_constraints:nth_paragraph_first_word", SECOND_OF_TWO, "a\n\n\n\n'weeks, or days'", "weeks\n\na"),
    ("length_constraints:nth_paragraph_first_word", SECOND_OF_TWO, "a\n\nWeeks.", "a\n\nweeks\n\nb"),
    ("length_constraints:nth_paragraph_first_word", {**SECOND_OF_TWO, "nth_paragraph": 3}, "", "a\n\nweeks"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b c]", "[a\nb] (c) [d]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. More", "PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p.p.s. and", "P.S. and"),
    ("detectable_content:postscript", {"postscript_marker": "NB (1)"}, "nb (1) and", "nb 1"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b\n**c**", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "Well: My answer is maybe.", "My answer is yes"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "**b** ** ** *\n*"),
    ("detectable_format:multiple_sections", TWO_SECTIONS, "Section 1\na\nSection 2\nb", "Section A, Section 1"),
    ("detectable_format:json_format", {}, '```JSON\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:json_format", {}, "3", '{"a": 1} and more'),
    ("detectable_format:json_format", {}, "[]", "[" * 100_000),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >> <title>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:two_responses", {}, "******a******b******", "a******b******c"),
    ("combination:two_responses", {}, "a******b", "a************b"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Tell me. "}, "\ntell ME. So", "So: tell me."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'Hm. "the end." ', "The end. Or not"),
    ("startend:quotation", {}, ' "all of it" ', '"not" all'),
    ("startend:quotation", {}, '""', '"'),
    ("change_case:capital_word_frequency", TWO_CAPITAL, "NASA DON'T a", "Nasa DON'T"),
    ("change_case:capital_word_frequency", {"capital_frequency": 1, "capital_relation": "less than"}, "a B2b", "A"),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_capital", {}, "YES!", GERMAN.upper()),
    ("change_case:english_lowercase", {}, ENGLISH, ENGLISH.capitalize()),
    ("change_case:english_lowercase", {}, ENGLISH, GERMAN.lower()),
    ("punctuation:no_comma", {}, "a; b \uff0c c", "a, b"),
]  # fmt: skip


def followed(name: str, arguments: dict[str, Any], text: str) -> bool:
    (instruction,) = instructions_of([name], [arguments])
    return instruction.is_followed(text)


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_an_instruction_is_followed_or_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    if good:
        assert followed(name, arguments, good)
    assert not followed(name, arguments, bad)


def test_every_instruction_of_the_benchmark_is_known_and_tried_above() -> None:
    assert len(INSTRUCTIONS) == 25
    assert {name for name, *_ in CASES} == set(INSTRUCTIONS)


def test_arguments_that_are_null_are_as_good_as_absent() -> None:
    assert instructions_of(["punctuation:no_comma"], [None])
    assert instructions_of(["keywords:existence"], [{"keywords": ["a"], "num_words": None}])


@pytest.mark.parametrize(
    ("ids", "arguments", "words"),
    [
        (["punctuation:no_commas"], [{}], r"'punctuation:no_commas'; did you mean 'punctuation:no_comma'"),
        (["punctuation:no_comma"], [], r"1 entries and kwargs 0"),
        (["punctuation:no_comma"], [{"x": 1}], r"kwargs of 'punctuation:no_comma' do not fit: x: Extra"),
        (["keywords:existence"], [{}], r"kwargs of 'keywords:existence' do not fit: keywords: Field required"),
        (["keywords:existence"], [{"keywords": []}], r"keywords: List should have at least 1 item"),
        (["keywords:letter_frequency"], [{"letter": "ab", "let_frequency": 1}], r"letter: .*; let_relation: "),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "about"}], r"relation: Input should be"),
        (["language:response_language"], [{"language": "tlh"}], r"'tlh' is not one of the languages .*af, ar"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_refused_by_name(ids: list[str], arguments: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        instructions_of(ids, arguments)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Hello. World! Is it? Yes.", 4),
        ("Mr. Smith met Dr. Jones, e.g. at 3.14 p.m. on Friday. He left.", 2),
        ("I said no. Then I left. See No. 5 and fig. 3.", 3),
        ("1. First item.\n2. Second item!\na. Third", 3),
        ("Wait... what? Wait... No.", 3),
        ('He said "Go." She went (at last.) Then?', 3),
        ("What?! Really?! **Yes.** ok", 4),
        ("今日はいい天気です。散歩に行きます\uff01", 2),
        ("क्या यह सच है? हाँ। ठीक है।", 3),
        ("# A heading\n\nand text that never ends", 1),
        ("J. K. Rowling wrote it. It was I. Good", 3),
        ("It works in the U.S. and the U.K. It is fine.", 2),
        ("Use v1.2.3 from example.com now", 1),
        ("... !", 0),
        ("", 0),
    ],
)
def test_sentences_are_counted_as_one_reads_them(text: str, count: int) -> None:
    assert len(sentences(text)) == count, sentences(text)


def test_words_are_counted_in_two_ways() -> None:
    assert words("Don't panic: well-known!") == ["Don", "t", "panic", "well", "known"]
    assert whole_words("Don't panic: well-known!") == ["Don't", "panic", "well-known"]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("ar", "القط الصغير نائم على الطاولة"), ("bg", "Малката котка спи върху масата, защото навън вали."),
        ("bn", "ছোট বিড়ালটি টেবিলের উপর ঘুমিয়ে আছে"), ("en", "The small cat is asleep on the table."),
        ("es", "El gato pequeño duerme encima de la mesa."), ("fa", "گربه کوچک روی میز خوابیده است"),
        ("fi", "Pieni kissa nukkuu pöydän päällä."), ("fr", "Le petit chat dort sur la table."),
        ("gu", "નાની બિલાડી ટેબલ પર સૂઈ રહી છે"), ("he", "החתול הקטן ישן על השולחן"),
        ("hi", "छोटी बिल्ली मेज़ पर सो रही है"), ("it", "Il gattino dorme tranquillo sul tavolo."),
        ("ja", "小さな猫がテーブルの上で眠っています"), ("kn", "ಚಿಕ್ಕ ಬೆಕ್ಕು ಮೇಜಿನ ಮೇಲೆ ಮಲಗಿದೆ"),
        ("ko", "작은 고양이가 책상 위에서 자고 있다"), ("ml", "ചെറിയ പൂച്ച മേശപ്പുറത്ത് ഉറങ്ങുന്നു"),
        ("mr", "लहान मांजर टेबलावर झोपले आहे"), ("ne", "सानो बिरालो टेबलमा सुतिरहेको छ"),
        ("pa", "ਛੋਟੀ ਬਿੱਲੀ ਮੇਜ਼ ਉੱਤੇ ਸੁੱਤੀ ਹੋਈ ਹੈ"), ("pl", "Mały kot śpi spokojnie na stole."),
        ("pt", "O gato pequeno está a dormir em cima da mesa."), ("ru", "Маленькая кошка спит на столе, она устала."),
        ("sw", "Paka mdogo amelala juu ya meza nyumbani."), ("ta", "சிறிய பூனை மேசையில் தூங்குகிறது"),
        ("te", "చిన్న పిల్లి బల్ల మీద నిద్రపోతోంది"), ("th", "แมวตัวเล็กกำลังนอนหลับอยู่บนโต๊ะ"),
        ("uk", "Маленька кішка спить на столі біля вікна."), ("ur", "چھوٹی بلی میز پر سو رہی ہے"),
        ("vi", "Con mèo nhỏ đang ngủ trên bàn."), ("de", "Die kleine Katze schläft auf dem Tisch."),
    ],
)  # fmt: skip
def test_the_languages_of_the_benchmark_are_told_from_one_sentence(language: str, text: str) -> None:
    others = sorted(LANGUAGES - {language})

    assert is_in(text, language)
    assert not any(is_in(text, other) for other in others)


def test_a_few_words_may_be_of_several_languages_and_a_number_is_of_any() -> None:
    assert is_in("Grand Hotel Europa", "en")
    assert is_in("Grand Hotel Europa", "fi")
    assert not is_in("Grand Hotel", "ru")
    assert is_in("42", "ru")
    assert not is_in("猫", "en")
    assert [language_of(code) for code in ("pt-BR", "ZH_tw", "xx")] == ["pt", "zh", None]
