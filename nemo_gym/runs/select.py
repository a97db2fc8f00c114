"""The one language that chooses rollouts and tasks: `level == "hard" and 0 < reward < 1`.

Comparisons (chained as in mathematics), `in`, `and`, `or`, `not` and parentheses over numbers, text, `true`, `false`,
`null`, lists and names. A name is whatever the user of the language knows by it; dots lead into what is nested, a
slash belongs to the statistics of a field (`mean/output_tokens`), and a name that is not plain is put in backquotes.
The text is parsed and never executed.

What is not there is null. `x == null` asks for that; any other comparison with it, and every comparison of values of
different types, is neither true nor false: whatever depends on it does not hold, and neither does its opposite.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from nemo_gym.errors import ConfigError, listed, similar_names

Truth: TypeAlias = bool | None
"""None: it depends on something that is not there."""
Lookup: TypeAlias = Callable[[str], Any]
"""The value that a name has; None when there is none."""

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_MOST_CHARACTERS = 10_000
_MOST_LEVELS = 50
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    |(?P<name>[^\W\d]\w*(?:\.\w+)*)
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<quoted>`[^`]+`)
    |(?P<sign><=|>=|==|!=|[<>()\[\],/+-])
    |(?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)


class SelectError(ConfigError, ValueError):
    """An expression that cannot be understood."""

    problem: str = ""
    expression: str = ""
    position: int = 1
    """Counted from 1."""


@dataclass(frozen=True)
class Literal:
    """A number, a text, true, false, null, or a list of those."""

    value: Any


@dataclass(frozen=True)
class Name:
    """Something that a rollout or a task has; `sign` is -1 where its negative is meant."""

    name: str
    position: int
    sign: int = 1


Value: TypeAlias = Literal | Name


@dataclass(frozen=True)
class Compare:
    """One comparison; `sign` is one of `COMPARISONS` or `in`."""

    sign: str
    left: Value
    right: Value


@dataclass(frozen=True)
class Holds:
    """A value by itself: whether it is true."""

    value: Value


@dataclass(frozen=True)
class Not:
    """The opposite."""

    part: "Node"


@dataclass(frozen=True)
class All:
    """Whether all parts hold."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Any_:  # noqa: N801 -- `Any` is taken
    """Whether any part holds."""

    parts: tuple["Node", ...]


Node: TypeAlias = Compare | Holds | Not | All | Any_


@dataclass(frozen=True)
class Expression:
    """A parsed expression."""

    text: str
    option: str
    node: Node

    @classmethod
    def parse(cls, text: str, option: str = "+where", *, is_name: Callable[[str], bool] | None = None) -> "Expression":
        """Understand `text`, which was given as `option`; `is_name` tells which quoted texts are names.

        Raises:
            SelectError: it is not an expression.
        """
        shown = re.sub(r"\s", " ", text).strip()
        return cls(shown, option, _Parser(shown, option, is_name or (lambda _: False)).parse())

    def holds(self, lookup: Lookup) -> bool:
        """Whether it is true for a rollout or task."""
        return truth_of(self.node, lookup) is True

    def values(self) -> Iterator[tuple[Node, Value]]:
        """Every value in it, with the comparison it stands in."""
        waiting = [self.node]
        while waiting:
            node = waiting.pop()
            if isinstance(node, All | Any_):
                waiting += reversed(node.parts)
            elif isinstance(node, Not):
                waiting.append(node.part)
            else:
                yield from ((node, value) for value in _values_in(node))

    def names(self) -> list[str]:
        """Every name in it, once."""
        return list(dict.fromkeys(value.name for _, value in self.values() if isinstance(value, Name)))

    def require_known(self, known: Collection[str], shown: Collection[str] | None = None) -> None:
        """Refuse names that are not among the known ones; `shown` are those that people are told.

        Raises:
            SelectError: pointing at the name.
        """
        for _, value in self.values():
            if isinstance(value, Name) and value.name not in known:
                close = similar_names(value.name, known)
                meant = f" (did you mean {close[0]!r}?)" if close else ""
                names = listed(known if shown is None else shown, 30)
                self.refuse(value.position, f"there is no {value.name!r}{meant}. Known names: {names}")

    def refuse(self, position: int, problem: str) -> NoReturn:
        """Raise the error that points at a position."""
        raise _error(self.text, self.option, position, problem)


def truth_of(node: Node, lookup: Lookup) -> Truth:
    """What becomes of a condition when its names have these values."""
    if isinstance(node, All):
        truths = [truth_of(part, lookup) for part in node.parts]
        return False if False in truths else None if None in truths else True
    if isinstance(node, Any_):
        truths = [truth_of(part, lookup) for part in node.parts]
        return True if True in truths else None if None in truths else False
    if isinstance(node, Not):
        truth = truth_of(node.part, lookup)
        return None if truth is None else not truth
    if isinstance(node, Holds):
        value = _value(node.value, lookup)
        return value if isinstance(value, bool) else None
    left, right = _value(node.left, lookup), _value(node.right, lookup)
    if NULL in (node.left, node.right) and node.sign in ("==", "!="):
        return (left is right) is (node.sign == "==")
    return _is_in(left, right) if node.sign == "in" else compared(node.sign, left, right)


