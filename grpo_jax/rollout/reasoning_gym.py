"""Rows of reasoning-gym's procedural data sets, and their own scores of an answer (extra `environments`).

    reasoning_gym:chain_sum?min_terms=2&max_terms=3&size=2000+letter_counting

names two data sets, with options as in `reasoning_gym.create_dataset`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import os
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from grpo_jax.config.files import read_yaml
from grpo_jax.errors import UserError, failures_as, one_line, short_repr
from grpo_jax.rollout.records import Fields, Records, listed

PREFIX = "reasoning_gym:"
_SEPARATOR = re.compile(r"\+(?=[a-z]\w*(?:[?+]|$))")  # an option's value may hold a plus
_PARSED = "its score runs the policy's text as Python (sympy.parse_expr)"
_REFUSED = {
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), _PARSED),
    "composite": "name its data sets, joined by +",
}
_HASHED = ("isomorphic_strings", "knight_swap", "list_functions", "ransom_note", "word_ladder")
"""Data sets whose rows depend on the order of Python's sets, so that another process makes others."""
_READABLE = {
    **dict.fromkeys(("countdown", "puzzle24"), r"(?!.*\*\*)[\d\s+*/()-]*"),
    **dict.fromkeys(
        ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), r"(?!.*\bfor\b)[\w\s,\[\]\"'-]*"
    ),
}
"""Pattern of the answers that a score may see: these evaluate them as Python; other answers score 0."""


def read_tasks(place: str, seed: int | None, held_out: float) -> str | Records:
    """Return the rows of the data sets in "reasoning_gym:…"; another name is returned unchanged.

    A row has `prompt`, `answer`, `metadata`, `dataset` (its name and options) and `difficulty`, a text. With `held_out`
    above 0 it has a `split` too: that share of a data set's size is for testing, and as much for validation. Held-out
    rows do not depend on `seed`; None draws them alone. No training row has a held-out prompt. UserError for an unknown
    data set or option, or too few different prompts.
    """
    if not place.startswith(PREFIX):
        return place
    sources = _SEPARATOR.split(place.removeprefix(PREFIX))
    taken: set[str] = set()
    held = [[*_held_out_rows(source, held_out, taken)] for source in sources if held_out]
    drawn = [[row for row in _rows(source, seed) if row["prompt"] not in taken] for source in sources]
    if not all(drawn):
        source = sources[drawn.index([])]
        raise UserError(f"{PREFIX}{source}: all its prompts are held out: widen its options, or lower data.held_out")
    train = _in_turns(drawn) if seed is None else [row for part in drawn for row in part]
    marked = [row | {"split": "train"} for row in train] if held_out else train
    return listed([*enumerate(_in_turns(held) + marked)])


def _in_turns(parts: Sequence[Sequence[Fields]]) -> list[Fields]:
    """Return the rows of data sets in turns, so that the first held-out prompts are of all of them."""
    return [row for turn in itertools.zip_longest(*parts) for row in turn if row is not None]


def _held_out_rows(source: str, share: float, taken: set[str]) -> Iterator[Fields]:
    """Yield different rows for testing, then for validation; add their prompts to `taken`."""
    count = max(1, round(share * _dataset(source).config.size))
    found = 0
    for row in _rows(source, None):
        if row["prompt"] not in taken:
            taken.add(row["prompt"])
            yield row | {"split": "test" if found < count else "validation"}
            found += 1
        if found == 2 * count:
            return
    raise UserError(
        f"{PREFIX}{source}: {found} different prompts are too few to keep {count} for testing and {count} for "
        "validation: widen its options, or lower data.held_out"
    )


def _rows(source: str, seed: int | None) -> Iterator[Fields]:
    """Yield the rows of a data set; entry n of a seed is entry n - 1 of the next one, so seeds are far apart."""
    drawn = _dataset(source, random.Random("held out" if seed is None else f"seed {seed}").getrandbits(31))
    for place in range(drawn.config.size):
        with _failures_named(source):
            entry = drawn[place]
        columns = {"answer": entry["answer"], "metadata": entry["metadata"], "dataset": source}
        yield {"prompt": entry["question"], **columns, "difficulty": _difficulty(entry["metadata"])}


def _failures_named(source: str) -> AbstractContextManager[None]:
    return failures_as(lambda error: UserError(f"{PREFIX}{source}: {type(error).__name__}: {one_line(error)}"))


def _difficulty(metadata: Mapping[str, Any]) -> str:
    """Return a row's difficulty, "num_terms 2, num_digits 1": its own numbers, or else the data set's ranges."""
    levels = metadata.get("difficulty")
    if not isinstance(levels, Mapping):
        return "" if levels is None else str(levels)
    plain = {name: metadata[name] for name in levels if isinstance(metadata.get(name), int | float | str)}
    return ", ".join(f"{name} {level}" for name, level in ({**levels, **plain}).items())


@functools.lru_cache(maxsize=256)
def _dataset(source: str, seed: int = 0) -> Any:
    """Make the data set of "name?option=value&…"; UserError for an unknown name or option."""
    with warnings.catch_warnings(action="ignore"):  # of modules of its dependencies, when they are compiled
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    name, _, query = source.partition("?")
    where = f"{PREFIX}{name}"
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS) or [*sorted(DATASETS)[:3], f"… ({len(DATASETS)} in all)"]
        raise UserError(f"{where}: no such data set; did you mean {', '.join(near)}?")
    if name in _REFUSED:
        raise UserError(f"{where}: not here: {_REFUSED[name]}")
    if name in _HASHED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise UserError(f"{where}: its rows differ from process to process: set the variable PYTHONHASHSEED=0")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name != "seed"]
    options = {}
    for option in filter(None, query.split("&")):
        key, equals, value = option.partition("=")
        if not equals or key not in known:
            rows = "the run's seed draws the rows" if key == "seed" else f"write OPTION=VALUE of {', '.join(known)}"
            raise UserError(f"{where}: no such option, {short_repr(option)}: {rows}")
        options[key] = value
    with _failures_named(source):
        parsed = {key: read_yaml(value) for key, value in options.items()}
        return reasoning_gym.create_dataset(name, seed=seed, **parsed)


def score_answer(answer: str, source: str, entry: Mapping[str, Any]) -> float:
    """Return the data set's own score of an answer, 0 for one that it cannot read; UserError for an unknown set."""
    name = source.partition("?")[0]
    if name == "game_of_life_halting":  # its own compares bool(text)
        return float(answer == str(entry["answer"]))
    if name in _READABLE and not re.fullmatch(_READABLE[name], answer, re.DOTALL):
        return 0.0
    data = _dataset(source)  # raises for a column `dataset` that names another one
    try:
        return float(data.score_answer(answer, entry))
    except Exception:  # prime_factorization, game_of_life and boxnet raise at some texts
        return 0.0
