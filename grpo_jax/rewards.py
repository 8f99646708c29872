r"""Common reward functions, for `rewards` of a config by import path: `grpo_jax.rewards:numeric_answer`.

Each is a plain function with TRL's signature, f(prompts, completions, answer, **columns). It returns a value for each
of P·G completions, None if it does not apply, and ignores other columns. Keyword arguments are its `options` in the
config.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from grpo_jax.errors import short_repr
from grpo_jax.rollout.reasoning_gym import score_answer

Unit = Literal["characters", "words", "tokens"]
Completion = str | Sequence[Mapping[str, object]]
"""A text, or chat messages."""


def regex_format(
    prompts: Sequence[object], completions: Sequence[Completion], *, pattern: str, whole: bool = True, **columns: object
) -> list[float]:
    r"""Return 1 if a completion matches a pattern, else 0.

    Args:
        pattern: A Python regular expression, such as "Answer: \d+"; its dots match line breaks.
        whole: Whether it must match the whole completion, ignoring surrounding white space, rather than a part.
    """
    form = re.compile(pattern, re.DOTALL)
    fits = form.fullmatch if whole else form.search
    return [float(fits(text.strip()) is not None) for text in map(_text, completions)]


def think_format(
    prompts: Sequence[object],
    completions: Sequence[Completion],
    *,
    tag: str = "think",
    answer_tag: str = "",
    opened: bool = False,
    **columns: object,
) -> list[float]:
    """Return 1 if a completion is one closed reasoning block followed by text, else 0.

    Args:
        tag: Tag of the block, <think> … </think>.
        answer_tag: Tag of a block that the following text must be, such as "answer"; "" for any text.
        opened: Whether the chat template opens the block, so that a completion begins inside it.
    """
    start, end = f"<{tag}>", f"</{tag}>"

    def fits(text: str) -> bool:
        text = text.strip()
        if not opened and not text.startswith(start):
            return False
        thought, closed, answer = (text if opened else text.removeprefix(start)).partition(end)
        once = closed and start not in thought + answer and end not in answer
        return bool(once and thought.strip() and _inside(answer.strip(), answer_tag))

    return [float(fits(text)) for text in map(_text, completions)]


def _text(completion: Completion) -> str:
    """Return the text of a completion; of chat messages the last one's."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _inside(text: str, tag: str) -> str:
    """Return the contents of a text that is one block, else ""; without a tag return the text itself."""
    if not tag:
        return text
    inner = text.removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")
    whole = text == f"<{tag}>{inner}</{tag}>" and f"<{tag}>" not in inner and f"</{tag}>" not in inner
    return inner.strip() if whole else ""


def length_penalty(
    prompts: Sequence[object],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    start: int,
    end: int,
    unit: Unit = "words",
    **columns: object,
) -> list[float]:
    """Return 0 for completions up to length `start`, -1 from `end` on, and a linear penalty between.

    Args:
        completion_ids: Token ids of each completion, for unit "tokens".
        start: Largest length without a penalty.
        end: Smallest length with the full penalty.
        unit: Unit of the length: "characters", "words" or "tokens".

    Raises:
        ValueError: `end` is not above `start`, or `unit` is unknown.
    """
    if not 0 <= start < end:
        raise ValueError(f"start must be at least 0 and end above it, got {start} and {end}")
    if unit == "tokens" and completion_ids is not None:
        sizes = [len(ids) for ids in completion_ids]
    elif unit in ("characters", "words"):
        sizes = [len(text.strip() if unit == "characters" else text.split()) for text in map(_text, completions)]
    else:
        raise ValueError(f'unit must be "characters", "words" or "tokens" (of completion_ids), got {short_repr(unit)}')
    return [-min(1.0, max(0.0, (size - start) / (end - start))) for size in sizes]


length_penalty.best = 0.0  # pyright: ignore[reportFunctionMemberAccess]


def exact_match(
    prompts: Sequence[object],
    completions: Sequence[Completion],
    answer: Sequence[object],
    *,
    pattern: str = "",
    ignore_case: bool = False,
    **columns: object,
) -> list[float | None]:
    r"""Return 1 if a completion equals the answer, ignoring white space, else 0; None for a row whose answer is None.

    Args:
        answer: Per completion a string, a number, or a list of correct ones.
        pattern: Extracts the answer from a completion: first group of the last match, as in
            "<answer>(.*?)</answer>". Empty: the whole completion.
        ignore_case: Whether to ignore case.

    Raises:
        ValueError: `pattern` has no group.
    """
    form = re.compile(pattern, re.DOTALL)
    if pattern and not form.groups:
        raise ValueError(f"pattern must have a group (…) around the answer, got {short_repr(pattern)}")

    def plain(value: object) -> str:
        text = " ".join(str(value).split())
        return text.casefold() if ignore_case else text

    def value(text: str, right: object) -> float | None:
        if right is None or right != right:  # NaN, as in pandas
            return None
        matches = list(form.finditer(text)) if pattern else []
        if pattern and not matches:
            return 0.0
        stated = plain((matches[-1][1] or "") if pattern else text)
        rights = [*right] if isinstance(right, list | tuple) else [right]
        rights += [int(one) for one in rights if isinstance(one, float) and one.is_integer()]  # 42.0 is 42
        return float(stated in map(plain, rights))

    return [value(text, right) for text, right in zip(map(_text, completions), answer, strict=True)]


