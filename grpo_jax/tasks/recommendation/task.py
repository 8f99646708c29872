"""The task: from a user's history to a text that finds the item that came next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Le, Lt

from grpo_jax.config.fields import (
    Count,
    Length,
    NonNegative,
    PositiveCount,
    Share,
    check_ranges,
    require,
)
from grpo_jax.config.retrieval import RetrievalSection
from grpo_jax.config.run import Config
from grpo_jax.tasks.display import Display
from grpo_jax.tasks.task import Task, TaskData, TaskSetup

if TYPE_CHECKING:
    from grpo_jax.models.policy import Policy
    from grpo_jax.tasks.recommendation.recommending import ChosenPrior, MakeWriter, Recommender

PLACES = ("{history}", "{last}", "{items}")
"""Placeholders of a template; one of them at least."""
FUSED, RANK = "fused", "rank"
"""Always watched, last, for the tables; the first where there is a prior."""
RANK_PENALTY = "rank_penalty"
"""For policies that rank the catalogue themselves, in groups that have an order."""
NAMED = ("item", "ids", "slate")
"""What a policy writes by words that are the items' alone."""
EVENT_COLUMNS = ("user_id", "item_id", "timestamp", "rating")
"""Columns of a CSV of events; a rating only where `minimum_rating` asks for one."""


