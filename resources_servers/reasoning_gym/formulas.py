"""Formulas that models write, read into sympy's objects without running any of their text.

Python only parses the text. Its syntax tree is read here: numbers, operators, and the names and functions that are
listed. Everything else is refused, and so is what is too large, before sympy is asked to compute it.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import sympy

Value: TypeAlias = Any
"""A `sympy.Expr`; the library has no types."""
Function: TypeAlias = Callable[..., Value]

MAX_CHARACTERS = 20_000
MAX_NODES = 5_000
MAX_NESTING = 100
MAX_LITERAL = 1_000
"""Characters of one number."""
MAX_EXPONENT = 1_000
"""Also of the largest number with a factorial."""
MAX_BITS = 20_000
"""Of the numbers in a power."""


class FormulaError(ValueError):
    """A text is no formula, or one that is too large."""


class Formula(NamedTuple):
    """What a text amounts to."""

    value: Value
    numbers: list[int | float]
    """Those that are written in it."""


def read_number(text: str) -> Formula:
    """Read a formula of numbers.

    Raises:
        FormulaError: the text is none, or one that is too large.
    """
    return _Reader(text, {}, _OF_NUMBERS).read()


def read_expression(text: str, *, variables: frozenset[str] = frozenset(), may_integrate: bool = False) -> Value:
    """Read a formula with variables.

    Args:
        text: What the model wrote.
        variables: Names of variables. Others are variables, too, if they mean nothing to sympy.
        may_integrate: Whether it may hold integrals that are not computed.

    Raises:
        FormulaError: the text is none, or one that is too large.
    """
    functions = {**_FUNCTIONS, "Integral": sympy.Integral} if may_integrate else _FUNCTIONS
    names = {**_CONSTANTS, **{name: sympy.Symbol(name) for name in variables}}
    return _Reader(text, names, functions, makes_variables=True).read().value


class _Reader:
    """Reads one text."""

    def __init__(
        self, text: str, names: Mapping[str, Value], functions: Mapping[str, Function], *, makes_variables: bool = False
    ) -> None:
        self._text = text.strip().replace("!!", _DOUBLE_FACTORIAL).replace("!", _FACTORIAL)
        self._names = names
        self._functions = functions
        self._makes_variables = makes_variables
        self._nodes = 0
        self._numbers: list[int | float] = []

    def read(self) -> Formula:
        """Parse the text and read its tree."""
        if len(self._text) > MAX_CHARACTERS:
            raise FormulaError(f"the formula has more than {MAX_CHARACTERS} characters")
        try:
            tree = ast.parse(self._text, mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise FormulaError(f"this is no formula: {error}") from error
        value = self._value(tree, 1)
        if not isinstance(value, sympy.Expr):
            raise FormulaError("this is no formula of numbers")
        return Formula(value, self._numbers)

    def _value(self, node: ast.expr, depth: int) -> Value:
        self._nodes += 1
        if depth > MAX_NESTING or self._nodes > MAX_NODES:
            raise FormulaError(f"the formula has more than {MAX_NESTING} levels or {MAX_NODES} parts")
        match node:
            case ast.Constant():
                return self._number(node)
            case ast.Name():
                return self._name(node.id)
            case ast.UnaryOp() if type(node.op) in _SIGNS:
                return _SIGNS[type(node.op)](self._value(node.operand, depth + 1))
            case ast.BinOp():
                return self._operation(node, depth)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in self._functions:
                return self._functions[name](*(self._value(argument, depth + 1) for argument in node.args))
            case ast.Subscript(slice=ast.Slice(lower=lower)):
                return (_factorial if lower is None else _factorial2)(self._value(node.value, depth + 1))
            case _:
                raise FormulaError(f"a formula has no {type(node).__name__}")

    def _operation(self, node: ast.BinOp, depth: int) -> Value:
        """Compute a chain such as 1 + 2 - 3 from its left end, however long it is."""
        chain = [node]
        while isinstance(chain[-1].left, ast.BinOp):
            chain.append(chain[-1].left)
        value = self._value(chain[-1].left, depth + 1)
        for step in reversed(chain):
            compute = _OPERATORS.get(type(step.op))
            if compute is None:
                raise FormulaError(f"a formula has no {type(step.op).__name__}")
            value = compute(value, self._value(step.right, depth + 1))
        return value

    def _number(self, node: ast.Constant) -> Value:
        text, value = ast.get_source_segment(self._text, node) or "", node.value
        if isinstance(value, bool) or not isinstance(value, int | float) or len(text) > MAX_LITERAL:
            raise FormulaError(f"this is no number, or one with more than {MAX_LITERAL} characters: {text[:50]}")
        self._numbers.append(value)
        if isinstance(value, int):
            return sympy.Integer(value)
        if value in (0.0, math.inf):  # also 1e-999999999, which sympy would compute
            return sympy.Float(value)
        return sympy.Float(text.replace("_", ""))

    def _name(self, name: str) -> Value:
        if name in self._names:
            return self._names[name]
        if not self._makes_variables or name in sympy.__all__:
            raise FormulaError(f"a formula has no {name[:50]!r} here")
        return sympy.Symbol(name)


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, sympy.Number) and not abs(exponent) <= MAX_EXPONENT:
        raise FormulaError(f"an exponent is larger than {MAX_EXPONENT}")
    if isinstance(exponent, sympy.Number) and _bits(base) * abs(exponent) > MAX_BITS:
        raise FormulaError(f"a power has more than {MAX_BITS} bits")
    return base**exponent


def _bits(value: Value) -> int:
    """The size of the largest number in it."""
    numbers = value.atoms(sympy.Rational)
    return max((number.p.bit_length() + number.q.bit_length() for number in numbers), default=1)


def _factorial(number: Value) -> Value:
    return sympy.factorial(_small(number))


def _factorial2(number: Value) -> Value:
    return sympy.factorial2(_small(number))


def _small(number: Value) -> Value:
    if isinstance(number, sympy.Number) and not abs(number) <= MAX_EXPONENT:
        raise FormulaError(f"a factorial is of a number larger than {MAX_EXPONENT}")
    return number


def _exclusive_or(left: Value, right: Value) -> Value:
    """Compute what `^` means to Python, between whole numbers."""
    if not (isinstance(left, sympy.Integer) and isinstance(right, sympy.Integer)):
        raise FormulaError("a power is written with **, not with ^")
    return left ^ right


_FACTORIAL, _DOUBLE_FACTORIAL = "[:]", "[0:]"
"""What Python can parse in the place of ! and !!: it binds as they do, and means nothing else in a formula."""
_SIGNS: Mapping[type[ast.unaryop], Function] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATORS: Mapping[type[ast.operator], Function] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.BitXor: _exclusive_or,
}
_CONSTANTS: Mapping[str, Value] = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}
_OF_NUMBERS: Mapping[str, Function] = {"sqrt": sympy.sqrt, "abs": sympy.Abs, "pow": _power, "factorial": _factorial}
"""None that makes a number of nothing, as rounding does and most functions do at 0."""
_ANALYTIC = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc"),
    *("sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh", "acoth", "asech", "acsch"),
    *("exp", "log", "ln", "cbrt", "Abs", "sign", "floor", "ceiling", "erf", "erfc", "erfi"),
    *("Ei", "li", "Si", "Ci", "Shi", "Chi", "fresnels", "fresnelc", "Rational", "Integer", "S"),
)
_FUNCTIONS: Mapping[str, Function] = {
    **_OF_NUMBERS,
    **{name: getattr(sympy, name) for name in _ANALYTIC},
    "factorial2": _factorial2,
}
