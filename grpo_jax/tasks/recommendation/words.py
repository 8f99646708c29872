"""The words of a new policy: what it can read of prompts and say of titles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from grpo_jax.tasks.recommendation.examples import PLACES
from grpo_jax.tasks.recommendation.ranking.items import item_word, plain
from grpo_jax.tasks.recommendation.ranking.prior import title_vectors

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


def item_vectors(titles: Sequence[str], width: int) -> dict[str, np.ndarray]:
    """What the items' own words begin as: unit vectors f32 [width] that lie near each other where titles do.

    The titles' TF-IDF vectors (`title_vectors`) in their first `width` directions (latent semantic analysis, Deerwester
    et al. 1990), centred, so that an item which few users took is known by its title from the first step. Where there
    are fewer directions the rest is 0.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.preprocessing import normalize

    words = title_vectors(titles)
    reduced = TruncatedSVD(min(width, min(words.shape) - 1), random_state=0).fit_transform(words)
    vectors = np.asarray(normalize(reduced - reduced.mean(0)), np.float32)
    vectors = np.pad(vectors, ((0, 0), (0, width - vectors.shape[1])))
    return {item_word(row): vector for row, vector in enumerate(vectors)}