def reasoning_gym(
    prompts: Sequence[object],
    completions: Sequence[Completion],
    answer: Sequence[str | None],
    metadata: Sequence[Mapping[str, object]],
    dataset: Sequence[str | None],
    **columns: object,
) -> list[float | None]:
    r"""Return each answer's score by its data set of reasoning-gym, mostly 0 to 1; None for another row.

    An answer is the text in the last <answer>…</answer>, else in the last \boxed{…}, else after the last ####, else the
    whole completion; reasoning up to </think> is left out. Columns are those of `data.prompts` "reasoning_gym:…".
    """
    rows = zip(map(_text, completions), answer, metadata, dataset, strict=True)
    return [
        score_answer(_answer(text), source, {"answer": right, "metadata": facts}) if source else None
        for text, right, facts, source in rows
    ]


def _answer(text: str) -> str:
    text = text.rpartition("</think>")[2]
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    boxed = _boxed(text)
    return (tagged[-1] if tagged else text.rpartition("####")[2] if boxed is None else boxed).strip()


_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3}){1,99}(?![,\d])|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
# A fraction or a decimal, with a sign that is no minus between two numbers; not a part of a date.
_NUMBER = re.compile(rf"((?<![\w.)\]])[-+−–])?(?:(?<![\d.,/])({_DECIMAL}) ?/ ?({_DECIMAL})(?!\d| ?/ ?\d)|({_DECIMAL}))")
_LATEX = (
    (r"(?<![\w.)\]])([-−])\\?[$€£](?=\.?\d)", r"\1"),
    (r"\{,\}|\\[,!]", ""),
    (r"(?<=\d)\s*(?=\\[dt]?frac)", " "),
    (r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", r"\1\2/\3\4"),
    (r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 "),
    (r"\^\s*\{?\\circ\}?|\\[%$ ]", " "),
)
"""Patterns of LaTeX and currencies in and around numbers, and their replacements."""
_MINUS = re.compile(r"(?:^|[=:$({])\s*[-−][\s{}($€£]*$")  # a minus apart from its number, as in - 5
_MATHS = re.compile(r"[\\^_±√π×·]|\d[a-zA-Z](?![a-zA-Z])|[a-zA-Z\d]\s*[-+−*/]\s*\d|\d\s*[-+−*/]\s*[a-zA-Z\d]")
"""Mathematics around a number: roots, powers, variables such as 2x, sums, products."""
_LONGEST = 1000  # characters of a number; the square of that many digits takes time


def numeric_answer(
    prompts: Sequence[object],
    completions: Sequence[Completion],
    answer: Sequence[object],
    *,
    tolerance: float = 0.0,
    **columns: object,
) -> list[float | None]:
    r"""Return 1 if a completion's number equals the answer's, else 0; None for a row whose answer is None.

    A completion's number is the only number in its last \boxed{…}; without a box, it is its last number. An answer is
    one number, perhaps in a sentence; of a whole solution, the number in its last \boxed{…} or after its last ####.
    Numbers are compared exactly: 1,234.50 is 1234.5, 1e3 is 1000, and 3/4, \frac{3}{4} and 0.75 are equal. A comma is a
    thousands separator; units and percent signs are ignored. Roots, powers, variables and 1 1/2 are no numbers.

    Args:
        answer: Per completion, a number or a text with one.
        tolerance: Allowed deviation, relative to the answer; absolute for answers below 1.

    Raises:
        ValueError: An answer holds no number, or several. A run refuses it before it starts, with its row.
    """
    share = Fraction(str(tolerance))

    def value(text: str, right: object) -> float | None:
        if right is None or right != right:
            return None
        expected, number = _number_of_answer(right), _number_of(text)
        if number is None:
            return 0.0
        return float(abs(number - expected) <= share * max(1, abs(expected)))

    return [value(text, right) for text, right in zip(map(_text, completions), answer, strict=True)]


numeric_answer.check_row = lambda columns: numeric_answer([""], [""], [columns.get("answer")])  # type: ignore


def _number_of_answer(answer: object) -> Fraction:
    text = str(answer)
    boxed = _boxed(text)
    number = _only_number(text.rpartition("####")[2] if boxed is None else boxed)
    if number is None:
        raise ValueError(f"the answer {short_repr(answer)} holds no single number; exact_match compares texts")
    return number


def _number_of(text: str) -> Fraction | None:
    """Return the number of a completion."""
    if (boxed := _boxed(text)) is not None:
        return _only_number(boxed)
    end = max(map(text.rfind, string.digits)) + 1
    numbers = [*_NUMBER.finditer(_without_latex(text[max(0, end - 2 * _LONGEST) : end + 1]))]  # around the last number
    return _value(numbers[-1]) if numbers else None


def _only_number(text: str) -> Fraction | None:
    """Return the number of a text that holds one and no other mathematics."""
    text = _without_latex(text)
    numbers = [*_NUMBER.finditer(text)]
    if len(numbers) != 1:
        return None
    start, end = numbers[0].span()
    value = None if _MATHS.search(f"{text[:start]}1{text[end:]}") else _value(numbers[0])
    return -value if value and _MINUS.search(text[:start]) else value


def _without_latex(text: str) -> str:
    """Return a text with plain fractions, and without the LaTeX in and around numbers."""
    for pattern, replacement in _LATEX:
        text = re.sub(pattern, replacement, text)
    return text


def _value(number: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `_NUMBER`; None for a division by 0 and for too many digits."""
    if len(number[0]) > _LONGEST:
        return None
    sign, numerator, denominator, decimal = number.groups()
    parts = [Fraction(Decimal(part.replace(",", ""))) for part in (decimal or numerator, denominator or "1")]
    return None if not parts[1] else (-1 if sign in ("-", "−", "–") else 1) * parts[0] / parts[1]


def _boxed(text: str) -> str | None:
    r"""Return the contents of the last closed \boxed{…}."""
    inside, opened = None, []
    for brace in re.finditer(r"(\\boxed\s*)?\{|\}", text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[1] else None)
        elif opened and (start := opened.pop()) is not None:
            inside = text[start : brace.start()]
    return inside
