"""Loading of the task, and items from a trained run: `python -m grpo_jax.recommend`."""

from __future__ import annotations

import functools
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError, one_line
from grpo_jax.models.policy import Policy
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.encoding import choices_trie, make_encode
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.sampling.ranking import make_ranker
from grpo_jax.tasks.recommendation import FUSED, PLACES, RANK, rewards
from grpo_jax.tasks.recommendation.baselines import floor_scores, item_scores, make_prior, taken_counts, title_vectors
from grpo_jax.tasks.recommendation.catalogue import Catalogue, item_word, items_of, plain
from grpo_jax.tasks.recommendation.dataset import Dataset, history_prompt, load_dataset, sft_pairs
from grpo_jax.tasks.recommendation.report import findings, policy_ranks
from grpo_jax.tasks.recommendation.sections import RecommendationFields
from grpo_jax.tasks.task import Choices, TaskData, TaskReport, TaskSetup, Vocabulary

if TYPE_CHECKING:
    from bridges.retrieval.ranking import Ranks

MakeWriter = Callable[[Sequence[Row]], Callable[[str], str]]
"""Rows whose longest prompt sets the width of all → prompt → the policy's greedy completion."""
BestItems = Callable[[Row, int], list[tuple[int, float]]]
"""A row and how many → the best rows of the catalogue and their scores."""


