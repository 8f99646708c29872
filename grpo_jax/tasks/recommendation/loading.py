"""What the task works on: its data, what ranks the catalogue, rewards by rank, and the words of a new policy."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.binding import TaskRewards
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.rewards import Maker, Reward
from grpo_jax.tasks.recommendation import dummy, metrics
from grpo_jax.tasks.recommendation.baselines import Ask, make_prior, title_vectors
from grpo_jax.tasks.recommendation.catalogue import Catalogue, item_word, items_of, plain
from grpo_jax.tasks.recommendation.dataset import Dataset, asking_pairs, load_dataset, title_pairs, together_pairs
from grpo_jax.tasks.recommendation.report import findings, policy_ranks
from grpo_jax.tasks.recommendation.rewards import (
    BUILT_IN,
    completion_ranks,
    make_reward,
    rank_penalty,
    ranking_columns,
    reward_columns,
    where_ranked,
)
from grpo_jax.tasks.recommendation.task import (
    FUSED,
    PLACES,
    RANK,
    RANK_PENALTY,
    PriorSection,
    Recommendation,
    RetrievalSection,
)
from grpo_jax.tasks.task import Choices, TaskData, TaskReport, TaskSetup, Vocabulary

_MEASURES: dict[str, Callable[..., np.ndarray]] = {"hr": metrics.hit, "ndcg": metrics.ndcg, "mrr": metrics.mrr}


def listed_texts(config: Config) -> Sequence[str]:
    """Return the items that a policy which ranks them itself may write."""
    catalogue = load_dataset(config.task, held_out=config.data.held_out, columns=config.data.columns).catalogue
    return items_of(catalogue.names or catalogue.titles).texts


def load_task(task: Recommendation, setup: TaskSetup) -> TaskData:
    """Read the data and open the retriever (`Recommendation.load`)."""
    require(setup.prompts is None, "prompts", "none: a recommendation run takes its data from its task", "some")
    data = setup.config.data
    dataset = load_dataset(task, held_out=data.held_out, columns=data.columns)
    catalogue, section = dataset.catalogue, task.retrieval
    setup.say("catalogue", f"{task.source}: {len(catalogue):,} items, {len(dataset.users):,} users")
    for note in dataset.notes:
        setup.say("", note)
    retrieval = own_package("bridges", "retrieval")
    retriever, share = open_retriever(
        section, catalogue.titles, retrieval, required=0.9 if task.writes == "query" else 0.0
    )
    where = "in this process" if section.backend == "local" else f"service {section.service!r} over Ray"
    encoder = f"{section.encoder} + {section.dense_weight:g} × {section.dense}" if section.dense else section.encoder
    tested = f"self-test: {share:.1%} of titles asked for retrieve themselves"
    setup.say("retrieval", f"{encoder}, {where}, ties {section.ties}; {tested}")

    items = None if task.writes == "query" else items_of(catalogue.names or catalogue.titles)
    digest = own_package("bridges", "retrieval.encoders").titles_digest
    named = {"semantic_ids": digest(catalogue.names)} if task.writes == "ids" else {}
    known = make_prior(task.prior, catalogue.titles, dataset.known) if items and task.prior.used else None
    ask = make_ask(retriever, task.prior, retrieval)

    def ranked(completions: Sequence[str], columns: Mapping[str, Any]) -> dict[str, Any]:
        if items is not None:
            ranks = completion_ranks(items, completions, columns)
            return reward_columns(ranks, (ranks == 1).astype(np.float64))
        answer = ask(completions, columns["target_row"], columns["history"], columns["excluded"])
        return reward_columns(answer.rank, answer.probability)

    return TaskData(
        prompts=dataset.prompts,
        source=task.source,
        rewards=TaskRewards(
            _rewards(len(catalogue), fused=known is not None, ranks=items is not None),
            defaults=(RewardSection("ndcg"),),
            watched=("ndcg@10", "hr@10", "ndcg@5", "hr@5", "mrr"),
            always_watched=(FUSED, RANK) if known else (RANK,),
            measures=measure,
            columns=ranked,
            adapt=where_ranked,
        ),
        report=TaskReport(
            references=lambda rows: {"oracle": [_oracle(catalogue, row) for row in rows]},
            remember=functools.partial(policy_ranks, fused=known is not None),
            findings=lambda remembered, rows: findings(task, dataset, retriever, rows, remembered, known, ask),
            columns={"wanted": "target_title"},
        ),
        pairs=lambda: _pairs(task, dataset, setup.config.seed),
        vocabulary=Vocabulary(
            lambda: policy_words(task, catalogue, limit=setup.config.policy.new.vocabulary),
            _vectors(task, catalogue.titles),
        ),
        identity={**retriever.fingerprint._asdict(), **named},
        choices=items and Choices(items.texts, task.listed, functools.partial(ranking_columns, items, known)),
    )


def _vectors(task: Recommendation, titles: Sequence[str]) -> Callable[[int], dict[str, np.ndarray]] | None:
    wanted = task.writes == "item" and task.item_start == "titles"
    return functools.partial(item_vectors, titles) if wanted else None


def _pairs(task: Recommendation, dataset: Dataset, seed: int) -> list[tuple[str, str]]:
    rows = dataset.taught
    if names := dataset.catalogue.names:
        return [(row.prompt, names[row.columns["target_row"]]) for row in rows]
    if task.pairs == "lessons":
        return dummy.lessons(rows, dataset.catalogue, seed=seed)
    if task.pairs == "hearsay":
        return dummy.hearsay(rows, dataset.catalogue, seed=seed)
    if task.pairs == "together":
        return together_pairs(rows, dataset.catalogue, dataset.known, characters=task.pair_characters)
    if task.pairs == "forms":
        return asking_pairs(rows, characters=task.pair_characters, seed=seed)
    return title_pairs(rows, characters=task.pair_characters)


def _oracle(catalogue: Catalogue, row: Row) -> str:
    return catalogue.names[row.columns["target_row"]] if catalogue.names else row.columns["target_title"]


def _rewards(items: int, *, fused: bool, ranks: bool) -> dict[str, Any]:
    made = {name: Maker(functools.partial(_built_in, name, items)) for name in BUILT_IN}
    of_groups = {RANK_PENALTY: rank_penalty} if ranks else {}
    return {**made, **of_groups, RANK: _rank, **({FUSED: _fused} if fused else {})}


def _built_in(name: str, items: int, **options: Any) -> Reward:
    return make_reward(name, items=items, options=options)


def _rank(rank: Sequence[float], **_: Any) -> list[float | None]:
    return [None if np.isnan(value) else value for value in rank]


def _fused(completions: Sequence[str], fused_rank: Sequence[float] = (), **_: Any) -> list[float | None]:
    """Of held-out prompts alone; missing in training."""
    return list(fused_rank) or [None] * len(completions)


def measure(name: str) -> Reward | None:
    """A measure by its name: hr@K, ndcg@K, mrr@K or mrr, K of at most nine digits; None for other names."""
    kind, at, k = name.partition("@")
    known = kind in _MEASURES and (re.fullmatch("[1-9][0-9]{0,8}", k) if at else name == "mrr")
    if not known:
        return None
    cutoff = int(k) if at else None

    def measured(rank: Sequence[float], **_: Any) -> list[float | None]:
        values = _MEASURES[kind](np.asarray(rank, np.float64), k=cutoff)
        return [None if np.isnan(value) else float(value) for value in values]

    return measured


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


def open_retriever(
    section: RetrievalSection, titles: Sequence[str], retrieval: Any, *, required: float = 0.9
) -> tuple[Any, float]:
    """A retriever over the titles that has tested itself, and the share of titles that retrieve themselves.

    Args:
        section: Which one.
        titles: Of the catalogue.
        retrieval: The module `bridges.retrieval`.
        required: The least share.

    Raises:
        UserError: The service is not there or holds another catalogue, or titles do not retrieve themselves.
    """
    try:
        return retrieval.open_retriever(
            titles,
            backend=section.backend,
            encoder=section.encoder,
            dense=section.dense,
            dense_weight=section.dense_weight,
            ties=section.ties,
            scale=retrieval.Scale(temperature=section.temperature),
            patience=retrieval.Patience(attempts=section.attempts, budget=section.budget, window=section.window),
            cache=section.cache,
            encoder_device=section.device,
            service=section.service,
            address=section.address,
            timeout=section.timeout,
            self_test=required,
        )
    except retrieval.RetrievalError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"task.retrieval: {error}") from error


def make_ask(retriever: Any, prior: PriorSection, retrieval: Any) -> Ask:
    """How every text of the task is ranked: with the prior's history as a part of the query, or alone.

    query = unit(text) + a · unit(history), a = `prior.history`: a text that says nothing earns what the history does.

    Args:
        retriever: Of `open_retriever`.
        prior: Says how much the history counts, and its decay.
        retrieval: The module `bridges.retrieval`.
    """

    def ask(
        texts: Sequence[str],
        targets: Sequence[int],
        histories: Sequence[Sequence[int]],
        excluded: Sequence[Sequence[int]],
    ) -> Any:
        return retriever.score_ranks(texts, targets, excluded, prior_history(prior, histories, retrieval))

    return ask


def prior_history(prior: PriorSection, histories: Sequence[Sequence[int]], retrieval: Any) -> Any:
    """The part of queries that the prior knows, a `bridges.retrieval.History`; None where it counts nothing."""
    return retrieval.History(histories, prior.history, prior.decay) if prior.history else None
