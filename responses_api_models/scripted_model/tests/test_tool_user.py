"""Without a script the model behaves like somebody who has read the conversation and the schemas."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from responses_api_models.scripted_model.conversation import Called, Conversation, Entry, Returned, Said, Tool
from responses_api_models.scripted_model.draws import Draws
from responses_api_models.scripted_model.tool_user import arguments_for, use_tools_or_answer

DRAWS = Draws(0, b"")


def tool(name: str = "f", required: list[str] | None = None, description: str = "", **properties: Any) -> Tool:
    needed = list(properties) if required is None else required
    return Tool(name, description, {"type": "object", "properties": properties, "required": needed})


def arguments(text: str, **properties: Any) -> dict[str, Any]:
    return arguments_for(tool(**properties), Conversation((Said("user", text),)), DRAWS)


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I land in Reykjavik tonight. What is the weather like?", "Reykjavik"),
        ("What's the weather in New York?", "New York"),
        ("Paris weather please", "Paris"),
        ("Hi, I'm Ann. How is it in Rome?", "Rome"),
        ("Tell me about São Paulo's climate", "São Paulo"),
        ('Look up "the grey havens" for me', "the grey havens"),
        ("city: bergen, please", "bergen"),
        ("the city is Bergen", "Bergen"),
        ("the weather at home", "weather"),
    ],
)
def test_a_text_argument_is_what_the_user_means(text: str, expected: str) -> None:
    assert arguments(text, city=STRING) == {"city": expected}


def test_each_schema_gets_a_fitting_value() -> None:
    found = arguments(
        "Book 2 seats for Alice on 2026-03-01 to Berlin at 19.5 euros, window seat, write to a.b@c.example",
        seats={"type": "integer", "minimum": 1},
        price={"type": "number"},
        kind={"type": "string", "enum": ["aisle", "window"]},
        when={"type": "string", "format": "date"},
        mail={"type": "string", "format": "email"},
        window={"type": "boolean"},
        smoking={"type": "boolean"},
        always={"const": 7},
        person={"anyOf": [{"type": "null"}, {"type": "string"}]},
        extra={"type": ["null", "object"], "properties": {"city": STRING}, "required": ["city"]},
        unlisted={},
    )

    assert found["seats"] == 2
    assert found["price"] == 19.5
    assert found["kind"] == "window"
    assert found["when"] == "2026-03-01"
    assert found["mail"] == "a.b@c.example"
    assert (found["window"], found["smoking"], found["always"]) == (True, False, 7)
    assert (found["person"], found["extra"]) == ("Alice", {"city": "Berlin"})
    assert isinstance(found["unlisted"], str)


def test_bounds_references_and_lists_are_kept() -> None:
    schema = {
        "type": "object",
        "properties": {
            "percent": {"type": "integer", "maximum": 100},
            "short": {"type": "string", "maxLength": 3},
            "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
            "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 2},
        },
        "required": ["percent", "short", "colours", "numbers", "places"],
        "$defs": {"place": {"type": "object", "properties": {"city": STRING}, "required": ["city"]}},
    }
    conversation = Conversation((Said("user", "Paint 250 doors of Oslo blue and red, 3 a day"),))

    found = arguments_for(Tool("paint", "", schema), conversation, DRAWS)

    assert found["percent"] == 100
    assert len(found["short"]) <= 3
    assert found["colours"] == ["red", "blue"]
    assert found["numbers"] == [250, 3]
    assert [set(place) for place in found["places"]] == [{"city"}, {"city"}]


def test_optional_fields_are_left_out_unless_spoken_of() -> None:
    unit = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    weather = tool("weather", ["city"], city=STRING, unit=unit, days={"type": "integer"})

    def ask(text: str) -> dict[str, Any]:
        return arguments_for(weather, Conversation((Said("user", text),)), DRAWS)

    assert ask("Weather in Oslo?") == {"city": "Oslo"}
    assert ask("Weather in Oslo in Fahrenheit, days: 3") == {"city": "Oslo", "unit": "fahrenheit", "days": 3}


def test_later_tools_use_what_earlier_ones_returned() -> None:
    entries = (
        Said("user", "Cancel the order of Ann"),
        Called("c1", "find_order", '{"customer": "Ann"}'),
        Returned("c1", '{"order": {"order_id": "A-17", "value": 12}}'),
        Called("c2", "find_order", '{"customer": "Ann"}'),
        Returned("c2", '{"value": 30}'),
    )
    cancel = tool("cancel", order_id=STRING, values={"type": "array", "items": {"type": "integer"}})

    assert arguments_for(cancel, Conversation(entries), DRAWS) == {"order_id": "A-17", "values": [12, 30]}


def test_required_fields_are_there_even_when_nothing_fits() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "undeclared"]}

    assert set(arguments_for(Tool("odd", "", odd), Conversation(()), DRAWS)) == {"a", "undeclared"}
    assert arguments_for(Tool("bare", "", {}), Conversation(()), DRAWS) == {}


def play(*tools: Tool, text: str = "How is it in Oslo?", **settings: Any) -> list[Entry]:
    """The conversation until the model answers; every tool returns its own name."""
    entries: list[Entry] = [Said("user", text)]
    for _ in range(10):
        turn = use_tools_or_answer(Conversation(tuple(entries), tools=tools, **settings), DRAWS)
        entries += turn
        calls = [entry for entry in turn if isinstance(entry, Called)]
        if not calls:
            return entries
        entries += [Returned(call.call_id, json.dumps({"note": f"from {call.name}"})) for call in calls]
    raise AssertionError("it never answered")


def test_it_uses_each_tool_once_and_then_answers() -> None:
    entries = play(tool("first", city=STRING), tool("second", city=STRING))

    assert [entry.name for entry in entries if isinstance(entry, Called)] == ["first", "second"]
    assert isinstance(entries[-1], Said)
    assert "from first" in entries[-1].text
    assert "from second" in entries[-1].text


def test_of_many_tools_it_picks_the_fitting_ones() -> None:
    tools = [tool(f"unrelated_{n}", description="something else", x=STRING) for n in range(6)]
    tools.append(tool("get_weather", description="The weather in a city", city=STRING))

    called = [entry.name for entry in play(*tools, text="The weather in Oslo?") if isinstance(entry, Called)]

    assert "get_weather" in called
    assert len(called) <= 3


def test_it_asks_about_everything_the_user_named_at_once_if_it_may() -> None:
    def cities(**settings: Any) -> list[str]:
        entries = play(tool(city=STRING), text="Is it warmer in Oslo or in Rome?", **settings)
        return [json.loads(entry.arguments)["city"] for entry in entries if isinstance(entry, Called)]

    assert cities() == ["Oslo", "Rome"]
    assert cities(parallel_tool_calls=False) == ["Oslo"]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Pick one and put it into \\boxed{}:\nA) red\nB) blue", ("\\boxed{A}", "\\boxed{B}")),
        ("Pick one.\nA. red\nB. blue\nC. green", ("Answer: A", "Answer: B", "Answer: C")),
        ("What is 3 times 4? Answer in \\boxed{}", ("\\boxed{3}", "\\boxed{4}")),
    ],
)
def test_without_tools_it_guesses_in_the_form_that_is_asked_for(question: str, expected: tuple[str, ...]) -> None:
    guesses = {
        entry.text
        for seed in range(30)
        for entry in use_tools_or_answer(Conversation((Said("user", question),)), Draws(seed, b""))
        if isinstance(entry, Said)
    }

    assert guesses == set(expected)


def test_without_tools_and_script_it_still_says_something() -> None:
    (said,) = use_tools_or_answer(Conversation((Said("user", "Good morning {friend}"),)), DRAWS)

    assert isinstance(said, Said)
    assert "Good morning {friend}" in said.text


def test_a_schema_without_bottom_is_given_up_in_time() -> None:
    bottomless = {"type": "array", "minItems": 500, "items": {"$ref": "#"}}
    tree = {"type": "object", "properties": {key: {"$ref": "#"} for key in "abcdef"}, "required": list("abcdef")}

    for schema in (tree, {"type": "object", "properties": {"a": bottomless}, "required": ["a"]}):
        assert len(json.dumps(arguments_for(Tool("deep", "", schema), Conversation(()), DRAWS))) < 100_000


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYWORDS = st.sampled_from(
    """type properties required items enum const anyOf $ref minItems maxItems minimum maximum maxLength minLength
    format default city""".split()  # noqa: SIM905
)
TYPES = st.sampled_from(["object", "array", "integer", "number", "string", "boolean", "null"])
SCHEMAS = st.recursive(
    st.dictionaries(KEYWORDS, JSON_VALUES | TYPES, max_size=4) | st.fixed_dictionaries({"type": TYPES}),
    lambda inner: st.fixed_dictionaries(
        {"type": TYPES},
        optional={
            "properties": st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=3),
            "required": st.lists(st.text(max_size=6), max_size=3),
            "items": inner,
            "anyOf": st.lists(inner, max_size=3),
            "$ref": st.sampled_from(["#", "#/properties/a", "#/nowhere"]),
        },
    ),
    max_leaves=8,
)


@given(schema=SCHEMAS, text=st.text(max_size=80))
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_no_schema_and_no_text_is_too_odd(schema: dict[str, Any], text: str) -> None:
    found = arguments_for(Tool("odd", "", schema), Conversation((Said("user", text),)), DRAWS)

    assert isinstance(found, dict)
    json.dumps(found)
