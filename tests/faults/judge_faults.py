"""Faults of a reward by name: the text of a module whose `judged` has the fault, and the other rewards."""

from typing import Literal, NamedTuple

HEAD = """
import collections, decimal, fractions, sys
import numpy as np

def throw(error):
    raise error

def of(base=object, **methods):
    return type("Odd", (base,), methods)

"""
BODY = """
def judged(prompts, completions, wish, **columns):
    n = len(completions)
"""


class Fault(NamedTuple):
    """One fault.

    Attributes:
        name: In a few words.
        source: The module's text.
        missing: Which completions have no reward where rewards may fail: "all", "first", or "none" of what is legal.
        number: What the others have.
        early: Importing it fails.
    """

    name: str
    source: str
    missing: Literal["all", "first", "none"] = "all"
    number: float = 1.0
    early: bool = False


def _doing(name: str, body: str, **more) -> Fault:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return Fault(name, HEAD + BODY + lines, **more)


WRONG_TYPES = [_doing(f"returns {name}", f"return {text}") for name, text in {
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
}.items()]  # fmt: skip

WRONG_VALUES = [
    _doing(f"a value {name}", f"return [{text}] + [1.0] * (n - 1)", missing="first")
    for name, text in {
        "nan": "float('nan')",
        "inf": "float('inf')",
        "beyond float32": "1e39",
        "a number as text": "'0.5'",
        "a list": "[1.0]",
        "100 kB of text": "'x' * 100_000",
        "text of control characters": "'\\x1b[2J\\r\\n\\x00\\udc80\\u202e'",
        "whose float raises": "of(__float__=lambda self: throw(OSError('no')))()",
        "whose float exits": "of(__float__=lambda self: sys.exit(0))()",
    }.items()
]

RAISES = [
    _doing(f"raises {name}", text)
    for name, text in {
        "RuntimeError": "raise RuntimeError('the reward is away')",
        "ModuleNotFoundError": "import no_such_module",
        "KeyboardInterrupt": "raise KeyboardInterrupt",
        "SystemExit 0": "sys.exit(0)",
        "BaseException": "raise BaseException('all of it')",
        "MemoryError": "return bytearray(1 << 62)",
        "RecursionError": "def f(): return f() + 1\nreturn f()",
        "an ExceptionGroup": "raise ExceptionGroup('two', [ValueError(1), ValueError(2)])",
        "an error whose text exits": "raise of(Exception, __str__=lambda self: sys.exit(0))()",
        "1 MB": "raise ValueError('x' * 10**6)",
        "control characters": "raise ValueError('\\x1b[2J\\x00\\x07\\b')",
    }.items()
]

MUTATIONS = [
    _doing("empties its lists and raises", "completions.clear(); wish.clear()\nraise ValueError('gone')"),
    _doing("empties its lists", "completions.clear(); prompts.clear(); wish.clear()\nreturn [1.0] * n", missing="none"),
    _doing("changes its columns", "wish[:] = [None] * n\ncolumns.clear()\nreturn [1.0] * n", missing="none"),
]  # fmt: skip

SIGNATURES = [
    Fault(f"is {name}", f"{HEAD}\n{text}\n")
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
    Fault(f"at import: {name}", text, early=True)
    for name, text in {
        "sys.exit(0)": "import sys; sys.exit(0)",
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
        ("torch uint8", "__import__('torch').full((n,), 2, dtype=__import__('torch').uint8)", 2.0),
        ("torch float64", "__import__('torch').full((n,), 0.5, dtype=__import__('torch').float64)", 0.5),
        ("jax int32", "__import__('jax').numpy.full(n, 2, 'int32')", 2.0),
        ("torch scalars", "list(__import__('torch').full((n,), 0.5))", 0.5),
        ("jax bfloat16", "__import__('jax').numpy.full(n, 0.5, 'bfloat16')", 0.5),
        ("an object with a float", "[of(__float__=lambda self: 0.5)()] * n", 0.5),
    )
]  # fmt: skip

FAULTS = (
    *WRONG_TYPES, *WRONG_VALUES, *RAISES, *MUTATIONS, *SIGNATURES, *IMPORTS, *LEGAL,
)  # fmt: skip
