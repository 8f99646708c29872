"""What a policy is compared with: simple rankings of the whole catalogue, exact and without a network.

Baselines that count (popularity, item-kNN, Markov) are functions ``score(start, stop) -> [B, I]`` of the examples
start … stop-1, sparse where few items of many score (`sparse_scores`); `rank_and_recommend` turns them into ranks by
block, so that no [U, I] array is ever held. Their
statistics come from what training knows alone (`dataset.Split.known`): no validation or test target is known to them
(the history that is asked with may hold validation targets). Baselines of titles ask the policy's own retriever, as
the policy does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy import sparse

from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation.catalogue import Catalogue, UserSequence
from grpo_jax.tasks.recommendation.metrics import RECOMMENDED, RankCounts, count_better, first_items
from grpo_jax.tasks.recommendation.task import PriorSection


class Base(NamedTuple):
    """What everybody is told of the items.

    Attributes:
        scores: F64 [I].
        rising: F64 [I], the same in order.
        best: I64 [I], items by their scores in float32, highest first; of equal ones the first of the catalogue.
    """

    scores: np.ndarray
    rising: np.ndarray
    best: np.ndarray


def make_base(scores: np.ndarray) -> Base:
    """The base of these scores.

    Raises:
        ValueError: If one is NaN.
    """
    if np.isnan(scores).any():
        raise ValueError("scores must not be NaN")
    return Base(scores, np.sort(scores), np.argsort(-scores.astype(np.float32), kind="stable"))


class SparseScores(NamedTuple):
    """Scores of all items for some users: those of a base, and what is added to them.

    Attributes:
        base: Of all users.
        more: Sparse f64 [B, I].
    """

    base: Base
    more: sparse.csr_array

    @property
    def shape(self) -> tuple[int, int]:
        """(B, I)."""
        return self.more.shape

    def count_better(
        self, targets: np.ndarray, exclude: Sequence[Sequence[int]], *, tolerance: float = 0.0
    ) -> RankCounts:
        """As `metrics.count_better` of the whole array."""
        users, items = self.shape
        scores, rising, _ = self.base
        lines, columns, values = _entries(self)
        keys = lines * items + columns

        def at(users: np.ndarray, columns: np.ndarray) -> np.ndarray:
            wanted, found = users * items + columns, scores[columns]
            places = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
            known = keys[places] == wanted if len(keys) else np.zeros(len(wanted), bool)
            found[known] = values[places[known]]
            return found

        own = at(np.arange(users), np.asarray(targets, np.int64))
        left_out = [set(rows) - {int(target)} for rows, target in zip(exclude, targets, strict=True)]
        away = np.repeat(np.arange(users), [len(rows) for rows in left_out])
        away_scores = at(away, np.fromiter((row for rows in left_out for row in rows), np.int64, len(away)))

        def counted(of_base: np.ndarray, compare: np.ufunc, edge: np.ndarray) -> np.ndarray:
            changed = compare(values, edge[lines]).astype(np.int64) - compare(scores[columns], edge[lines])
            gone = np.bincount(away, compare(away_scores, edge[away]), users)
            return of_base + np.bincount(lines, changed, users).astype(np.int64) - gone.astype(np.int64)

        high, low = own + tolerance, own - tolerance
        better = counted(items - np.searchsorted(rising, high, side="right"), np.greater, high)
        worse = counted(np.searchsorted(rising, low, side="left"), np.less, low)
        others = items - 1 - np.bincount(away, minlength=users)
        return RankCounts(better, others - better - worse)

    def first_items(self, exclude: Sequence[Sequence[int]], *, k: int) -> list[np.ndarray]:
        """As `metrics.first_items` of the whole array."""
        _, columns, values = _entries(self)
        # Items that are known of, or left out, are none that the base lists; one array serves all users.
        apart, found = np.zeros(self.shape[1], bool), []
        ends = self.more.indptr
        for line, rows in enumerate(exclude):
            here = columns[ends[line] : ends[line + 1]]
            away = np.asarray(list(rows), np.int64)
            apart[here] = apart[away] = True
            further = _first(self.base.best, apart, k)
            apart[here] = False
            apart[away] = True
            stays = ~apart[here]
            apart[away] = False
            items = np.concatenate([here[stays], further])
            scores = np.concatenate([values[ends[line] : ends[line + 1]][stays], self.base.scores[further]])
            found.append(_best(items, scores.astype(np.float32), k))
        return found


def _entries(scores: SparseScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The users, items and scores of the entries, i64 [E], i64 [E] and f64 [E], in order."""
    more = scores.more
    more.sort_indices()
    if np.isnan(more.data).any():
        raise ValueError("scores must not be NaN")
    lines = np.repeat(np.arange(more.shape[0]), np.diff(more.indptr))
    columns = more.indices.astype(np.int64)
    return lines, columns, more.data + scores.base.scores[columns]