@dataclass(frozen=True)
class PriorSection:
    """What is known without the policy, and how much it counts beside what the policy says; all 0 for that alone.

    Args:
        history: A, the weight of how much a title resembles the history's. Where texts are ranked, of the history in
            the query: unit(text) + a · unit(history).
        together: B, the weight of how often an item was taken with those of the history.
        following: C, the weight of the share in which an item came right after those of the history.
        decay: Weight of each older item of the history.
    """

    history: NonNegative = 0.0
    together: NonNegative = 0.0
    following: NonNegative = 0.0
    decay: Share = 0.7

    def __post_init__(self) -> None:
        check_ranges(self, "prior")

    @property
    def weights(self) -> dict[str, float]:
        """Weights above 0 by the names of their terms."""
        return {name: weight for name, weight in vars(self).items() if weight and name != "decay"}

    @property
    def used(self) -> bool:
        """True if it changes a ranking."""
        return bool(self.weights)


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
            itself. Or a "slate": a list of sampling.max_new_tokens different items, which is judged as a whole.
        semantic_ids: With writes ids, the file of each item's words, which `python -m
            grpo_jax.tasks.recommendation.semantic_ids` writes.
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
    writes: Literal["query", "title", "item", "ids", "slate"] = "query"
    semantic_ids: str | None = None
    listed: Count = 100
    item_start: Literal["titles", "random"] = "titles"
    template: str = "{history}"
    history_items: PositiveCount = 4
    title_characters: Count = 60
    separator: str = "\n"
    split: Literal["last", "items", "time"] = "last"
    held_out_items: float = 0.1
    time_share: float = 0.9
    training_targets: Literal["every", "last", "apart"] = "every"
    blank_titles: Literal["error", "keep"] = "error"
    minimum_rating: float = 0.0
    minimum_items: Annotated[int, Ge(2)] = 4
    exclude_history: bool = True
    order_column: str | None = None
    decay: Share = 0.7
    dummy_users: Length = 2000
    dummy_items: Length = 2000
    dummy_length: Annotated[int, Ge(4), Le(56)] = 8  # the rules come back after 56 items
    dummy_fickle: Annotated[Share, Lt(1)] = 0.1
    dummy_noise: Annotated[Share, Lt(1)] = 0.02
    dummy_seed: int = 0
    pairs: Literal["next", "together", "forms", "lessons", "hearsay"] = "next"
    pair_characters: Count = 0
    retrieval: RetrievalSection = field(default_factory=RetrievalSection)
    prior: PriorSection = field(default_factory=PriorSection)

    default_config: ClassVar[str | None] = "recommendation_dummy"
    display: ClassVar[Display] = Display(
        headline=("ndcg@10",),
        live=(("watch/ndcg@10/mean", "ndcg@10"),),
        hidden=(FUSED, RANK),
        digits={"ndcg": 4, "hr": 4, "mrr": 4},
    )
    not_planned: ClassVar[str] = "what ranks the catalogue"

    def __post_init__(self) -> None:
        """Check what fits together; other ranges are checked where they are used, before anything is loaded."""
        check_ranges(self, "")
        dummy = self.source == "dummy"
        items_named = self.writes in NAMED
        require(not dummy or not self.catalogue, "catalogue", "null: the dummy world has its own", self.catalogue)
        require(not dummy or not self.prompts, "prompts", "null: the dummy world has its own", self.prompts)
        expected = f"a file with the titles of the items of {self.source}"
        require(self.source in ("", "dummy") or bool(self.catalogue), "catalogue", expected, self.catalogue)
        require(0 < self.held_out_items < 0.5, "held_out_items", "a share in (0, 0.5)", self.held_out_items)
        require(0 < self.time_share < 1, "time_share", "a share in (0, 1)", self.time_share)
        expected = f"last or items: {self.source} has no times, a CSV of ratings has"
        require(self.split != "time" or self.source.lower().endswith(".csv"), "split", expected, self.split)
        expected = "last: prompts by hand are held out by user"
        require(self.split == "last" or not self.prompts, "split", expected, self.split)
        has_place = any(place in self.template for place in PLACES) or bool(self.prompts)
        require(has_place, "template", f"one of {', '.join(PLACES)} in it", self.template)
        expected = "no {items} in it: items have words of their own with writes: item, ids or slate"
        require(items_named or "{items}" not in self.template, "template", expected, self.template)
        expected = "with writes: ids a file of python -m grpo_jax.tasks.recommendation.semantic_ids, else null"
        require(bool(self.semantic_ids) == (self.writes == "ids"), "semantic_ids", expected, self.semantic_ids)
        expected = "titles, its default: items have words of their own with writes: item or slate"
        require(self.writes in ("item", "slate") or self.item_start == "titles", "item_start", expected, "random")
        expected = "0: a query is made of words, its text's and with prior.history those of the history"
        for name in ("together", "following"):
            weight = getattr(self.prior, name)
            require(self.writes != "query" or not weight, f"prior.{name}", expected, weight)
        expected = "next: a policy that ranks itself is taught items"
        require(self.writes == "query" or self.pairs == "next", "pairs", expected, self.pairs)

        if self.writes_lists:
            expected = "{items} in it: a list repeats no item that its prompt names"
            require("{items}" in self.template and not self.prompts, "template", expected, self.template)
            require(self.exclude_history, "exclude_history", "true: a list repeats no item of its prompt", False)
            require(not self.prior.used, "prior", "nothing: it is of policies that rank", self.prior)

    @property
    def writes_lists(self) -> bool:
        """True if a completion is a list of items."""
        return self.writes == "slate"

    def check(self, config: Config) -> None:
        """Refuse fields that this task does not read, and pairs of a world that is not there."""
        for name in ("prompts", "validation", "test"):
            rows = getattr(config.data, name)
            require(not rows, f"data.{name}", "nothing: prompts are made of histories", rows)
        columns: tuple[str, ...] = ("title", *EVENT_COLUMNS) if self.source.lower().endswith(".csv") else ("title",)
        if self.source == "dummy":
            columns = ()
        for name in config.data.columns:
            expected = f"one of {', '.join(columns)}" if columns else "nothing: the dummy world has no columns"
            require(name in columns, "data.columns", expected, name)
        of_dummy = config.warm_start.steps > 0 and self.pairs in ("lessons", "hearsay")
        expected = "next, together or forms: the others are of the dummy world alone"
        require(self.source == "dummy" or not of_dummy, "task.pairs", expected, self.pairs)
        if self.writes_lists:
            require(
                config.data.form == "append", "data.form", "append: a list goes on with its prompt", config.data.form
            )
            expected = "samples: lists are drawn one by one"
            require(config.sampling.group == "samples", "sampling.group", expected, config.sampling.group)
            require(config.sampling.turns == 1, "sampling.turns", "1: a list is written once", config.sampling.turns)
        if RANK_PENALTY in (*config.watch, *(section.name for section in config.rewards)):
            group = config.sampling.group
            expected = "task.writes title or item, and sampling.group beams or distinct: it asks for places in a group"
            require(self.writes not in ("query", "slate"), f"rewards.{RANK_PENALTY}", expected, self.writes)
            require(group != "samples", f"rewards.{RANK_PENALTY}", expected, group)

    def listed_texts(self, config: Config) -> Sequence[str] | None:
        """Return the items of a policy that ranks or lists them itself."""
        from grpo_jax.tasks.recommendation.loading import listed_texts

        return None if self.writes == "query" else listed_texts(config)

    def load(self, setup: TaskSetup) -> TaskData:
        """Read the data and open the retriever, which tests itself."""
        from grpo_jax.tasks.recommendation.loading import load_task

        return load_task(self, setup)

    def over_catalogue(self, path: str, columns: Mapping[str, str]) -> Recommendation:
        """Return the task with a catalogue that has grown (`dataset.over_catalogue`)."""
        from grpo_jax.tasks.recommendation.dataset import over_catalogue

        return over_catalogue(self, path, columns)

    def recommender(
        self, config: Config, policy: Policy, writer: MakeWriter, *, catalogue: str | None = None
    ) -> Recommender:
        """Return a trained policy's recommender (`recommending.make_recommender`)."""
        from grpo_jax.tasks.recommendation.recommending import make_recommender

        return make_recommender(config, policy, writer, catalogue=catalogue)

    def choose_prior(self, config: Config, policy: Policy, *, users: int | None = None) -> ChosenPrior:
        """Choose the weights of the prior for a trained policy (`recommending.choose_prior`)."""
        from grpo_jax.tasks.recommendation.recommending import choose_prior

        return choose_prior(config, policy, users=users)
