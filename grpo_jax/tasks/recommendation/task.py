"""The task: write a text that finds the next item from a user's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.tasks.recommendation import EVENT_COLUMNS, FUSED, RANK
from grpo_jax.tasks.recommendation.sections import RecommendationFields
from grpo_jax.tasks.task import Display, TaskData, TaskSetup

if TYPE_CHECKING:
    from grpo_jax.models.policy import Policy
    from grpo_jax.tasks.recommendation.loading import MakeWriter, Recommender


class Recommendation(RecommendationFields):
    """Write a query for a user's next item, or rank the catalogue; the reward is a function of that item's rank."""

    default_config: ClassVar[str | None] = "recommendation_dummy"
    display: ClassVar[Display] = Display(
        headline=("ndcg@10",),
        live=(("eval_rewards/ndcg@10/mean", "ndcg@10"),),
        hidden=(FUSED, RANK),
        digits={"ndcg": 4, "hr": 4, "mrr": 4},
    )

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

    def recommender(self, config: Config, policy: Policy, writer: MakeWriter, saved: Mapping[str, str]) -> Recommender:
        """Return a trained policy's recommender (`loading.make_recommender`)."""
        from grpo_jax.tasks.recommendation.loading import make_recommender

        return make_recommender(config, policy, writer, saved)