def _first(order: np.ndarray, apart: np.ndarray, k: int) -> np.ndarray:
    """The first k items of an order that are not apart."""
    size = 4 * k
    while True:
        kept = order[:size][~apart[order[:size]]]
        if len(kept) >= k or size >= len(order):
            return kept[:k]
        size *= 4


def _best(items: np.ndarray, scores: np.ndarray, k: int) -> np.ndarray:
    """The k items with the highest scores, in the order of the catalogue; of equal ones its first."""
    listed = scores > -np.inf
    items, scores = items[listed], scores[listed]
    if len(items) > k:
        near = scores >= np.partition(scores, -k)[-k]
        items, scores = items[near], scores[near]
    return np.sort(items[np.lexsort((items, -scores))[:k]])


# ------------------------------------------------------------------------------------------------------------ baselines


Scores = Callable[[int, int], np.ndarray | SparseScores]


class Ranks(Protocol):
    """A retriever's answer: `rank`, one for each query, NaN where there is none."""

    rank: np.ndarray


Ask = Callable[[Sequence[str], Sequence[int], Sequence[Sequence[int]], Sequence[Sequence[int]]], Ranks]
"""B texts, target rows and histories (rows, oldest first) → the targets' ranks, the histories left out."""


class Retriever(Protocol):
    """What ranks targets by texts; both calls leave out the rows in `exclude`, but never the target."""

    def score_ranks(self, texts: Sequence[str], targets: Sequence[int], exclude: Sequence[Sequence[int]]) -> Ranks:
        """By one text each."""
        ...

    def score_mixed_ranks(
        self,
        texts: Sequence[Sequence[str]],
        weights: Sequence[Sequence[float]],
        targets: Sequence[int],
        exclude: Sequence[Sequence[int]],
    ) -> Ranks:
        """By the weighted sum of several texts' vectors each."""
        ...


SPARSE_BLOCK = 128
"""Examples of which sparse scores are held at once, whatever the catalogue: some thousand entries each."""


def rank_all(score: Scores, rows: Sequence[Row], *, block: int = 512, tolerance: float = 1e-6) -> RankCounts:
    """Counts for each example the items before its target and level with it, without those excluded.

    Args:
        score: The baseline.
        rows: U examples with the columns "target_row" and "excluded".
        block: Examples scored at once.
        tolerance: Scores that differ by no more are ties.
    """
    return rank_and_recommend(score, rows, first=0, block=block, tolerance=tolerance)[0]


