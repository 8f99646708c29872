"""The task: write a text that finds the next item from a user's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from grpo_jax.config.fields import Count, Length, NonNegative, PositiveCount, Section, Share, require
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RetrievalSection
from grpo_jax.tasks.recommendation import EVENT_COLUMNS, FUSED, PLACES, RANK
from grpo_jax.tasks.task import Display, Task, TaskData, TaskSetup

if TYPE_CHECKING:
    from grpo_jax.models.policy import Policy
    from grpo_jax.tasks.recommendation.loading import MakeWriter, Recommender


class PriorSection(Section):
    """Statistics of the histories and their weights beside the policy's scores; all 0 for the policy alone."""

    history: NonNegative = 0.0
    """Weight a of the similarity of a title to the history's. For a query it adds the history: unit(text) +
    a · unit(history)."""
    together: NonNegative = 0.0
    """Weight b of an item's co-occurrence with those of the history."""
    following: NonNegative = 0.0
    """Weight c of P(item right after those of the history)."""
    decay: Share = 0.7
    """Factor of the weight of each older item of the history."""

    @property
    def used(self) -> bool:
        """Return whether the prior changes a ranking."""
        return bool(self.history or self.together or self.following)


class Recommendation(Task):
    """Write a query for a user's next item, or rank the catalogue; the reward is a function of that item's rank."""

    source: str = "dummy"
    """"dummy" for a generated world, a sequential.txt (a line per user: user item … item target), or a CSV of events
    with user_id, item_id and timestamp (`data.columns` renames them); "" is an error."""
    catalogue: str | None = None
    """Items and titles (.tsv or .csv); null for the dummy world."""
    writes: Literal["query", "title", "item"] = "query"
    """With "query" a completion is a query, by which the retriever ranks the catalogue. With "title" or "item" the
    policy ranks the catalogue itself, and a completion is an item's title or its own word."""
    template: str = "{history}"
    """The prompt, with {history} for the titles, {last} for the newest title, {items} for the items' own words."""
    history_items: PositiveCount = 4
    """Number of newest titles in a prompt."""
    title_characters: Count = 60
    """Longest title in a prompt, in characters; 0 for no limit."""
    separator: str = "\n"
    """Separator of two titles."""
    dummy_users: Length = 2000
    """Users of the dummy world."""
    dummy_items: Length = 2000
    """Items of the dummy world, rounded up to a multiple of 280."""
    retrieval: RetrievalSection = Field(default_factory=RetrievalSection)
    """The retriever that ranks the items."""
    prior: PriorSection = Field(default_factory=PriorSection)
    """Prior, added to the log-probabilities of a policy that ranks the items, for a second ranking. For a policy that
    writes queries, `history` adds the history to every query."""

    default_config: ClassVar[str | None] = "recommendation_dummy"
    display: ClassVar[Display] = Display(
        headline=("ndcg@10",),
        live=(("eval_rewards/ndcg@10/mean", "ndcg@10"),),
        hidden=(FUSED, RANK),
        digits={"ndcg": 4, "hr": 4, "mrr": 4},
    )

    def __post_init__(self) -> None:
        """Check fields against each other; other ranges are checked before anything is loaded."""
        dummy = self.source == "dummy"
        require(not dummy or not self.catalogue, "catalogue", "null: the dummy world has its own", self.catalogue)
        expected = f"a file with the titles of the items of {self.source}"
        require(self.source in ("", "dummy") or bool(self.catalogue), "catalogue", expected, self.catalogue)
        has_place = any(place in self.template for place in PLACES)
        require(has_place, "template", f"one of {', '.join(PLACES)} in it", self.template)
        expected = "no {items} in it: items have words of their own with writes: item"
        require(self.writes == "item" or "{items}" not in self.template, "template", expected, self.template)
        expected = "0: a query is made of words, its text's and with prior.history those of the history"
        for name in ("together", "following"):
            weight = getattr(self.prior, name)
            require(self.writes != "query" or not weight, f"prior.{name}", expected, weight)

    def check(self, config: Config) -> None:
        """Refuse fields that this task does not use."""
        super().check(config)
        for name in ("prompts", "validation", "test"):
            config.require(not getattr(config.data, name), f"data.{name}", "nothing: prompts are made of histories")
        columns: tuple[str, ...] = ("title", *EVENT_COLUMNS) if self.source.lower().endswith(".csv") else ("title",)
        if self.source == "dummy":
            columns = ()
        for name in config.data.columns:
            expected = f"one of {', '.join(columns)}" if columns else "nothing: the dummy world has no columns"
            require(name in columns, "data.columns", expected, name)

    def choices(self, config: Config) -> Sequence[str] | None:
        """Return the items, if the policy ranks them itself."""
        from grpo_jax.tasks.recommendation.catalogue import items_of
        from grpo_jax.tasks.recommendation.dataset import load_dataset

        if self.writes == "query":
            return None
        return items_of(load_dataset(self, config.data.columns).catalogue.written).texts

    def load(self, setup: TaskSetup) -> TaskData:
        """Read the data and open the retriever."""
        from grpo_jax.tasks.recommendation.loading import load_task

        return load_task(self, setup)

    def recommender(self, config: Config, policy: Policy, writer: MakeWriter) -> Recommender:
        """Return a trained policy's recommender (`recommending.make_recommender`)."""
        from grpo_jax.tasks.recommendation.loading import make_recommender

        return make_recommender(config, policy, writer)
