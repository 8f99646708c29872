"""The task: from a user's history to a text that finds the item that came next."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.rewards import Maker, Reward
from grpo_jax.tasks.display import Display
from grpo_jax.tasks.recommendation import dummy, metrics
from grpo_jax.tasks.recommendation.catalogue import Catalogue
from grpo_jax.tasks.recommendation.dataset import Dataset, column_names, load_dataset, over_catalogue
from grpo_jax.tasks.recommendation.examples import PLACES, asking_pairs, title_pairs, together_pairs
from grpo_jax.tasks.recommendation.ranking.choosing import ChosenPrior, choose_prior
from grpo_jax.tasks.recommendation.ranking.items import completion_ranks, items_of, ranking_columns
from grpo_jax.tasks.recommendation.ranking.prior import PriorSection, make_prior
from grpo_jax.tasks.recommendation.ranking.recommending import MakeWriter, Recommender, make_recommender
from grpo_jax.tasks.recommendation.report import findings, policy_ranks
from grpo_jax.tasks.recommendation.retrieval import RetrievalSection, make_ask, open_retriever
from grpo_jax.tasks.recommendation.rewards import (
    BUILT_IN,
    RANK_PENALTY,
    make_reward,
    rank_penalty,
    reward_columns,
    where_ranked,
)
from grpo_jax.tasks.recommendation.words import item_vectors, policy_words
from grpo_jax.tasks.task import Choices, Setup, Task, World

FUSED, RANK = "fused", "rank"
"""Always watched, last: the tables are made of them; the first where there is a prior."""

_MEASURES: dict[str, Callable[..., np.ndarray]] = {"hr": metrics.hit, "ndcg": metrics.ndcg, "mrr": metrics.mrr}


@dataclass(frozen=True)
class Recommendation(Task):
    """Writes what a user looks for next; the reward is where that ranks the item that came next.

    Args:
        source: "dummy" for a generated world, a sequential.txt (a line per user: user item … item target), or a CSV
            of events with user_id, item_id, timestamp and perhaps rating (`data.columns` says what it calls them); ""
            where it is still to be given.
        catalogue: Items and titles (.tsv, .csv or .json); none for the dummy world.
        prompts: JSON of {user: prompt} to use in place of the template; users are then split, one example each.
        writes: What a completion is: a "query", any text by which the retriever ranks the catalogue; or an item, by its
            "title", by a word that is the "item"'s alone or by semantic "ids": then the policy ranks the catalogue
            itself.
        semantic_ids: With writes ids, the file of each item's words, which `python -m
            grpo_jax.tasks.recommendation.ranking.semantic_ids` writes.
        listed: Of a policy that ranks itself, how many items a ranking lists; 0 for all, scored exactly.
        item_start: What the items' own words begin as in a new policy: vectors of their "titles", so that like titles
            are near each other and rare items known; or "random".
        template: The prompt; {history} stands for the titles, {last} for the newest, {items} for the items' own words.
        history_items: How many of the newest titles a prompt lists.
        title_characters: Titles in prompts are cut to so many characters; 0 for never.
        separator: What stands between two titles.
        split: What is held out: each user's "last" item (the one before it for validation), some "items" of which
            training sees nothing (cold start), or what happened after a moment in "time" (ratings only).
        held_out_items: Share of the items held out for testing, and as many for validation (split items only).
        time_share: Share of the interactions before the cut, half of the others for validation (split time only).
        training_targets: Train on "every" position of a history before the held-out items, or on the "last" alone; or
            reinforce the last and teach the others ("apart"), so that no reward is earned by memory.
        blank_titles: An item without a title is an "error", or "keep" it as a text that nothing resembles.
        minimum_rating: Ratings below do not count (ratings only).
        minimum_items: Users with fewer items are left out (ratings only).
        exclude_history: Rankings leave the history's items out; false ranks them with all others.
        order_column: Column of the catalogue whose order splits the report into rising and falling users; null for
            no such split.
        decay: Weight of each older title in the decayed baselines.
        dummy_users: Users of the dummy world.
        dummy_items: Its items, rounded up to a multiple of 280.
        dummy_length: Items of each of its users.
        dummy_fickle: Share of its history items of another brand than the user's.
        dummy_noise: Share of its items drawn at random.
        dummy_seed: Of the world; apart from the run's seed, so that seeds compare on one world.
        pairs: What the warm start teaches. "next": the title of the item that came next; "together": of the one most
            often taken together with the last; "forms": the last title, the next one, or both, one in three each; of
            the dummy world alone, "lessons": the form of a title and nothing of the rules, "hearsay": titles whose
            words are right in a quarter of the cases, the last title's in more.
        pair_characters: Taught titles are cut to so many characters; 0 for never.
        retrieval: What ranks the items.
        prior: What is added to the log-probabilities of a policy that ranks them itself, for a second ranking. Of one
            that writes queries its `history` is a part of every query: one that says nothing asks with the history.
    """

    source: str = "dummy"
    catalogue: str | None = None
    prompts: str | None = None
    writes: Literal["query", "title", "item", "ids"] = "query"
    semantic_ids: str | None = None
    listed: int = 100
    item_start: Literal["titles", "random"] = "titles"
    template: str = "{history}"
    history_items: int = 4
    title_characters: int = 60
    separator: str = "\n"
    split: Literal["last", "items", "time"] = "last"
    held_out_items: float = 0.1
    time_share: float = 0.9
    training_targets: Literal["every", "last", "apart"] = "every"
    blank_titles: Literal["error", "keep"] = "error"
    minimum_rating: float = 0.0
    minimum_items: int = 4
    exclude_history: bool = True
    order_column: str | None = None
    decay: float = 0.7
    dummy_users: int = 2000
    dummy_items: int = 2000
    dummy_length: int = 8
    dummy_fickle: float = 0.1
    dummy_noise: float = 0.02
    dummy_seed: int = 0
    pairs: Literal["next", "together", "forms", "lessons", "hearsay"] = "next"
    pair_characters: int = 0
    retrieval: RetrievalSection = field(default_factory=RetrievalSection)
    prior: PriorSection = field(default_factory=PriorSection)

    default_config: ClassVar[str | None] = "recommendation_dummy"
    renamed: ClassVar[Mapping[str, str]] = {
        "recommendation": "task (its fields stand beside task.kind)",
        "retrieval": "task.retrieval",
        "warm_start.pairs": "task.pairs",
        "warm_start.title_characters": "task.pair_characters",
    }
    display: ClassVar[Display] = Display(
        headline=("ndcg@10",),
        live=(("watch/ndcg@10/mean", "ndcg@10"),),
        hidden=(FUSED, RANK),
        digits={"ndcg": 4, "hr": 4, "mrr": 4},
    )
    not_planned: ClassVar[str] = "what ranks the catalogue"

    def __post_init__(self) -> None:
        """Checks what fits together; other ranges are checked where they are used, before anything is loaded."""
        made = self.source == "dummy"
        require(not made or not self.catalogue, "catalogue", "null: the dummy world has its own", self.catalogue)
        require(not made or not self.prompts, "prompts", "null: the dummy world has its own", self.prompts)
        needed = f"a file with the titles of the items of {self.source}"
        require(self.source in ("", "dummy") or bool(self.catalogue), "catalogue", needed, self.catalogue)
        require(0 <= self.decay <= 1, "decay", "a number in [0, 1]", self.decay)
        require(0 < self.held_out_items < 0.5, "held_out_items", "a share in (0, 0.5)", self.held_out_items)
        require(0 < self.time_share < 1, "time_share", "a share in (0, 1)", self.time_share)
        timed = self.split != "time" or self.source.lower().endswith(".csv")
        require(timed, "split", f"last or items: {self.source} has no times, a CSV of ratings has", self.split)
        alike = self.split == "last" or not self.prompts
        require(alike, "split", "last: prompts by hand are held out by user", self.split)
        asks = any(place in self.template for place in PLACES) or bool(self.prompts)
        require(asks, "template", f"one of {', '.join(PLACES)} in it", self.template)
        require(self.listed >= 0, "listed", "a number >= 0", self.listed)
        named = self.writes in ("item", "ids") or "{items}" not in self.template
        without = "no {items} in it: items have words of their own with writes: item or ids"
        require(named, "template", without, self.template)
        coded = "with writes: ids a file of python -m grpo_jax.tasks.recommendation.ranking.semantic_ids, else null"
        require(bool(self.semantic_ids) == (self.writes == "ids"), "semantic_ids", coded, self.semantic_ids)
        begun = self.writes == "item" or self.item_start == "titles"
        require(begun, "item_start", "titles, its default: items have words of their own with writes: item", "random")
        asking = self.writes == "query" or self.pairs == "next"
        alone = self.writes != "query" or not self.prior.together
        known = "0: a query is made of words, its text's and with prior.history those of the history"
        require(alone, "prior.together", known, self.prior.together)
        require(asking, "pairs", "next: a policy that ranks itself is taught items", self.pairs)
        require(self.pair_characters >= 0, "pair_characters", "a number >= 0", self.pair_characters)

    def check(self, config: Config) -> None:
        """Refuses fields that this task does not read, and lessons of a world that is not there."""
        for name in ("prompts", "validation", "test"):
            given = getattr(config.data, name)
            require(not given, f"data.{name}", "nothing: prompts are made of histories", given)
        named = column_names(self)
        for name in config.data.columns:
            expected = f"one of {', '.join(named)}" if named else "nothing: the dummy world has no columns"
            require(name in named, "data.columns", expected, name)
        taught = config.warm_start.steps == 0 or self.pairs in ("next", "together", "forms") or self.source == "dummy"
        require(taught, "task.pairs", "next, together or forms: the others are of the dummy world alone", self.pairs)
        asked = RANK_PENALTY in (*config.watch, *(section.name for section in config.rewards))
        ordered = "task.writes title or item, and sampling.group beams or distinct: it asks for places in a group"
        given, fits = config.sampling.group, self.writes != "query" and config.sampling.group != "samples"
        require(fits or not asked, f"rewards.{RANK_PENALTY}", ordered, given if self.writes != "query" else self.writes)

    def listed_texts(self, config: Config) -> Sequence[str] | None:
        """The items of a policy that ranks them itself."""
        if self.writes == "query":
            return None
        catalogue = load_dataset(self, held_out=config.data.held_out, columns=config.data.columns).catalogue
        return items_of(catalogue.names or catalogue.titles).texts

    def load(self, setup: Setup) -> World:
        """Reads the data and opens the retriever, which tests itself.

        Raises:
            UserError: Files are bad, the service is not there or holds another catalogue, or titles do not retrieve
                themselves.
        """
        require(setup.prompts is None, "prompts", "none: a recommendation run takes its data from its task", "some")
        data = setup.config.data
        dataset = load_dataset(self, held_out=data.held_out, columns=data.columns)
        catalogue, section = dataset.catalogue, self.retrieval
        setup.say("catalogue", f"{self.source}: {len(catalogue):,} items, {len(dataset.users):,} users")
        for note in dataset.notes:
            setup.say("", note)
        retrieval = own_package("bridges", "retrieval")
        retriever, share = open_retriever(
            section, catalogue.titles, retrieval, required=0.9 if self.writes == "query" else 0.0
        )
        where = "in this process" if section.backend == "local" else f"service {section.service!r} over Ray"
        encoder = (
            f"{section.encoder} + {section.dense_weight:g} × {section.dense}" if section.dense else section.encoder
        )
        tested = f"self-test: {share:.1%} of titles asked for retrieve themselves"
        setup.say("retrieval", f"{encoder}, {where}, ties {section.ties}; {tested}")

        items = None if self.writes == "query" else items_of(catalogue.names or catalogue.titles)
        digest = own_package("bridges", "retrieval.encoders").titles_digest
        named = {"semantic_ids": digest(catalogue.names)} if self.writes == "ids" else {}
        known = make_prior(self.prior, catalogue.titles, dataset.known) if items and self.prior.used else None
        ask = make_ask(retriever, self.prior, retrieval)

        def ranked(completions: Sequence[str], columns: Mapping[str, Any]) -> dict[str, Any]:
            if items is not None:
                ranks = completion_ranks(items, completions, columns)
                return reward_columns(ranks, (ranks == 1).astype(np.float64))
            answer = ask(completions, columns["target_row"], columns["history"], columns["excluded"])
            return reward_columns(answer.rank, answer.probability)

        return World(
            prompts=dataset.prompts,
            source=self.source,
            rewards=_rewards(len(catalogue), fused=known is not None, ranks=items is not None),
            default_rewards=(RewardSection("ndcg"),),
            default_watch=("ndcg@10", "hr@10", "ndcg@5", "hr@5", "mrr"),
            measures=measure,
            always_watched=(FUSED, RANK) if known else (RANK,),
            columns=ranked,
            adapt=where_ranked,
            references=lambda rows: {"oracle": [_oracle(catalogue, row) for row in rows]},
            remember=functools.partial(policy_ranks, fused=known is not None),
            findings=lambda remembered, rows: findings(self, dataset, retriever, rows, remembered, known, ask),
            shown={"wanted": "target_title"},
            pairs=lambda: self._pairs(dataset, setup.config.seed),
            words=lambda: policy_words(self, catalogue, limit=setup.config.policy.new.vocabulary),
            word_vectors=self._vectors(catalogue.titles),
            identity={**retriever.fingerprint._asdict(), **named},
            choices=items and Choices(items.texts, self.listed, functools.partial(ranking_columns, items, known)),
        )

    def over_catalogue(self, path: str, columns: Mapping[str, str]) -> Recommendation:
        """The task with a catalogue that has grown (`dataset.over_catalogue`)."""
        return over_catalogue(self, path, columns)

    def recommender(self, config: Any, policy: Any, writer: MakeWriter, *, catalogue: str | None = None) -> Recommender:
        """What a trained policy of this task says to a history of titles (`recommending.make_recommender`)."""
        return make_recommender(config, policy, writer, catalogue=catalogue)

    def choose_prior(self, config: Any, policy: Any, *, users: int | None = None) -> ChosenPrior:
        """Which weights of the prior are best for a trained policy (`choosing.choose_prior`)."""
        return choose_prior(config, policy, users=users)

    def _vectors(self, titles: Sequence[str]) -> Callable[[int], dict[str, np.ndarray]] | None:
        wanted = self.writes == "item" and self.item_start == "titles"
        return functools.partial(item_vectors, titles) if wanted else None

    def _pairs(self, dataset: Dataset, seed: int) -> list[tuple[str, str]]:
        rows = dataset.taught
        if names := dataset.catalogue.names:
            return [(row.prompt, names[row.columns["target_row"]]) for row in rows]
        if self.pairs == "lessons":
            return dummy.lessons(rows, dataset.catalogue, seed=seed)
        if self.pairs == "hearsay":
            return dummy.hearsay(rows, dataset.catalogue, seed=seed)
        if self.pairs == "together":
            return together_pairs(rows, dataset.catalogue, dataset.known, characters=self.pair_characters)
        if self.pairs == "forms":
            return asking_pairs(rows, characters=self.pair_characters, seed=seed)
        return title_pairs(rows, characters=self.pair_characters)


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
