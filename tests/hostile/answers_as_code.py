"""Answers to puzzles that are programs, and others that a careless scorer gives more than they deserve.

Each stands for many: `{right}` is the right answer of the row, `{program}` a Python program that is written without
quotes, dots and underscores, and `{quoted}` the same one in quotes. The program leaves a file, changes the environment,
and makes every later comparison come out right.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "NEMO_GYM_HOSTILE_MARK"
MOST = 0.05
"""What the library gives for any formula of numbers; other wrong answers get less."""

Entry = dict[str, Any]


class Answer(NamedTuple):
    """What the model says, to which row."""

    task: str
    name: str
    text: str


ENTRIES: Mapping[str, Entry] = {
    "countdown": {"answer": "9*3 + 4", "metadata": {"numbers": [9, 3, 4], "target": 31}},
    "puzzle24": {"answer": "1*2*3*4", "metadata": {"numbers": [1, 2, 3, 4]}},
    "polynomial_multiplication": {"answer": "x**2 - 1", "metadata": {}},
    "simple_integration": {"answer": "x**2 + C", "metadata": {"variable": "x", "integrand": "2*x"}},
    "intermediate_integration": {"answer": "sin(x) + C", "metadata": {"variable": "x", "integrand": "cos(x)"}},
    "string_insertion": {"answer": "ABCDA", "metadata": {}},
    "spiral_matrix": {"answer": "1 2 4 3", "metadata": {}},
    "binary_matrix": {"answer": "0 1\n1 2", "metadata": {}},
    "n_queens": {"answer": "Q _\n_ _", "metadata": {"valid_answers": ["Q _\n_ _"]}},
    "number_sorting": {"answer": "['1.0', '2.0', '3.0']", "metadata": {"direction": "ascending"}},
    "bitwise_arithmetic": {"answer": "0xf", "metadata": {"problem": "(0x7 + 0x8)"}},
    "complex_arithmetic": {"answer": "8.0 + 3.0i", "metadata": {"result": [8, 3]}},
    "calendar_arithmetic": {"answer": "-1", "metadata": {"task": "recurring_event_day"}},
}
FORMULAS = ("countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration")

SPELLINGS: Mapping[str, str] = {
    "or": "exec({program}) or {right}",
    "or eval": "eval({program_expression}) or {right}",
    "quoted": "exec({quoted}) or {right}",
    "after": "({right}) if not exec({program}) else x",
    "in a list": "[exec({program}), {right}][1]",
    "in a tuple": "(exec({program}), {right})[-1]",
    "in a dictionary": "{{exec({program}): {right}}}[None]",
    "in a set": "max({{{right}}} - {{exec({program})}})",
    "in a comprehension": "[{right} for _ in [exec({program})]][0]",
    "in a generator": "sum(({right}) for _ in [exec({program})])",
    "in a lambda": "(lambda: exec({program}) or {right})()",
    "in a default": "(lambda x=exec({program}): {right})()",
    "in an assignment": "(y := exec({program})) or {right}",
    "in a comparison": "(exec({program}) == None) * ({right})",
    "in a slice": "[{right}][exec({program}):][0]",
    "in a condition": "{right} if [exec({program})] else 0",
    "in a keyword": "Abs(1, evaluate=exec({program})) and ({right})",
    "in a star": "Abs(*[exec({program})] or [1]) and ({right})",
    "in a format": "f'{{exec({program})}}' and ({right})",
    "in a factorial": "exec({program})! or {right}",
    "in an argument": "sqrt(exec({program}) or 1)*({right})",
    "in a power": "({right})**(exec({program}) or 1)",
    "under a sign": "-(exec({program}) or -({right}))",
    "added": "{right} + 0*len(str(exec({program})))",
    "in brackets of a list": "[{right}][len(str(exec({program})))*0]",
    "await": "await exec({program}) or {right}",
    "a statement": "exec({program}); {right}",
    "on a line of its own": "exec({program})\n{right}",
    "a decorator": "@exec({program})\nclass A: pass",
    "sympify": "sympify({quoted}) or {right}",
    "S": "S({program}) + {right}",
    "parse_expr": "parse_expr({quoted}) or {right}",
    "Symbol": "Symbol({program}) or {right}",
    "lambdify": "lambdify(x, {quoted})(1) or {right}",
    "Function": "Function({quoted})(1) or {right}",
    "Rational of a text": "Rational({program}) or {right}",
    "Integer of a text": "Integer({quoted}) or {right}",
    "Float of a text": "Float({quoted}) or {right}",
    "an import": "__import__('os').system({quoted}) or {right}",
    "an attribute": "x.__class__.__base__.__subclasses__() or {right}",
    "a method of a number": "(1).__class__.__base__.__subclasses__() or {right}",
    "an attribute without dots": "getattr(x, {program}) or {right}",
    "a file": "open({path}, {mode}) or {right}",
    "names": "globals() or locals() or vars() or {right}",
    "a breakpoint": "breakpoint() or {right}",
    "an exit": "exit() or {right}",
    "input": "input() or {right}",
    "letters of another width": "\uff45\uff58\uff45\uff43({program}) or {right}",
    "escapes": "\\x65xec({program}) or {right}",
    "bytes": "exec(bytes([{codes}])) or {right}",
    "a map": "list(map(exec, [{program}])) and ({right})",
    "preview": "preview({right}, output={quoted})",
    "srepr": "srepr({right}) or exec({program})",
}
"""Ways to have a program run by whoever evaluates the answer."""

LISTS: Mapping[str, str] = {
    "append": "[].append(exec({program})) or {listed}",
    "in the list": "[*{listed}, *[exec({program})][1:]]",
    "or": "exec({program}) or {listed}",
    "quoted": "exec({quoted}) or {listed}",
    "computed": "list({listed})",
    "added": "{listed} + [exec({program})][1:]",
}

TOO_MUCH: Mapping[str, str] = {
    "a tower": "9**9**9**9",
    "a tower of decimals": "9.0**9.0**9.0**9.0",
    "powers of powers": "((((9**999)**999)**999)**999)**999",
    "a power in brackets": "(x + 1)**(10**9)",
    "a coefficient in a power": "(2*x)**(10**9)",
    "pow": "pow(9, pow(9, pow(9, 9)))",
    "a small root of a large power": "(9**(10**9))**(1/10**9)",
    "a factorial": "999999999!",
    "factorials": "5!!!!!!!!!",
    "a factorial of a factorial": "factorial(factorial(factorial(9)))",
    "a decimal of many digits": "1e999999999999",
    "a small decimal": "1e-999999999999",
    "many digits": "9" * 4_000,
    "very many digits": "9" * 100_000,
    "hexadecimal digits": "0x" + "f" * 100_000,
    "many terms": "+".join(["x"] * 9_000),
    "many numbers": "*".join(["7"] * 9_000),
    "deep parentheses": "(" * 5_000 + "1" + ")" * 5_000,
    "deep calls": "sqrt(" * 150 + "1" + ")" * 150,
    "deep signs": "-" * 50_000 + "1",
    "deep powers": "x**" * 4_000 + "1",
    "deep lists": "[" * 90 + "]" * 90,
    "very deep lists": "[" * 100_000 + "]" * 100_000,
    "open brackets": "[" * 100_000,
    "an exponential": "exp(exp(exp(exp(exp(9.0)))))",
    "an exponential of a logarithm": "exp(999999999*log(3))",
    "a zero byte": "1 + \x00",
    "nothing": "()",
    "not a number": "nan",
    "infinity": "oo",
    "a division by zero": "1/0",
}
"""Answers that take for ever, or all memory, to whoever evaluates them."""

UNDESERVED: Mapping[str, Mapping[str, str]] = {
    "countdown": {
        "hexadecimal numbers": "0x1F + 9*3*4*0x0",
        "octal numbers": "0o37 + 9*3*4*0b0",
        "underscores": "3_1 + (9 + 3 + 4)*0_0",
        "decimals": "31e0 + (9 + 3 + 4)*0e0",
        "a decimal of two numbers": "9.3 + 4*5.425/(1.0e0)",
        "letters that are 1": "x/x*(9*3 + 4) + 9*3 + 4 - 9*3 - 4",
        "constants": "9*3 + 4 + floor(pi)*0e0",
        "truth": "True*(9*3 + 4)",
        "a comment": "31e0 # 9 3 4",
        "digits of another script": "\uff19*\uff13 + \uff14 + 31e0",
        "the target": "31",
    },
    "puzzle24": {
        "other numbers": "6*4*1*1",
        "other numbers that are easier": "8*3 + 1 - 1",
        "a bit more than 24": "(4 + 2)*4 + 1/3",
        "hexadecimal numbers": "0x18 + 1*2*3*4*0x0",
        "constants": "floor(exp(pi)) + (1 + 2 + 3 + 4)*0e0 + 1e0",
        "rounding": "floor(2**(4 + 1 - 3/8))",
        "one number twice": "4*4 + 4*2",
    },
    "polynomial_multiplication": {
        "the question": "(x - 1)*(x + 1)",
        "a function that expands": "expand((x - 1)*(x + 1))",
        "a function that simplifies": "simplify((x - 1)*(x + 1))",
        "a polynomial object": "Poly((x - 1)*(x + 1)).as_expr()",
    },
    "simple_integration": {
        "an integral": "Integral(2*x, x) + C",
        "a function that integrates": "integrate(2*x, x) + C",
        "a product that is integrated": "2*Integral(x, x)",
        "an antiderivative of something else": "x**2 + x",
    },
    "intermediate_integration": {
        "an integral": "Integral(cos(x), x) + C",
        "a function that integrates": "integrate(cos(x), x)",
        "a solution": "dsolve(Derivative(f(x), x) - cos(x)).rhs",
    },
    "string_insertion": {"a computed list": "list(reversed(list(reversed(list('ABCDA')))))"},
    "number_sorting": {"no numbers": "[NaN, NaN, NaN]", "no numbers as texts": '["nan", "\\u006ean", "-nan"]'},
    "complex_arithmetic": {"no number": "nan", "in brackets": "((N a N))", "imaginary": "nanj", "both": "1+nani"},
    "calendar_arithmetic": {"more than the day before none": "0", "a late day": "40", "a very late day": "9" * 200},
    "bitwise_arithmetic": {"the question": "(0x7 + 0x8)", "a program": "exec({program}) or 0xf"},
}


def programs(trace: Path) -> Iterator[Answer]:
    """Answers that would write to `trace`, and others that deserve nothing."""
    for task in ENTRIES:
        spellings = SPELLINGS if task in FORMULAS else LISTS
        for name, text in {**spellings, **UNDESERVED.get(task, {})}.items():
            yield Answer(task, name, _filled(text, task, trace))


def too_much() -> Iterator[Answer]:
    """Answers that take much of whoever evaluates them; tasks that are scored alike share them."""
    for task in ("countdown", "polynomial_multiplication", "simple_integration", "spiral_matrix", "number_sorting"):
        for name, text in TOO_MUCH.items():
            yield Answer(task, name, text)


def _filled(text: str, task: str, trace: Path) -> str:
    right = ENTRIES[task]["answer"]
    program = _program(trace)
    expression = f"[exec({program!r})][1:]"
    listed = str([line.split() for line in right.split("\n")] if "\n" in right else list(right.replace(" ", "")))
    return text.format(
        right=right,
        listed=listed,
        program=_without_quotes(program),
        program_expression=_without_quotes(expression),
        quoted=repr(program),
        codes=", ".join(str(code) for code in program.encode()),
        path=_without_quotes(str(trace)),
        mode=_without_quotes("w"),
    )


def _program(trace: Path) -> str:
    return (
        f"import os, re, builtins; open({str(trace)!r}, 'w').close(); os.environ[{VARIABLE!r}] = 'written'; "
        "re.findall = lambda *a: ['6', '4', '1', '1']; builtins.sorted = lambda *a, **k: []; "
        "builtins.abs = lambda *a: 0"
    )


def _without_quotes(text: str) -> str:
    return "+".join(f"chr({ord(character)})" for character in text)