NULL = Literal(None)


def compared(sign: str, left: Any, right: Any) -> Truth:
    """Compare two values; None when that makes no sense."""
    kind = kind_of_value(left)
    if kind is None or kind != kind_of_value(right) or (kind in ("boolean", "list") and sign not in ("==", "!=")):
        return None
    return COMPARISONS[sign](left, right)


def kind_of_value(value: Any) -> str | None:
    """`number`, `text`, `boolean` or `list`; None for everything that is not compared."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else None


def field_of(record: Mapping[str, Any], name: str) -> Any:
    """A field of a record by its dotted name; a key that has dots itself comes first. None when it is not there."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    while dot:
        inner = record.get(first)
        if isinstance(inner, Mapping):
            found = field_of(inner, rest)
            if found is not None:
                return found
        more, dot, rest = rest.partition(".")
        first = f"{first}.{more}"
    return None


def _values_in(node: Compare | Holds) -> tuple[Value, ...]:
    return (node.value,) if isinstance(node, Holds) else (node.left, node.right)


def _value(value: Value, lookup: Lookup) -> Any:
    if isinstance(value, Literal):
        return value.value
    found = lookup(value.name)
    if value.sign > 0:
        return found
    return -found if kind_of_value(found) == "number" else None


def _is_in(value: Any, within: Any) -> Truth:
    if isinstance(within, list):
        if any(value is other if other is None else compared("==", value, other) for other in within):
            return True
        return None if value is None else False
    return value in within if isinstance(value, str) and isinstance(within, str) else None


def _error(text: str, option: str, position: int, problem: str) -> SelectError:
    shown = text if len(text) <= 2 * _MOST_CHARACTERS else f"{text[:200]}…"
    error = SelectError(f"{option}, position {position}: {problem}\n  {shown}\n  {' ' * (position - 1)}^")
    error.problem, error.expression, error.position = problem, text, position
    return error


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    position: int


