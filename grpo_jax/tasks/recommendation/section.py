"""The section of a config that names the data of this task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_jax.errors import UserError


@dataclass(frozen=True)
class RecommendationSection:
    """Users, items and prompts of the recommendation task.

    Args:
        source: "dummy" for a generated world, a sequential.txt (a line per user: user item … item target), or a CSV
            of ratings with userId, movieId, rating and timestamp.
        catalogue: Items and titles (.tsv, .csv or .json); none for the dummy world.
        prompts: JSON of {user: prompt} to use in place of the template; users are then split, one example each.
        template: The prompt; {history} stands for the titles, {last} for the newest.
        history_items: How many of the newest titles a prompt lists.
        title_characters: Titles in prompts are cut to so many characters; 0 for never.
        separator: What stands between two titles.
        training_targets: Train on "every" position of a history before the held-out items, or on the "last" alone.
        blank_titles: An item without a title is an "error", or "keep" it as a text that nothing resembles.
        minimum_rating: Ratings below do not count (ratings only).
        minimum_items: Users with fewer items are left out (ratings only).
        order_column: Column of the catalogue whose order splits the report into rising and falling users; null for
            no such split.
        decay: Weight of each older title in the decayed baselines.
        dummy_users: Users of the dummy world.
        dummy_items: Its items, rounded up to a multiple of 280.
        dummy_length: Items of each of its users.
        dummy_fickle: Share of its history items of another brand than the user's.
        dummy_noise: Share of its items drawn at random.
        dummy_seed: Of the world; apart from the run's seed, so that seeds compare on one world.
    """

    source: str = "dummy"
    catalogue: str | None = None
    prompts: str | None = None
    template: str = "{history}"
    history_items: int = 4
    title_characters: int = 60
    separator: str = "\n"
    training_targets: Literal["every", "last"] = "every"
    blank_titles: Literal["error", "keep"] = "error"
    minimum_rating: float = 0.0
    minimum_items: int = 4
    order_column: str | None = None
    decay: float = 0.7
    dummy_users: int = 2000
    dummy_items: int = 2000
    dummy_length: int = 8
    dummy_fickle: float = 0.1
    dummy_noise: float = 0.02
    dummy_seed: int = 0

    def __post_init__(self) -> None:
        """Checks what fits together; ranges are checked where they are used, before anything is loaded."""
        if self.source == "dummy" and (self.catalogue or self.prompts):
            raise UserError("recommendation.catalogue and recommendation.prompts: the dummy world has its own")
        if self.source != "dummy" and not self.catalogue:
            raise UserError(f"recommendation.catalogue: expected a file with the titles of the items of {self.source}")
        if not 0 <= self.decay <= 1:
            raise UserError(f"recommendation.decay: expected a number in [0, 1], got {self.decay!r}")
        if "{history}" not in self.template and "{last}" not in self.template and not self.prompts:
            raise UserError(f"recommendation.template: expected {{history}} or {{last}} in it, got {self.template!r}")
