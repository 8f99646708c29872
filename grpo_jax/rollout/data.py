"""Prompts: reading them from files, splitting them, and the order in which training visits them.

Everything here is a function of its arguments. The order of an epoch, the rows of a batch and the noise of a
picture follow from (seed, number) alone, so that resuming a run means remembering one number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError

SPLITS = ("train", "validation", "test")
TIERS = ("plain", "attributes", "crowded")
RESERVED_COLUMNS = ("prompts", "completions", "images", "baseline_images")
"""Names that rewards receive from the trainer; a column of the same name would be lost."""

_SHOWN_PROBLEMS = 20
_WORD = 2**32
_ORDER, _NOISE, _EVALUATION_NOISE, _FURTHER = 1, 2, 3, 4  # what a seed is for: one number never serves two purposes


@dataclass(frozen=True)
class Row:
    """One prompt of a data set.

    Attributes:
        id: Names the row for good: its line in the file (from 1), or its place in the built-in list.
        prompt: What the user asks for.
        columns: The row's other fields, passed to the rewards.
    """

    id: int
    prompt: str
    columns: dict[str, Any] = field(default_factory=dict)


class PromptSet(NamedTuple):
    """The parts of a data set: one to learn from, one to choose the best checkpoint, one to report."""

    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    test: tuple[Row, ...]


class _Line(NamedTuple):
    """A row as read, before it is known which part it belongs to."""

    row: Row
    split: str | None


# --------------------------------------------------------------------------------------------------- reading


def load_prompts(path: str | Path, *, held_out: int | float = 0.2) -> PromptSet:
    """Reads a data set.

    A ``.jsonl`` file has one object per line: ``prompt`` (text), optionally ``split`` (train, validation or test, on
    every line or on none), and any further columns, which travel to the rewards. A ``.txt`` file has one prompt per
    line. ``builtin``, ``builtin:plain``, ``builtin:attributes`` and ``builtin:crowded`` are the prompts that come
    with the package. Blank lines are skipped. A prompt that occurs twice is kept twice (it is drawn twice as often),
    both times in the same part; it may not stand in two parts.

    Args:
        path: The file, or the name of a built-in list.
        held_out: Without a ``split`` column: how many different prompts (int), or which share of them (float), are
            kept for testing, and as many again for validation. See ``split_rows``.

    Returns:
        The three parts. ``train`` is never empty; the others are where nothing is held out.

    Raises:
        UserError: If the file is missing, unreadable or empty, or has bad lines: all of them are named at once.
        ValueError: If ``held_out`` is neither a count nor a share.
    """
    _check_held_out(held_out)
    name = str(path)
    if name == "builtin" or name.startswith("builtin:"):
        return split_rows(builtin_rows(name), held_out=held_out)
    lines = _read_lines(Path(path))
    if not lines:
        raise UserError(f"{path} has no prompts: write one per line")
    if lines[0].split is None:
        return split_rows([line.row for line in lines], held_out=held_out)
    parts = PromptSet(*(tuple(line.row for line in lines if line.split == split) for split in SPLITS))
    if not parts.train:
        raise UserError(f'{path} has no line with "split": "train"')
    return parts


def builtin_rows(name: str) -> tuple[Row, ...]:
    """The prompts that come with the package, with their tier as a column.

    Args:
        name: "builtin" for all, or "builtin:TIER". A prompt has the same id in both.

    Raises:
        UserError: If there is no such tier.
    """
    tier = name.partition(":")[2]
    if tier and tier not in TIERS:
        choices = ", ".join(f"builtin:{known}" for known in TIERS)
        raise UserError(f"no built-in prompts called {name!r}: choose builtin, {choices}")
    text = resources.files("grpo_jax.rollout").joinpath("builtin_prompts.txt").read_text(encoding="utf-8")
    rows, heading = [], ""
    for line in text.splitlines():
        if line.startswith("# "):
            heading = line.removeprefix("# ")
        elif line:
            rows.append(Row(len(rows), line, {"tier": heading}))
    return tuple(row for row in rows if not tier or row.columns["tier"] == tier)


def make_prompt_set(
    train: Iterable[Mapping[str, Any]],
    validation: Iterable[Mapping[str, Any]] = (),
    test: Iterable[Mapping[str, Any]] = (),
) -> PromptSet:
    """A data set from rows that are already in memory, ``{"prompt": text, column: value, …}``; ids count through.

    Raises:
        UserError: If a row is bad or nothing is there to train on.
    """
    parts, problems, first = [], [], 0
    for split, rows in zip(SPLITS, (train, validation, test), strict=True):
        part = []
        for i, record in enumerate(rows):
            row = _parse_record(dict(record), first + i)
            if isinstance(row, str):
                problems.append(f"row {i} of {split}: {row}")
            else:
                part.append(row)
        first += len(part)
        parts.append(tuple(part))
    if problems:
        raise UserError(_listing("bad prompts", problems))
    if not parts[0]:
        raise UserError("no prompts to train on")
    return PromptSet(*parts)


def _read_lines(path: Path) -> list[_Line]:
    """Every line of a file; raises one error that names all bad ones."""
    kind = path.suffix.lower()
    if kind not in (".jsonl", ".txt"):
        raise UserError(f"{path}: prompts come from a .jsonl or a .txt file, or from builtin[:TIER]")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give a .jsonl or .txt file with prompts") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    lines: list[_Line] = []
    problems: list[str] = []
    for number, data in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        line = _parse_line(data, kind, number)
        if isinstance(line, str):
            problems.append(f"line {number}: {line}")
        elif line is not None:
            lines.append(line)
    problems += _split_problems(lines)
    if problems:
        raise UserError(_listing(str(path), problems))
    return lines


def _parse_line(data: bytes, kind: str, number: int) -> _Line | str | None:
    """A line's row, what is wrong with it, or None where it is blank."""
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        return "not UTF-8 text"
    if not text:
        return None
    if kind == ".txt":
        return _Line(Row(number, text), None)
    try:
        record = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return f"not JSON ({error})"
    if not isinstance(record, dict):
        return f'expected an object like {{"prompt": "…"}}, got {type(record).__name__}'
    split = record.pop("split", None)
    if split is not None and split not in SPLITS:
        return f'"split" must be one of {", ".join(SPLITS)}, got {split!r}'
    row = _parse_record(record, number)
    return row if isinstance(row, str) else _Line(row, split)