def rank_and_recommend(
    score: Scores, rows: Sequence[Row], *, first: int = RECOMMENDED, block: int = 512, tolerance: float = 1e-6
) -> tuple[RankCounts, np.ndarray]:
    """The counts of `rank_all`, and how often each item is among the first ones of an example, i64 [I].

    Args:
        score: The baseline.
        rows: U examples, at least one, as in `rank_all`.
        first: How many items of each example count as recommended; 0 for none.
        block: Examples scored at once.
        tolerance: Scores that differ by no more are ties.
    """
    parts, recommended = [], np.zeros(0, np.int64)
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        targets = np.array([row.columns["target_row"] for row in part])
        scores = score(start, start + len(part))
        left_out = [row.columns["excluded"] for row in part]
        if isinstance(scores, SparseScores):
            parts.append(scores.count_better(targets, left_out, tolerance=tolerance))
            lists = scores.first_items(left_out, k=first) if first else []
        else:
            parts.append(count_better(scores, targets, left_out, tolerance=tolerance))
            lists = first_items(scores, left_out, k=first) if first else []
        recommended = counted(lists, scores.shape[1]) + (recommended if start else 0)
    return RankCounts(*(np.concatenate(column) for column in zip(*parts, strict=True))), recommended


def counted(lists: Sequence[Sequence[int] | np.ndarray], items: int) -> np.ndarray:
    """How often each item stands in the lists, i64 [I]."""
    return np.bincount(np.fromiter((item for one in lists for item in one), np.int64), minlength=items)


def popularity(users: Sequence[UserSequence], items: int) -> Scores:
    """Every item by how many users took it in training."""
    base = make_base(taken_counts(users, items))
    return lambda start, stop: SparseScores(base, sparse.csr_array((stop - start, items)))


def taken_counts(users: Sequence[UserSequence], items: int) -> np.ndarray:
    """How many users took each item in training, f64 [I]."""
    return np.asarray(_taken(users, items).sum(0), np.float64).ravel()


def item_knn(similarity: sparse.csr_array, rows: Sequence[Row], *, decay: float = 1.0) -> Scores:
    """Items by their summed similarity to the history (Sarwar et al. 2001; Deshpande & Karypis 2004).

    s(u, j) = Σ_{i in history} decay^age(i) · |U_i ∩ U_j| / √(|U_i| |U_j|) for j ≠ i, where U_i are the users of item i
    in training and the newest item has age 0.

    Args:
        similarity: Of `item_similarity`.
        rows: The examples that are scored.
        decay: In [0, 1]; 1 counts the whole history alike, 0 the last item alone.
    """
    items = similarity.shape[0]
    weights = history_weights(rows, items, decay=decay)
    base = make_base(np.zeros(items))
    return lambda start, stop: SparseScores(base, weights[start:stop] @ similarity)


def item_similarity(users: Sequence[UserSequence], items: int) -> sparse.csr_array:
    """|U_i ∩ U_j| / √(|U_i| |U_j|) of the items' users in training, 0 between an item and itself: f64 [I, I]."""
    taken = _taken(users, items)
    norms = np.sqrt(np.asarray(taken.sum(0), np.float64).ravel())
    scale = np.divide(1.0, norms, out=np.zeros(items), where=norms > 0)
    similarity = sparse.csr_array(taken.T @ taken)
    for start in range(0, items, _SCALED_ROWS):  # in place: with millions of items no second copy fits
        ends = similarity.indptr[start : start + _SCALED_ROWS + 1]
        columns, values = (array[ends[0] : ends[-1]] for array in (similarity.indices, similarity.data))
        rows = np.repeat(np.arange(start, start + len(ends) - 1), np.diff(ends))
        values *= scale[rows]
        values *= scale[columns]
        values[rows == columns] = 0.0
    return similarity


_SCALED_ROWS = 2**14


def markov(users: Sequence[UserSequence], items: int, rows: Sequence[Row]) -> Scores:
    """Items by how often they came right after the last one in training, popularity where that says nothing."""
    pairs = [pair for user in users for pair in _steps(user.items)]
    before, after = np.array(pairs, np.int64).reshape(-1, 2).T
    steps = sparse.csr_array((np.ones(len(pairs)), (before, after)), shape=(items, items))
    counts = taken_counts(users, items)
    # Below 1, so that it decides only where counts of steps are equal.
    fallback = make_base(counts / (2.0 * max(counts.max(), 1.0)))
    last = np.array([row.columns["history"][-1] for row in rows])
    return lambda start, stop: SparseScores(fallback, steps[last[start:stop]])


