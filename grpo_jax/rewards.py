r"""Common reward functions, for `rewards` of a config by import path: `grpo_jax.rewards:numeric_answer`.

Each is a plain function with TRL's signature, f(prompts, completions, answer, **columns). It returns a value for each
of P·G completions, None if it does not apply, and ignores other columns. Keyword arguments are its `options` in the
config.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from grpo_jax.errors import short_repr

Unit = Literal["characters", "words", "tokens"]


def regex_format(
    prompts: Sequence[str], completions: Sequence[str], *, pattern: str, whole: bool = True, **columns: object
) -> list[float]:
    r"""Return 1 if a completion matches a pattern, else 0.

    Args:
        pattern: A Python regular expression, such as "Answer: \d+"; its dots match line breaks.
        whole: Whether it must match the whole completion, ignoring surrounding white space, rather than a part.
    """
    form = re.compile(pattern, re.DOTALL)
    fits = form.fullmatch if whole else form.search
    return [float(fits(text.strip()) is not None) for text in completions]


def think_format(
    prompts: Sequence[str],
    completions: Sequence[str],
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

    return [float(fits(text)) for text in completions]


def _inside(text: str, tag: str) -> str:
    """Return the contents of a text that is one block, else ""; without a tag return the text itself."""
    if not tag:
        return text
    inner = text.removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")
    whole = text == f"<{tag}>{inner}</{tag}>" and f"<{tag}>" not in inner and f"</{tag}>" not in inner
    return inner.strip() if whole else ""


def length_penalty(
    prompts: Sequence[str],
    completions: Sequence[str],
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
    sizes = _lengths(completions, completion_ids, unit)
    return [-min(1.0, max(0.0, (size - start) / (end - start))) for size in sizes]


def _lengths(texts: Sequence[str], ids: Sequence[Sequence[int]] | None, unit: str) -> list[int]:
    if unit == "tokens" and ids is not None:
        return [len(one) for one in ids]
    if unit not in ("characters", "words"):
        raise ValueError(f'unit must be "characters", "words" or "tokens" (of completion_ids), got {short_repr(unit)}')
    return [len(text.strip()) if unit == "characters" else len(text.split()) for text in texts]


def exact_match(
    prompts: Sequence[str],
    completions: Sequence[str],
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
        if right is None:
            return None
        matches = list(form.finditer(text)) if pattern else []
        if pattern and not matches:
            return 0.0
        stated = plain((matches[-1][1] or "") if pattern else text)
        return float(stated in map(plain, right if isinstance(right, list | tuple) else [right]))

    return [value(text, right) for text, right in zip(completions, answer, strict=True)]


_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+−])?"  # a sign, but not a minus between two numbers
    r"(?:(?:\d{1,3}(?:,\d{3})+(?![,\d])|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?"
)


def numeric_answer(
    prompts: Sequence[str],
    completions: Sequence[str],
    answer: Sequence[object],
    *,
    tolerance: float = 0.0,
    **columns: object,
) -> list[float | None]:
    r"""Return 1 if a completion's number equals the answer's, else 0; None for a row whose answer is None.

    A text's number is the only number in its last \boxed{…}; without a box, it is the last number of the text. An
    answer may thus be a whole solution ("…#### 42"). Numbers are compared as decimals: 1,234.50 is 1234.5, and 1e3 is
    1000. A comma is a thousands separator; units and percent signs are ignored.

    Args:
        answer: Per completion, a number or a text with one.
        tolerance: Allowed deviation, relative to the answer; absolute for answers below 1.

    Raises:
        ValueError: An answer contains no number.
    """
    share = Decimal(str(tolerance))

    def value(text: str, right: object) -> float | None:
        if right is None:
            return None
        expected = _number_of(str(right))
        number = _number_of(text)
        if expected is None:
            raise ValueError(f"the answer {short_repr(right)} holds no single number; exact_match compares texts")
        if number is None:
            return 0.0
        return float(number == expected or abs(number - expected) <= share * max(Decimal(1), abs(expected)))

    return [value(text, right) for text, right in zip(completions, answer, strict=True)]


def _number_of(text: str) -> Decimal | None:
    boxed = _boxed(text)
    numbers = _NUMBER.findall(text if boxed is None else boxed.replace("{,}", ",").replace("\\!", ""))
    if not numbers or (boxed is not None and len(numbers) > 1):  # a box with a fraction or a pair
        return None
    return Decimal(numbers[-1].replace(",", "").replace("−", "-"))


def _boxed(text: str) -> str | None:
    r"""Return the contents of the last closed \boxed{…}."""
    inside, opened = None, []
    for brace in re.finditer(r"(\\boxed\s*)?\{|\}", text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[1] else None)
        elif opened and (start := opened.pop()) is not None:
            inside = text[start : brace.start()]
    return inside