def _parse_record(record: dict[str, Any], identity: int) -> Row | str:
    """A record's row, or what is wrong with it."""
    if "prompt" not in record:
        return f'no "prompt" (it has {", ".join(map(repr, record)) or "nothing"})'
    prompt = record.pop("prompt")
    if not isinstance(prompt, str):
        return f'"prompt" must be text, got {type(prompt).__name__}'
    if not prompt.strip():
        return '"prompt" is empty'
    clashes = [name for name in RESERVED_COLUMNS if name in record]
    if clashes:
        return f"column {clashes[0]!r} is a name the trainer itself passes to rewards: rename it"
    return Row(identity, prompt.strip(), record)


def _split_problems(lines: Sequence[_Line]) -> list[str]:
    """Lines without a split among lines that have one, and prompts that stand in two parts."""
    if all(line.split is None for line in lines):
        return []
    problems, seen = [], {}
    for line in lines:
        if line.split is None:
            problems.append(f'line {line.row.id}: no "split", which other lines have')
            continue
        split, number = seen.setdefault(line.row.prompt, (line.split, line.row.id))
        if split != line.split:
            problems.append(f"line {line.row.id}: this {line.split} prompt is also a {split} prompt (line {number})")
    return problems


def _listing(subject: str, problems: Sequence[str]) -> str:
    """One message for all problems."""
    shown = list(problems[:_SHOWN_PROBLEMS])
    if len(problems) > len(shown):
        shown.append(f"… and {len(problems) - len(shown)} more")
    return "\n  ".join([f"{subject}: {len(problems)} bad line{'s' if len(problems) > 1 else ''}", *shown])


# ------------------------------------------------------------------------------------------------- splitting


def _check_held_out(held_out: int | float) -> None:
    share = isinstance(held_out, float) and 0.0 <= held_out < 0.5
    count = isinstance(held_out, int) and not isinstance(held_out, bool) and held_out >= 0
    if not (share or count):
        raise ValueError(f"held_out must be a share in [0, 0.5) or a count, got {held_out!r}")


def split_rows(rows: Sequence[Row], *, held_out: int | float) -> PromptSet:
    """Keeps some prompts from training, the same ones each time.

    Prompts are ranked by a hash of their text; the first are for testing, as many next for validation. The choice
    depends on no order and no seed, a prompt's duplicates follow it, and adding rows to a file moves few others.

    Args:
        rows: All rows.
        held_out: How many different prompts (int) or which share of them (float, rounded; at least one if above 0)
            the test part gets. Validation gets as many.

    Raises:
        UserError: If nothing would be left to train on.
        ValueError: If ``held_out`` is neither a count nor a share.
    """
    _check_held_out(held_out)
    texts = sorted({row.prompt for row in rows}, key=lambda text: hashlib.sha256(text.encode()).digest())
    count = held_out
    if isinstance(held_out, float):
        count = max(1, round(held_out * len(texts))) if held_out > 0 else 0
    if 2 * count >= len(texts):
        raise UserError(
            f"{len(texts)} different prompts are too few to keep {count} for testing and {count} for validation: "
            f"lower held_out ({held_out}) or add prompts"
        )
    part = dict.fromkeys(texts, "train")
    part |= dict.fromkeys(texts[:count], "test") | dict.fromkeys(texts[count : 2 * count], "validation")
    return PromptSet(*(tuple(row for row in rows if part[row.prompt] == split) for split in SPLITS))


