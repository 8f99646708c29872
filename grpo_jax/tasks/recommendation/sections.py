"""The task's fields."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_jax.config.fields import Count, Length, NonNegative, PositiveCount, Section, Share, require
from grpo_jax.config.sections import RetrievalSection
from grpo_jax.tasks.recommendation import PLACES
from grpo_jax.tasks.task import Task


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


class RecommendationFields(Task):
    """The fields of `task.Recommendation`."""

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
