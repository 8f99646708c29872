"""Semantic ids as words, and the file that keeps them: a line for each item of a catalogue."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.tasks.recommendation.catalogue import Catalogue, read_table
from grpo_jax.tasks.recommendation.ranking.items import plain
from grpo_jax.tasks.recommendation.reading import read_text

MOST_LEVELS = len(string.ascii_lowercase) - 1
"""A letter for each level, and one for what tells the same codes apart."""


def words_of(codes: np.ndarray) -> tuple[str, ...]:
    """Each item's words: codes [I, L] → "<a_12> <b_7> <c_201> <d_0>", a letter for each level.

    The marks around a word part it from the next where a tokenizer writes no space between its own words; a tokenizer
    of plain words reads "a_12".
    """
    letters = string.ascii_lowercase
    return tuple(
        " ".join(f"<{letter}_{code}>" for letter, code in zip(letters, row, strict=False)) for row in codes.tolist()
    )


def write_ids(path: str | Path, ids: Sequence[str], words: Sequence[str], *, made: str) -> None:
    """Writes a line "id ⇥ words" for each item, below a line that says how they were made and a header.

    Args:
        path: The file; its folder must be there.
        ids: I, as in the catalogue.
        words: I.
        made: In words: encoder, levels, seed.

    Raises:
        UserError: The file cannot be written, or an id holds a tab or a line's end.
    """
    if odd := [one for one in ids if not one.isprintable()]:
        raise UserError(f"item {odd[0]!r}: expected an id that can stand in a line of a .tsv")
    lines = [f"# {made}", "item_id\twords", *map("\t".join, zip(ids, words, strict=True))]
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def read_ids(path: str | Path, catalogue: Catalogue) -> tuple[str, ...]:
    """The words of each item, in the order of the catalogue.

    Args:
        path: As `write_ids` wrote it, or another file with an id and a column "words"; a first line with # is skipped.
        catalogue: Whose items they are.

    Raises:
        UserError: There is no such file, or it has bad lines: an item that the catalogue has not, one twice, words that
            say nothing or are another item's; or an item of the catalogue is not in it.
    """
    text = read_text(path, "what python -m grpo_jax.tasks.recommendation.ranking.semantic_ids writes")
    if text.startswith("#"):  # its line stays, blank, so that those below keep their numbers
        text = text[text.find("\n") :] if "\n" in text else ""
    rows, problems = read_table(path, text, needs=("words",), kind=".tsv")
    problems.check()
    words: dict[str, str] = {}
    owners: dict[str, str] = {}
    for line, row in rows:
        item, said = next(iter(row.values())).strip(), row["words"].strip()
        if item not in catalogue.rows:
            problems.add(line, f"item {item} is not in the catalogue")
        elif item in words:
            problems.add(line, f"item {item} occurs twice")
        elif not plain(said):
            problems.add(line, f"item {item} has no words")
        elif plain(said) in owners:
            problems.add(line, f"item {item} has the words of item {owners[plain(said)]}")
        else:
            words[item], owners[plain(said)] = said, item
    problems.check()
    if missing := [item for item in catalogue.ids if item not in words]:
        raise UserError(
            f"{path} lacks {len(missing)} of the catalogue's {len(catalogue)} items, the first is {missing[0]}: "
            "write it again from this catalogue"
        )
    return tuple(words[item] for item in catalogue.ids)