def load_task(task: RecommendationFields, setup: TaskSetup) -> TaskData:
    """Read the data and open the retriever (`Recommendation.load`)."""
    require(setup.prompts is None, "prompts", "none: a recommendation run takes its data from its task", "some")
    config = setup.config
    dataset = load_dataset(task, config.data.columns)
    catalogue = dataset.catalogue
    setup.info("catalogue", f"{task.source}: {len(catalogue):,} items, {len(dataset.users):,} users")
    for note in dataset.notes:
        setup.info("", note)
    retrieval = own_package("bridges", "retrieval")
    try:
        retriever = retrieval.open_retriever(catalogue.titles, task.retrieval)
    except retrieval.RetrievalError as error:
        raise UserError(f"task.retrieval: {error}") from error
    where = "in this process" if task.retrieval.backend == "local" else "by a service over Ray"
    setup.info("retrieval", f"{task.retrieval.encoder}, {where}")

    items = None if task.writes == "query" else items_of(catalogue.written)
    prior = make_prior(task.prior, catalogue.titles, dataset.known) if items and task.prior.used else None

    def ask(texts: Sequence[str], targets: Sequence[int], histories: Sequence[Sequence[int]]) -> Ranks:
        """Rank by query = unit(text) + a · unit(history), a = `prior.history`."""
        weight, decay = task.prior.history, task.prior.decay
        history = retrieval.History(histories, weight, decay) if weight else None
        return retriever.score_ranks(texts, targets, histories, history)

    def ranked(completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        if items is None:
            rank, probability = ask(completions, columns["target_row"], columns["history"])
        else:
            rank = rewards.completion_ranks(items, completions, columns)
            probability = rank == 1
        return {"rank": rank.tolist(), "probability": probability.astype(np.float64).tolist()}

    fused = prior is not None
    return TaskData(
        prompts=dataset.prompts,
        source=task.source,
        rewards=TaskRewards(
            rewards.task_rewards(len(catalogue), fused=fused),
            defaults=(RewardSection(name="ndcg"),),
            eval_defaults=("ndcg@10", "hr@10", "ndcg@5", "hr@5", "mrr"),
            eval_always=(FUSED, RANK) if fused else (RANK,),
            measures=rewards.measure,
            columns=ranked,
        ),
        report=TaskReport(
            references=lambda rows: {"oracle": [catalogue.written[row.columns["target_row"]] for row in rows]},
            remember=functools.partial(policy_ranks, fused=fused),
            findings=lambda remembered, rows: findings(
                dataset,
                rows,
                remembered,
                ask=retriever.score_ranks,
                mixed=ask if items is None and task.prior.used else None,
                prior=prior,
            ),
            columns={"wanted": "target_title"},
        ),
        pairs=lambda: sft_pairs(task, dataset, config.seed),
        vocabulary=Vocabulary(
            lambda: policy_words(task, catalogue),
            functools.partial(item_vectors, catalogue.titles) if task.writes == "item" else None,
        ),
        identity=retriever.fingerprint._asdict(),
        choices=items and Choices(items.texts, functools.partial(rewards.ranking_columns, items, prior)),
    )


def policy_words(task: RecommendationFields, catalogue: Catalogue) -> list[str]:
    """Return the words of the prompts' frame and the items' own, then the words of titles by frequency."""
    frame = re.sub("|".join(PLACES), " ", task.template)
    marks = [word for text in (frame, task.separator, *catalogue.names) for word in plain(text).split()]
    if catalogue.names and "{history}" not in task.template and "{last}" not in task.template:
        return list(dict.fromkeys(marks))  # titles occur in neither prompts nor completions
    counts = Counter(word for title in catalogue.titles for word in plain(title).split())
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    return list(dict.fromkeys([*marks, *frequent]))


def item_vectors(titles: Sequence[str], width: int) -> dict[str, np.ndarray]:
    """Return initial embeddings of the items' own words: unit vectors f32 [width], similar for similar titles.

    They are the centred TF-IDF vectors of titles (`title_vectors`) in their first `width` directions (latent semantic
    analysis, Deerwester et al. 1990), padded with 0. An item with few users is thus known by its title from the start.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.preprocessing import normalize

    words = title_vectors(titles)
    reduced = TruncatedSVD(min(width, min(words.shape) - 1), random_state=0).fit_transform(words)
    vectors = np.asarray(normalize(reduced - reduced.mean(0)), np.float32)
    vectors = np.pad(vectors, ((0, 0), (0, width - vectors.shape[1])))
    return {item_word(row): vector for row, vector in enumerate(vectors)}


class Recommended(NamedTuple):
    """An item, by its id in the catalogue; scores are comparable within one answer, higher is better."""

    item: str
    title: str
    score: float


Recommender = Callable[..., list[Recommended]]
"""recommend(history, k=10, *, exclude=(), note=warnings.warn) → the k best items, or as many as there are."""


def make_recommender(config: Config, policy: Policy, writer: MakeWriter, saved: Mapping[str, str]) -> Recommender:
    """Return recommend(history, k, exclude=…, note=…) of a trained policy.

    A policy that ranks the catalogue gives its best items, with the run's prior. A policy that writes queries gives a
    query, with which the run's encoder ranks the catalogue. All calls have the width of the run's longest test prompt:
    the first one compiles, and a longer history does not recompile.

    The history and `exclude` are titles or ids, the history oldest first. A repeated item counts once, at its last
    position, and is not recommended. `note` gets a line about each unknown name, which is skipped. Items that share no
    word with the query follow by popularity. If there are no others, `note` gets a line. An item's own word is its
    place in the catalogue: UserError for another one than in `saved`, the facts of the checkpoint's task.
    """
    task = config.task
    dataset = load_dataset(task, config.data.columns)
    items = dataset.catalogue
    catalogue = own_package("bridges", "retrieval.encoders").catalogue_identity(items.titles)
    trained = saved.get("catalogue", catalogue)
    require(task.writes != "item" or trained == catalogue, "task.catalogue", f"that of training ({trained})", catalogue)
    if task.writes == "query":
        best = _by_query(config, items, writer(dataset.prompts.test))
    else:
        best = _by_policy(config, policy, dataset)
    popular = taken_counts(dataset.known, len(items))
    most_popular = {row: float(popular[row]) for row in np.argsort(-popular, kind="stable").tolist()}
    row_of = _names(items)

    def rows_of(where: str, names: Sequence[str], note: Callable[[str], None]) -> list[int]:
        names = [names] if isinstance(names, str) else [*map(str, names)]
        rows = [row_of(name) for name in names]
        for name in (name for name, row in zip(names, rows, strict=True) if row is None):
            note(f"{where}: no item is called {one_line(repr(name), 80)}")
        return [row for row in rows if row is not None]

    def recommend(
        history: Sequence[str], k: int = 10, *, exclude: Sequence[str] = (), note: Callable[[str], None] = warnings.warn
    ) -> list[Recommended]:
        rows = list(dict.fromkeys(reversed(rows_of("history", history, note))))[::-1]
        left_out = {*rows, *rows_of("exclude", exclude, note)}
        ranked = []
        if rows:
            names = [items.names[row] for row in rows] if items.names else ()
            prompt = history_prompt(task, [items.titles[row] for row in rows], names)
            ranked = best(Row(0, prompt, {"history": tuple(rows)}), k + len(left_out))
        chosen = {row: score for row, score in ranked if score and row not in left_out}
        if not chosen:
            note(f"{'the query finds' if rows else 'the history names'} no item; these are the most popular")
        order = dict.fromkeys([*chosen, *(row for row in most_popular if row not in left_out)])
        scores = chosen or most_popular
        return [Recommended(items.ids[row], items.titles[row], scores.get(row, 0.0)) for row in [*order][:k]]

    return recommend


def _names(catalogue: Catalogue) -> Callable[[str], int | None]:
    """Return title or id → the first item of that name, regardless of case, marks and Unicode form; else None."""

    def spelled(title: str) -> str:
        return plain(unicodedata.normalize("NFKC", title))

    titles = {spelled(name): row for row, name in reversed(list(enumerate(catalogue.titles)))}
    titles.pop("", None)
    return lambda title: catalogue.rows.get(title, titles.get(spelled(title)))


def policy_ranking(
    config: Config, policy: Policy, catalogue: Catalogue, prompts: Sequence[Row]
) -> Callable[[Sequence[Row]], np.ndarray]:
    """Return rows → the policy's log-probability of each item, f32 [P, I]; the longest prompt sets the width."""
    folder = policy.folder
    items = items_of(catalogue.written)
    trie = choices_trie(config, items.texts, folder)
    assert trie is not None
    rank = make_ranker(policy, pad_id=folder.pad_id, trie=trie, temperature=config.sampling.temperature)
    size = folder.config.vocab_size
    encode = make_encode(folder.tokenizer, config.data, pad_id=folder.pad_id, vocab_size=size, rows=prompts)

    def scores(rows: Sequence[Row]) -> np.ndarray:
        encoded = encode(rows)
        ranking = rank(policy.variables, encoded.tokens, encoded.mask)
        return item_scores(items.rows[np.asarray(ranking.texts)], np.asarray(ranking.scores), len(catalogue))

    return scores


def _by_policy(config: Config, policy: Policy, dataset: Dataset) -> BestItems:
    section = config.task.prior
    scores_of = policy_ranking(config, policy, dataset.catalogue, dataset.prompts.test)
    prior = make_prior(section, dataset.catalogue.titles, dataset.known) if section.used else None

    def best(row: Row, count: int) -> list[tuple[int, float]]:
        (scores,) = scores_of([row])
        if prior is not None:
            scores = floor_scores(scores[None])[0] + prior([row.columns["history"]])[0]
        order = np.argsort(-scores, kind="stable")[:count]
        return list(zip(order.tolist(), scores[order].tolist(), strict=True))

    return best


def _by_query(config: Config, catalogue: Catalogue, write: Callable[[str], str]) -> BestItems:
    retrieval = own_package("bridges", "retrieval")
    backend = retrieval.local_backend(catalogue.titles, config.task.retrieval)  # single queries need no service
    prior = config.task.prior

    def best(row: Row, count: int) -> list[tuple[int, float]]:
        histories = [row.columns["history"]]
        history = retrieval.History(histories, prior.history, prior.decay) if prior.history else None
        return backend.nearest([write(row.prompt)], count, histories, history)[0]

    return best