# ---------------------------------------------------------------------------------------------------- order


def _seed_sequence(*numbers: int) -> np.random.SeedSequence:
    """A seed from integers below 2**64, two words each, so that different tuples are different entropy."""
    words = []
    for number in numbers:
        if not 0 <= number < _WORD**2:
            raise ValueError(f"seeds and positions must be integers in [0, 2**64), got {number}")
        words += [number % _WORD, number // _WORD]
    return np.random.SeedSequence(words)


def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order in which an epoch visits ``n`` rows: a permutation i64[n], a function of (seed, epoch) alone."""
    # Raw bits of a named generator are stable over NumPy's versions; its permutations are not promised to be.
    bits = np.random.PCG64(_seed_sequence(_ORDER, seed, epoch)).random_raw(n)
    return np.argsort(bits, kind="stable")


def batches_per_epoch(n: int, batch_size: int) -> int:
    """Iterations in one pass over ``n`` rows: full batches only, what is left over waits for another epoch's order.

    Raises:
        UserError: If there are fewer rows than a batch takes.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if n < batch_size:
        raise UserError(f"a batch takes {batch_size} different prompts and there are {n}: lower it or add prompts")
    return n // batch_size


def batch_at(seed: int, iteration: int, *, batch_size: int, n: int) -> np.ndarray:
    """The rows of one iteration's batch.

    A batch never crosses an epoch, so its rows are all different: random numbers belong to a prompt's id, and a
    prompt that stood twice in a batch would get the same completions twice.

    Args:
        seed: The run's seed.
        iteration: Counted from 0 over the whole run.
        batch_size: P, prompts in a batch.
        n: Rows there are.

    Returns:
        i64[P], indices into the rows.

    Raises:
        UserError: If there are fewer rows than a batch takes.
    """
    epoch, batch = divmod(iteration, batches_per_epoch(n, batch_size))
    return epoch_order(seed, epoch, n)[batch * batch_size : (batch + 1) * batch_size]


def further_batch_at(seed: int, iteration: int, draw: int, *, batch_size: int, n: int) -> np.ndarray:
    """The rows that an iteration goes on with when its own batch (draw 0, `batch_at`) did not teach enough.

    The iteration's rows in one order, its batch first and then all others shuffled; a draw takes the next stretch,
    from the start again at the end. Within a draw all rows are different.

    Args:
        seed: The run's seed.
        iteration: Counted from 0 over the whole run.
        draw: From 0.
        batch_size: P, prompts in a draw.
        n: Rows there are.

    Returns:
        i64[P], indices into the rows; a function of (seed, iteration, draw) alone.
    """
    own = batch_at(seed, iteration, batch_size=batch_size, n=n)
    bits = np.random.PCG64(_seed_sequence(_FURTHER, seed, iteration)).random_raw(n)
    shuffled = np.argsort(bits, kind="stable")
    order = np.concatenate([own, shuffled[~np.isin(shuffled, own)]])
    return order[np.arange(draw * batch_size, (draw + 1) * batch_size) % n]


def noise_seed(seed: int, iteration: int, prompt_id: int, *, evaluation: bool = False, draw: int = 0) -> int:
    """The seed of the noise that pictures of one prompt start from.

    All rewrites of a prompt, and the prompt itself, are rendered from it (common random numbers): pictures of a group
    differ by their words alone.

    Args:
        seed: The run's seed.
        iteration: Fresh noise at each visit in training; without influence in evaluation.
        prompt_id: ``Row.id``.
        evaluation: Whether this is for evaluation, whose noise is fixed.
        draw: Tells several noises of one visit apart.

    Returns:
        An integer in [0, 2**63).
    """
    purpose, visit = (_EVALUATION_NOISE, 0) if evaluation else (_NOISE, iteration)
    state = _seed_sequence(purpose, seed, visit, prompt_id, draw).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


# -------------------------------------------------------------------------------------------------- columns


def repeat_rows(rows: Sequence[Row], group_size: int) -> tuple[list[str], dict[str, list[Any]]]:
    """What rewards are called with, flat: each row ``group_size`` times.

    Returns:
        Prompts, P·G texts, and the rows' columns as lists of P·G values; None where a row lacks a column.
    """
    names = dict.fromkeys(name for row in rows for name in row.columns)
    repeated = [row for row in rows for _ in range(group_size)]
    return [row.prompt for row in repeated], {name: [row.columns.get(name) for row in repeated] for name in names}