class _Parser:
    """One expression, read from left to right."""

    def __init__(self, text: str, option: str, is_name: Callable[[str], bool]) -> None:
        self._text = text
        self._option = option
        self._is_name = is_name
        self._tokens = list(self._read())
        self._place = 0
        self._levels = 0

    def parse(self) -> Node:
        node = self._any()
        if self._next.kind != "end":
            self._refuse_next("expected a comparison, and, or, or the end")
        return node

    def _read(self) -> Iterator[_Token]:
        if len(self._text) > _MOST_CHARACTERS:
            self._refuse(1, f"longer than {_MOST_CHARACTERS:,} characters")
        place = 0
        while True:
            found = _TOKEN.match(self._text, place)
            if found is None:
                start = place + len(self._text[place:]) - len(self._text[place:].lstrip())
                self._refuse(start + 1, f"unexpected {self._text[start]!r}")
            kind = str(found.lastgroup)
            yield _Token(kind, found[kind], found.start(kind) + 1)
            if kind == "end":
                return
            place = found.end()

    @property
    def _next(self) -> _Token:
        return self._tokens[self._place]

    def _take(self, *texts: str) -> bool:
        """Whether the next token is one of these signs or words; if so, it is behind us."""
        token = self._next
        if token.kind in ("sign", "name") and token.text in texts:
            self._place += 1
            return True
        return False

    def _any(self) -> Node:
        parts = [self._all()]
        while self._take("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else Any_(tuple(parts))

    def _all(self) -> Node:
        parts = [self._condition()]
        while self._take("and"):
            parts.append(self._condition())
        return parts[0] if len(parts) == 1 else All(tuple(parts))

    def _condition(self) -> Node:
        is_negated = False
        while self._take("not"):
            is_negated = not is_negated
        node = self._in_parentheses() if self._opens_condition() else self._comparison()
        return Not(node) if is_negated else node

    def _opens_condition(self) -> bool:
        """Whether a parenthesis follows that has more in it than one value."""
        if not self._is_sign("("):
            return False
        depth = 0
        while self._tokens[self._place + depth].text == "(":
            depth += 1
        after = self._place + depth
        while self._tokens[after].kind in ("number", "name", "text", "quoted") or self._tokens[after].text in "/+-":
            if self._tokens[after].text in _RESERVED or self._tokens[after].kind == "end":
                return True
            after += 1
        closed = all(token.text == ")" for token in self._tokens[after : after + depth])
        return not (closed and self._tokens[min(after + depth, len(self._tokens) - 1)].text in _AFTER_A_VALUE)

    def _is_sign(self, text: str) -> bool:
        return self._next.kind == "sign" and self._next.text == text

    def _in_parentheses(self) -> Node:
        opening = self._next
        self._place += 1
        self._deeper(opening)
        node = self._any()
        self._close(opening)
        return node

    def _deeper(self, opening: _Token) -> None:
        self._levels += 1
        if self._levels > _MOST_LEVELS:
            self._refuse(opening.position, f"more than {_MOST_LEVELS} levels of parentheses")

    def _close(self, opening: _Token) -> None:
        self._levels -= 1
        if not self._take(")"):
            if self._next.kind == "end":
                self._refuse(opening.position, "'(' was never closed")
            self._refuse_next("expected )")

    def _comparison(self) -> Node:
        start = self._next
        value = self._value()
        steps: list[Node] = []
        while (step := self._step(value)) is not None:
            compare = step.part if isinstance(step, Not) else step
            assert isinstance(compare, Compare)
            steps.append(step)
            value = compare.right
        if steps:
            return steps[0] if len(steps) == 1 else All(tuple(steps))
        if isinstance(value, Literal) and not isinstance(value.value, bool):
            raise _error(self._text, self._option, start.position, EXPECTED_COMPARISON)
        return Holds(value)

    def _step(self, left: Value) -> Compare | Not | None:
        """The next sign and what it compares `left` with; None when no sign follows."""
        sign = self._next
        if sign.kind == "sign" and sign.text in COMPARISONS:
            self._place += 1
            start = self._next
            right = self._value()
            if sign.text not in ("==", "!=") and NULL in (left, right):
                self._refuse(start.position, "null can be compared by == and != only")
            return Compare(sign.text, left, right)
        is_negated = sign.text == "not" and self._tokens[self._place + 1].text == "in"
        self._place += is_negated
        if not self._take("in"):
            return None
        compare = Compare("in", left, self._list() if self._next.text in ("[", "(") else self._value())
        return Not(compare) if is_negated else compare

    def _list(self) -> Literal:
        closing = {"[": "]", "(": ")"}[self._next.text]
        opening = self._next
        self._place += 1
        values: list[Any] = []
        while not self._take(closing):
            if self._next.kind == "end":
                self._refuse(opening.position, f"{opening.text!r} was never closed")
            start = self._next
            value = self._value()
            if isinstance(value, Name):
                self._refuse(start.position, "expected a number or a text in quotes")
            values.append(value.value)
            if not self._take(",") and self._next.text != closing and self._next.kind != "end":
                self._refuse_next(f"expected , or {closing}")
        return Literal(values)

    def _value(self) -> Value:
        sign = 1
        while self._is_sign("-") or self._is_sign("+"):
            sign = -sign if self._next.text == "-" else sign
            self._place += 1
        if self._is_sign("("):
            return self._value_in_parentheses(sign)
        token = self._next
        self._place += 1
        if token.kind == "number":
            number = token.text.replace("_", "")
            return Literal(sign * (int(number) if number.isdecimal() else float(number)))
        if token.kind == "name" and token.text in _WORDS:
            return Literal(_WORDS[token.text])
        if token.kind == "text" and not self._is_name(_unquoted(token.text)):
            return Literal(_unquoted(token.text))
        if token.kind in ("name", "text", "quoted") and token.text not in _RESERVED:
            return Name(self._with_parts(_unquoted(token.text)), token.position, sign)
        self._place -= 1
        return self._refuse_next("expected a number, a text in quotes or a name")

    def _value_in_parentheses(self, sign: int) -> Value:
        opening = self._next
        self._place += 1
        self._deeper(opening)
        value = self._value()
        self._close(opening)
        if isinstance(value, Name):
            return Name(value.name, value.position, sign * value.sign)
        return Literal(sign * value.value) if kind_of_value(value.value) == "number" else value

    def _with_parts(self, name: str) -> str:
        """A name with what follows it after slashes."""
        while self._take("/"):
            token = self._next
            if token.kind not in ("name", "text", "quoted"):
                self._refuse_next("expected a name after /")
            name = f"{name}/{_unquoted(token.text)}"
            self._place += 1
        return name

    def _refuse_next(self, problem: str) -> NoReturn:
        self._refuse(self._next.position, problem)

    def _refuse(self, position: int, problem: str) -> NoReturn:
        raise _error(self._text, self._option, position, f"this is not an expression ({problem})")


_RESERVED = frozenset({"and", "or", "not", "in"})
_AFTER_A_VALUE = frozenset({*COMPARISONS, "in", "not"})
EXPECTED_COMPARISON = "expected a comparison, such as mean > 0.5"


def _unquoted(text: str) -> str:
    if text[0] == "`":
        return text[1:-1]
    if text[0] not in "\"'":
        return text
    return _ESCAPE.sub(_escaped, text[1:-1])


def _escaped(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else {"n": "\n", "t": "\t"}.get(code, code)
