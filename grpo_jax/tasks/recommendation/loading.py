"""Loading of the task: its data, retriever, rewards by rank, and the words of a new policy."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RetrievalSection, RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.tasks.recommendation import FUSED, PLACES, RANK
from grpo_jax.tasks.recommendation.baselines import Ranks, make_prior, title_vectors
from grpo_jax.tasks.recommendation.catalogue import Catalogue, item_word, items_of, plain
from grpo_jax.tasks.recommendation.dataset import load_dataset, sft_pairs
from grpo_jax.tasks.recommendation.report import findings, policy_ranks
from grpo_jax.tasks.recommendation.rewards import (
    completion_ranks,
    measure,
    ranking_columns,
    reward_columns,
    task_rewards,
    where_ranked,
)
from grpo_jax.tasks.task import Choices, TaskData, TaskReport, TaskSetup, Vocabulary

if TYPE_CHECKING:
    from grpo_jax.tasks.recommendation.task import Recommendation


def choices(config: Config) -> Sequence[str]:
    """Return the items that a policy which ranks them itself may write."""
    catalogue = load_dataset(config.task, config.data.columns).catalogue
    return items_of(catalogue.written).texts


def load_task(task: Recommendation, setup: TaskSetup) -> TaskData:
    """Read the data and open the retriever (`Recommendation.load`)."""
    require(setup.prompts is None, "prompts", "none: a recommendation run takes its data from its task", "some")
    config = setup.config
    dataset = load_dataset(task, config.data.columns)
    catalogue = dataset.catalogue
    setup.info("catalogue", f"{task.source}: {len(catalogue):,} items, {len(dataset.users):,} users")
    for note in dataset.notes:
        setup.info("", note)
    required = 0.9 if task.writes == "query" else 0.0
    retrieval, retriever, share = open_retriever(task.retrieval, catalogue.titles, required=required)
    setup.info("retrieval", _retrieval_line(task.retrieval, share))

    items = None if task.writes == "query" else items_of(catalogue.written)
    prior = make_prior(task.prior, catalogue.titles, dataset.known) if items and task.prior.used else None

    def ask(texts: Sequence[str], targets: Sequence[int], histories: Sequence[Sequence[int]]) -> Ranks:
        """Rank by query = unit(text) + a · unit(history), a = `prior.history`."""
        weight, decay = task.prior.history, task.prior.decay
        history = retrieval.History(histories, weight, decay) if weight else None
        return retriever.score_ranks(texts, targets, histories, history)

    def ranked(completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        if items is not None:
            ranks = completion_ranks(items, completions, columns)
            return reward_columns(ranks, (ranks == 1).astype(np.float64))
        answer = ask(completions, columns["target_row"], columns["history"])
        return reward_columns(answer.rank, answer.probability)

    fused = prior is not None
    return TaskData(
        prompts=dataset.prompts,
        source=task.source,
        rewards=TaskRewards(
            task_rewards(len(catalogue), fused=fused),
            defaults=(RewardSection(name="ndcg"),),
            watched=("ndcg@10", "hr@10", "ndcg@5", "hr@5", "mrr"),
            always_watched=(FUSED, RANK) if fused else (RANK,),
            measures=measure,
            columns=ranked,
            adapt=where_ranked,
        ),
        report=TaskReport(
            references=lambda rows: {"oracle": [catalogue.written[row.columns["target_row"]] for row in rows]},
            remember=functools.partial(policy_ranks, fused=fused),
            findings=lambda remembered, rows: findings(
                task,
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
        choices=items and Choices(items.texts, functools.partial(ranking_columns, items, prior)),
    )


def policy_words(task: Recommendation, catalogue: Catalogue) -> list[str]:
    """Return words of the prompts' frame and the items' own, then the words of titles, frequent ones first."""
    frame = task.template
    for place in PLACES:
        frame = frame.replace(place, " ")
    marks = plain(frame).split() + plain(task.separator).split()
    marks += [word for name in catalogue.names for word in plain(name).split()]
    if catalogue.names and "{history}" not in task.template and "{last}" not in task.template:
        return list(dict.fromkeys(marks))  # titles are neither read nor written
    counts = Counter(word for title in catalogue.titles for word in plain(title).split())
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    return list(dict.fromkeys([*marks, *frequent]))


def item_vectors(titles: Sequence[str], width: int) -> dict[str, np.ndarray]:
    """Return the first embeddings of the items' own words: unit vectors f32 [width], alike where titles are.

    The titles' TF-IDF vectors (`title_vectors`) in their first `width` directions (latent semantic analysis,
    Deerwester et al. 1990), centred, so that an item which few users took is known by its title from the first step.
    Where there are fewer directions the rest is 0.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.preprocessing import normalize

    words = title_vectors(titles)
    reduced = TruncatedSVD(min(width, min(words.shape) - 1), random_state=0).fit_transform(words)
    vectors = np.asarray(normalize(reduced - reduced.mean(0)), np.float32)
    vectors = np.pad(vectors, ((0, 0), (0, width - vectors.shape[1])))
    return {item_word(row): vector for row, vector in enumerate(vectors)}


def open_retriever(section: RetrievalSection, titles: Sequence[str], *, required: float) -> tuple[Any, Any, float]:
    """Return `bridges.retrieval`, a retriever, and the share of titles, at least `required`, that find themselves."""
    retrieval = own_package("bridges", "retrieval")
    try:
        return retrieval, *retrieval.open_retriever(titles, section, self_test=required)
    except retrieval.RetrievalError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"task.retrieval: {error}") from error


def _retrieval_line(section: RetrievalSection, share: float) -> str:
    where = "in this process" if section.backend == "local" else f"service {section.service!r} over Ray"
    return f"{section.encoder}, {where}; self-test: {share:.1%} of titles asked for retrieve themselves"
