"""The words of a new policy: what it can read of prompts and say of titles."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from grpo_jax.tasks.recommendation.examples import PLACES
from grpo_jax.tasks.recommendation.ranking.items import plain

if TYPE_CHECKING:
    from grpo_jax.tasks.recommendation.catalogue import Catalogue
    from grpo_jax.tasks.recommendation.task import Recommendation


def policy_words(task: Recommendation, catalogue: Catalogue, *, limit: int = 0) -> list[str]:
    """Words of the prompts' frame, then those of titles, frequent ones first.

    Args:
        task: Its template and separator make the frame.
        catalogue: Its titles, and its items' own words where it has such.
        limit: Words of titles at most; 0 for all.
    """
    frame = task.template
    for place in PLACES:
        frame = frame.replace(place, " ")
    marks = plain(frame).split() + plain(task.separator).split()
    marks += [word for name in catalogue.names for word in plain(name).split()]
    if catalogue.names and "{history}" not in task.template and "{last}" not in task.template:
        return list(dict.fromkeys(marks))  # titles are neither read nor written
    counts = Counter(word for title in catalogue.titles for word in plain(title).split())
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: limit or None]
    return list(dict.fromkeys([*marks, *frequent]))