def history_weights(rows: Sequence[Row], items: int, *, decay: float) -> sparse.csr_array:
    """`decayed` of the examples' histories."""
    return decayed([row.columns["history"] for row in rows], items, decay=decay)


def decayed(histories: Sequence[Sequence[int]], items: int, *, decay: float) -> sparse.csr_array:
    """Weights decay^age of each history's items, [U, I]; decay 0 is the last item alone.

    Raises:
        ValueError: If decay is outside [0, 1].
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    ages = np.concatenate([np.arange(len(history))[::-1] for history in histories])
    return _weights(histories, np.power(float(decay), ages), items)


def _weights(columns: Sequence[Sequence[int]], values: np.ndarray, items: int) -> sparse.csr_array:
    starts = np.cumsum([0, *(len(entry) for entry in columns)])
    small = np.int32 if max(starts[-1], items) < 2**31 else np.int64  # products take the indices of their factors
    starts = starts.astype(small)
    indices = np.fromiter((item for entry in columns for item in entry), small, starts[-1])
    return sparse.csr_array((values, indices, starts), shape=(len(columns), items))


def _taken(users: Sequence[UserSequence], items: int) -> sparse.csr_array:
    """1 where a user took an item in training, [U, I]."""
    known = [sorted(set(user.items)) for user in users]
    return _weights(known, np.ones(sum(map(len, known))), items)


def _steps(items: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(items))


def count_baselines(
    users: Sequence[UserSequence], items: int, rows: Sequence[Row], *, decay: float = 0.7
) -> dict[str, Scores]:
    """Popularity, item-kNN and Markov by the name a report gives them.

    Args:
        users: What training knows.
        items: I.
        rows: U examples that are measured.
        decay: Of the second item-kNN.
    """
    similarity = item_similarity(users, items)
    return {
        "popularity": popularity(users, items),
        "item-kNN": item_knn(similarity, rows),
        f"item-kNN, decay {decay:g}": item_knn(similarity, rows, decay=decay),
        "Markov-1 + popularity": markov(users, items, rows),
    }


def title_baselines(
    retriever: Retriever,
    catalogue: Catalogue,
    rows: Sequence[Row],
    *,
    decay: float = 0.7,
    ask: Ask | None = None,
    block: int = 1024,
) -> dict[str, np.ndarray]:
    """The ranks f64 [U] that titles earn as queries: the last one, the history's with weights, the target's own.

    The last is the ceiling of this retriever. NaN where the retriever failed; ties are counted by its own rule.

    Args:
        retriever: Ranks the first two.
        catalogue: Titles.
        rows: U examples that are measured.
        decay: A title weighs decay^age; the newest has age 0.
        ask: As the policy's texts are ranked, where that is not the text alone: the own title is then asked for so,
            and what saying nothing and the last title earn so are rows of their own.
        block: Examples of one call.

    Raises:
        ValueError: If decay is outside [0, 1].
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    parts: list[dict[str, np.ndarray]] = []
    for start in range(0, len(rows), block):
        columns = [row.columns for row in rows[start : start + block]]
        histories = [column["history"] for column in columns]
        targets, left_out = ([column[name] for column in columns] for name in ("target_row", "excluded"))
        texts = [[catalogue.titles[item] for item in history] for history in histories]
        weights = [[decay**age for age in reversed(range(len(history)))] for history in histories]
        last, own = ([column[name] for column in columns] for name in ("last_title", "target_title"))
        answers = {
            "last title": retriever.score_ranks(last, targets, left_out),
            f"history titles, decay {decay:g}": retriever.score_mixed_ranks(texts, weights, targets, left_out),
        }
        if ask is None:
            answers["oracle: own title"] = retriever.score_ranks(own, targets, left_out)
        else:
            answers["prior alone"] = ask([""] * len(columns), targets, histories, left_out)
            answers["last title + prior"] = ask(last, targets, histories, left_out)
            answers["oracle: own title"] = ask(own, targets, histories, left_out)
        parts.append({name: np.asarray(answer.rank, np.float64) for name, answer in answers.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# --- prior


Known = Callable[[Sequence[Sequence[int]]], np.ndarray]
"""Histories (rows of the catalogue, oldest first) → f32 [P, I], what stands beside the log-probabilities."""
Part = Callable[[], np.ndarray]
Parts = Callable[[Sequence[Sequence[int]], float], tuple[Part, Part]]
"""(histories, decay) → two functions that give f32 [P, I]: how much titles resemble, and how often taken together."""


def make_prior(section: PriorSection, titles: Sequence[str], users: Sequence[UserSequence]) -> Known:
    """The function that scores the catalogue for some histories.

    Args:
        section: Weights.
        titles: I.
        users: Sequences that `together` comes from: what training knows.
    """
    parts = make_parts(titles, users)

    def known(histories: Sequence[Sequence[int]]) -> np.ndarray:
        resembling, together = parts(histories, section.decay)
        found = np.zeros((len(histories), len(titles)), np.float32)
        if section.history:
            found += section.history * resembling()
        if section.together:
            found += section.together * together()
        return found

    return known


def fusion_baseline(titles: Sequence[str], users: Sequence[UserSequence], *, decay: float) -> Known:
    """The baseline of titles and counts together: cos(history, title) + 2 · co-occurrence.

    The weight 2 was the best of 0, .1, .2, .3, .5, .7, 1 and 2 on 4,000 validation users of Amazon Beauty. Arguments as
    of `make_prior`.
    """
    return make_prior(PriorSection(history=1.0, together=2.0, decay=decay), titles, users)


def make_parts(titles: Sequence[str], users: Sequence[UserSequence]) -> Parts:
    """What the weights of `make_prior` are multiplied with; arguments as there."""
    vectors, similarity = title_vectors(titles), item_similarity(users, len(titles))

    def parts(histories: Sequence[Sequence[int]], decay: float) -> tuple[Part, Part]:
        weights: Any = decayed(histories, len(titles), decay=decay)

        def resembling() -> np.ndarray:
            asked = weights @ vectors
            length = np.sqrt(np.asarray(asked.multiply(asked).sum(1))).reshape(-1, 1)
            return np.asarray((asked @ vectors.T).toarray() / np.maximum(length, 1e-9), np.float32)

        def together() -> np.ndarray:
            return np.asarray((weights @ similarity).toarray(), np.float32)

        return resembling, together

    return parts


def title_vectors(titles: Sequence[str]) -> Any:
    """TF-IDF vectors of the titles with each word's idf once more, a sparse f32 [I, words] of unit rows.

    Titles without a word (letters or digits) are rows of 0.
    """
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    # Words of one character too, as the retriever's encoder.
    vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    try:
        counted = vectorizer.fit_transform(titles)
    except ValueError:  # not one of them has a word
        return sparse.csr_array((len(titles), 1), dtype=np.float32)
    return sparse.csr_array(normalize(counted @ sparse.diags_array(vectorizer.idf_)), dtype=np.float32)


def fused_scores(listed: np.ndarray, scores: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Scores of all items f32 [P, I]: of those listed with their log-probabilities, of others with the least of these.

    Args:
        listed: Int [P, K], rows of the catalogue.
        scores: F32 [P, K], their log-probabilities.
        known: F32 [P, I], of `make_prior`.
    """
    said = np.repeat(scores.min(1, keepdims=True), known.shape[1], axis=1)
    np.put_along_axis(said, listed, scores, axis=1)
    return said + known
