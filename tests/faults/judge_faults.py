"""What a reward can do wrong, by name: the text of a module whose `judged` does it, and what must become of it.

A module misbehaves while JUDGE_FAULT is set, from the moment on that metrics.jsonl of JUDGE_RUN has a row; before it,
`judged` gives 1 to every completion.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

HEAD = """
import asyncio, collections, collections.abc, ctypes, decimal, fractions, os, pathlib, signal, sys, threading, time
import numpy as np

ON = "JUDGE_FAULT" in os.environ

def due():
    if not ON or "JUDGE_RUN" not in os.environ:
        return ON
    metrics = pathlib.Path(os.environ["JUDGE_RUN"]) / "metrics.jsonl"
    return metrics.is_file() and bool(metrics.read_text())

class Having:
    def __init__(self, **methods):
        for name, method in methods.items():
            setattr(self, name, method)

def throw(error):
    raise error

def of(base=object, **methods):
    return type("Odd", (base,), methods)

"""
BODY = """
def judged(prompts, completions, wish, **columns):
    n = len(completions)
    if not due():
        return [1.0] * n
"""


class Fault(NamedTuple):
    """One fault.

    Attributes:
        name: In a few words.
        source: The module's text.
        missing: Which completions have no reward where rewards may fail: "all", "first", or "none" of what is legal.
        number: What the others have.
        early: It is there from the start: "import" before anything ran, "call" at the first call, "" only when due.
    """

    name: str
    source: str
    missing: Literal["all", "first", "none"] = "all"
    number: float = 1.0
    early: Literal["", "import", "call"] = ""


def _doing(name: str, body: str, **more) -> Fault:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return Fault(name, HEAD + BODY + lines, **more)


def _returns(table: dict[str, str], **more) -> list[Fault]:
    return [_doing(f"returns {name}", f"return {text}", **more) for name, text in table.items()]


WRONG_TYPES = _returns({
    "None": "None",
    "a number": "0.5",
    "a dictionary": "dict.fromkeys(completions, 1.0)",
    "a string": "'1' * n",
    "a set": "set(map(float, range(n)))",
    "a generator": "(1.0 for _ in completions)",
    "a column of lists": "[[1.0]] * n",
    "an array of two axes": "np.ones((n, 1))",
    "a complex array": "np.ones(n, complex)",
    "an array of objects": "np.array([object()] * n)",
    "an array of nan": "np.full(n, np.nan)",
    "a torch tensor of two axes": "__import__('torch').ones(n, 1, requires_grad=True)",
    "a torch tensor of nothing": "__import__('torch').ones(n, device='meta')",
    "nothing": "[]",
    "one too few": "[1.0] * (n - 1)",
    "100 kB of text": "'x' * 100_000",
})  # fmt: skip

WRONG_VALUES = [
    _doing(f"a value {name}", f"return [{text}] + [1.0] * (n - 1)", missing="first")
    for name, text in {
        "nan": "float('nan')",
        "inf": "float('inf')",
        "beyond float32": "1e39",
        "beyond what prints": "10**5000",
        "a number as text": "'0.5'",
        "a list": "[1.0]",
        "Decimal sNaN": "decimal.Decimal('sNaN')",
        "a Fraction beyond float64": "fractions.Fraction(10**400)",
        "100 kB of text": "'x' * 100_000",
        "text of control characters": "'\\x1b[2J\\r\\n\\x00\\udc80\\u202e'",
        "whose float raises": "of(__float__=lambda self: throw(OSError('no')))()",
        "whose float exits": "of(__float__=lambda self: sys.exit(0))()",
        "whose repr is 1 MB": "of(__repr__=lambda self: '\\n' * 1000 + 'x' * 10**6)()",
    }.items()
]

RAISES = [
    _doing(f"raises {name}", text)
    for name, text in {
        "RuntimeError": "raise RuntimeError('the judge is away')",
        "ModuleNotFoundError": "import no_such_module",
        "ModuleNotFoundError of an extra": "raise ModuleNotFoundError('away', name='torch')",
        "KeyboardInterrupt": "raise KeyboardInterrupt",
        "SystemExit 0": "sys.exit(0)",
        "BaseException": "raise BaseException('all of it')",
        "MemoryError": "return bytearray(1 << 62)",
        "RecursionError": "def f(): return f() + 1\nreturn f()",
        "an ExceptionGroup": "raise ExceptionGroup('two', [ValueError(1), ValueError(2)])",
        "an error whose text exits": "raise of(Exception, __str__=lambda self: sys.exit(0))()",
        "many lines": "raise ValueError('one\\ntwo\\r\\nthree')",
        "1 MB": "raise ValueError('x' * 10**6)",
        "control characters": "raise ValueError('\\x1b[2J\\x00\\x07\\b')",
        "a name of 1 MB": "raise type('X' * 10**6, (Exception,), {})('long')",
        "UserError": "from grpo_jax.errors import UserError\nraise UserError('mine')",
        "StageTimeout": "from grpo_jax.errors import StageTimeout\nraise StageTimeout('score', 0, 'mine')",
    }.items()
]

OBJECTS = _returns({
    "a sequence whose length raises": "of(collections.abc.Sequence, __getitem__=lambda s, i: 1.0,"
    " __len__=lambda s: 1 / 0, __iter__=lambda s: 1 / 0)()",
    "a list that lies about its length": "of(list, __len__=lambda s: n)([1.0])",
    "what has a tolist that raises": "Having(tolist=lambda: 1 / 0)",
    "what has a tolist that exits": "Having(tolist=lambda: sys.exit(0))",
    "what has a shape of text": "Having(shape='x' * 10**6, tolist=lambda: [1.0] * n)",
    "what exits for every name": "of(__getattr__=lambda s, name: sys.exit(0))()",
})  # fmt: skip

MUTATIONS = [
    _doing("empties its lists and raises", "completions.clear(); wish.clear()\nraise ValueError('gone')"),
    _doing("empties its lists", "completions.clear(); prompts.clear(); wish.clear()\nreturn [1.0] * n", missing="none"),
    _doing("empties its lists and counts them", "completions.clear()\nreturn [1.0] * len(completions)"),
    _doing("changes its columns", "wish[:] = [None] * n\ncolumns.clear()\nreturn [1.0] * n", missing="none"),
]  # fmt: skip

SIGNATURES = [
    Fault(f"is {name}", f"{HEAD}\n{text}\n", early="call")
    for name, text in {
        "a function of positions": "def judged(prompts, completions, /): return [1.0] * len(completions)",
        "a function of a column that is missing": "def judged(completions, no_column): return [1.0] * len(completions)",
        "a class": "class judged: pass",
        "a builtin without a signature": "judged = max",
        "a coroutine": "def judged(completions):\n    async def later(): pass\n    c = later(); c.close(); return c",
        "a generator": "def judged(completions):\n    yield from [1.0] * len(completions)",
    }.items()
]

IMPORTS = [
    Fault(f"at import: {name}", text, early="import")
    for name, text in {
        "sys.exit(0)": "import sys; sys.exit(0)",
        "KeyboardInterrupt": "raise KeyboardInterrupt",
        "BaseException": "raise BaseException('all of it')",
        "RuntimeError": "raise RuntimeError('no licence')",
        "a syntax error": "def judged(:\n",
        "endless recursion": "def f(): f()\nf()",
        "control characters": "raise ValueError('\\x1b[2J\\x00\\udc80')",
        "an error whose text exits": "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
        "another name": "def judge(completions): return []",
    }.items()
]

LEGAL = [
    _doing(f"legal: {name}", f"return {text}", missing="none", number=number)
    for name, text, number in (
        ("bools", "[True] * n", 1.0),
        ("integers", "[2] * n", 2.0),
        ("a tuple", "(0.5,) * n", 0.5),
        ("a deque", "collections.deque([0.5] * n)", 0.5),
        ("Decimal", "[decimal.Decimal('0.25')] * n", 0.25),
        ("Fraction", "[fractions.Fraction(1, 4)] * n", 0.25),
        ("numpy scalars", "[np.float16(0.5)] * n", 0.5),
        ("numpy float16", "np.full(n, 0.5, np.float16)", 0.5),
        ("an array of objects", "np.array([0.5] * n, object)", 0.5),
        ("the largest of float32", "[3.4e38] * n", 3.4e38),
        ("torch bfloat16 with a gradient", "__import__('torch').full((n,), 0.5, dtype=__import__('torch').bfloat16,"
         " requires_grad=True)", 0.5),
        ("torch scalars", "list(__import__('torch').full((n,), 0.5))", 0.5),
        ("jax bfloat16", "__import__('jax').numpy.full(n, 0.5, 'bfloat16')", 0.5),
        ("an object with a float", "[of(__float__=lambda self: 0.5)()] * n", 0.5),
    )
]  # fmt: skip

FAULTS = (
    *WRONG_TYPES, *WRONG_VALUES, *RAISES, *OBJECTS, *MUTATIONS, *SIGNATURES, *IMPORTS, *LEGAL,
)  # fmt: skip
