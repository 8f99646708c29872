"""Common parts of all fuzzers: a case works or gives one clear line."""

import contextlib
import functools
import io
import random
import time
from collections.abc import Callable
from pathlib import Path

from faults.outcome import Outcome

from grpo_jax.errors import run_cli

LONGEST_LINE, MOST_LINES, LONGEST_WAIT = 300, 12, 20.0


def tried(case: str, action: Callable[[], object], folder: Path) -> Outcome:
    """Tries one case as a command would: it works, or prints a short line for each mistake and comes to exit code 2."""
    out, errors, started = io.StringIO(), io.StringIO(), time.monotonic()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = run_cli(lambda _: (action(), None)[1], ())
    except SystemExit as end:  # --help, --print_config
        code = end.code
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust among them
        return Outcome(case, False, note=_told(error))
    seconds, told = time.monotonic() - started, errors.getvalue().replace(str(folder), "FOLDER")
    note = ""
    if seconds > LONGEST_WAIT:
        note = f"it took {seconds:.0f} s"
    elif code not in (0, None) and (code != 2 or not told.startswith("error: ")):
        note = f"exit code {code}: {told[:200]!r}"
    elif code == 2 and not _in_short_lines(told):
        note = f"{told.count(chr(10))} lines, {len(told)} characters: {told!r}"
    return Outcome(case, not note, note=note)


def _in_short_lines(told: str) -> bool:
    """Whether it is an error on each of a few lines (configs name every mistake)."""
    lines = told.split("\n")
    short = all(line.startswith("error: ") and len(line) <= LONGEST_LINE for line in lines[:-1])
    return short and lines[-1] == "" and len(lines) <= MOST_LINES + 1


def _told(error: BaseException) -> str:
    frame, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frame = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}" if "grpo_jax" in code.co_filename else frame
        trace = trace.tb_next
    return f"{type(error).__name__} at {frame}: {str(error)[:200]}"


ODD_NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**12, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"), True, False, None),
)
ODD_TEXTS = (
    *("", " ", "\n", "0", "1e-6", "nan", "null", "true", "no", "~", "\\", "'", '"', "{", "[", "*", "&a", "!!x", "%"),
    *("#", "été", "東京", "🦊", "\u202e", "\ufeff", "a\0b", "\ud800", "..", "/", "~nobody_at_all/x", "a:b", "x.py:f"),
    *("-", "--", "x" * 300, "y" * 5000, "a/" * 200, "9" * 400, "{prompt}", "${HOME}", "$(true)", "<|im_end|>", "%s%n"),
    *("-1", "1.", "٣"),
)


def odd_value(rng: random.Random, depth: int = 0) -> object:
    """A value that is rarely what a field wants."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(ODD_NUMBERS)
    if kind < 0.8 or depth > 3:
        return rng.choice(ODD_TEXTS)
    if kind < 0.9:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 0.98:
        return {str(odd_value(rng, 9)): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return nested(rng.choice([5, 31, 33, 60]))


def places(values: object, path: tuple = ()) -> list[tuple]:
    """Paths to all entries of nested mappings and lists."""
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [place for key, value in entries for place in ((*path, key), *places(value, (*path, key)))]


def entry(values: object, path: tuple) -> object:
    """Return the entry at a path."""
    return functools.reduce(lambda inner, key: inner[key], path, values)


def nested(depth: int) -> object:
    """A list in a list in a list."""
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


_INSERTED = (b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[" * 3000, b"9" * 5000)
_MARKS = (b"{", b"}", b'"', b":", b",", b"\n", b"\r", b"\\", b"\\ud800", b"\\u0000")


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, left out, doubled or cut off."""
    mutable = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(len(mutable) + 1) if mutable else 0
        how = rng.randrange(6)
        if how == 0 and place < len(mutable):
            mutable[place] ^= 1 << rng.randrange(8)
        elif how == 1:
            del mutable[place : place + rng.choice([1, 3, 40])]
        elif how == 2:
            mutable[place:place] = rng.choice(_INSERTED)
        elif how == 3:
            mutable[place:place] = mutable[place : place + rng.choice([3, 50])]
        elif how == 4:
            mutable[place:place] = rng.choice(_MARKS)
        elif len(mutable) > 4:
            del mutable[rng.randrange(len(mutable)) :]
    return bytes(mutable)
