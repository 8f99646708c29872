"""How a policy that ranks the catalogue itself writes an item: by its title, or by words that are the item's alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.models.new import NOT_A_WORD
from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation.metrics import RECOMMENDED, count_better, first_items, rank_of, users_at_once
from grpo_jax.tasks.recommendation.ranking.prior import Known, fused_scores

LISTED_RANK, FUSED_RANK = "listed_rank", "fused_rank"
"""The columns in which a row's ranking says where its target stands: by the policy alone, and with the prior."""
LISTED_FIRST, FUSED_FIRST = "listed_first", "fused_first"
"""The columns of what is recommended: the first items of these rankings, as rows of the catalogue."""


class Items(NamedTuple):
    """What may be written, and which item it is.

    Attributes:
        texts: One for each item that can be written.
        rows: Int [texts], their rows of the catalogue.
        count: I, items of the catalogue; a target that is not listed stands there.
        by_text: Row by a text's words.
    """

    texts: list[str]
    rows: np.ndarray
    count: int
    by_text: Mapping[str, int]

    def row_of(self, text: str) -> int:
        """The item that a completion is; -1 if none."""
        return self.by_text.get(plain(text), -1)


def item_word(row: int) -> str:
    """The word of an item's own."""
    return f"item_{row}"


def items_of(texts: Sequence[str]) -> Items:
    """All that can be written: a title that several items share is the first one's, and a blank one none's.

    Args:
        texts: I, titles of the catalogue or its items' own words.
    """
    by_text: dict[str, int] = {}
    for row, text in enumerate(texts):
        if plain(text):
            by_text.setdefault(plain(text), row)
    kept = sorted(by_text.values())
    return Items([texts[row] for row in kept], np.array(kept), len(texts), by_text)


def ranking_columns(
    items: Items, known: Known | None, rows: Sequence[Row], numbers: np.ndarray, scores: np.ndarray
) -> dict[str, Sequence[Any]]:
    """Where each row's target stands in its ranking, from 1, and what is recommended.

    What a row's column "excluded" holds is left out; a target that is not listed stands at the last place.

    Args:
        items: What can be written.
        known: The prior; None for the policy alone.
        rows: P.
        numbers: Int [P, K], which of the texts are listed, best first.
        scores: F32 [P, K].
    """
    listed = items.rows[numbers]
    places, first = [], []
    for row, best in zip(rows, listed, strict=True):
        target, left_out = row.columns["target_row"], set(row.columns["excluded"])
        others = [item for item in best.tolist() if item == target or item not in left_out]
        places.append(others.index(target) + 1 if target in others else items.count)
        first.append([item for item in others if item not in left_out][:RECOMMENDED])
    columns: dict[str, Sequence[Any]] = {LISTED_RANK: places, LISTED_FIRST: first}
    if known is None:
        return columns
    names = ("history", "target_row", "excluded")
    ranks, lists, block = [], [], users_at_once(items.count)
    for part in (slice(start, start + block) for start in range(0, len(rows), block)):
        histories, targets, excluded = ([row.columns[name] for row in rows[part]] for name in names)
        fused = fused_scores(listed[part], scores[part], known(histories))
        ranks += rank_of(count_better(fused, np.array(targets), excluded)).tolist()
        lists += [one.tolist() for one in first_items(fused, excluded)]
    return columns | {FUSED_RANK: ranks, FUSED_FIRST: lists}


def completion_ranks(items: Items, completions: Sequence[str], columns: Mapping[str, Any]) -> np.ndarray:
    """The ranks of what rewards see: of a ranking as it says; of one item 1 if it is the target, else the last."""
    if LISTED_RANK in columns:
        return np.asarray(columns[LISTED_RANK], np.float64)
    found = [items.row_of(text) == target for text, target in zip(completions, columns["target_row"], strict=True)]
    return np.where(found, 1.0, float(items.count))


def plain(text: str) -> str:
    """A title as a tokenizer of plain words gives it back, and as any other does."""
    return " ".join(re.sub(NOT_A_WORD, " ", text.lower()).split())
