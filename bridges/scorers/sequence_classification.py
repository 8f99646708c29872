"""Reward models: sequence classifiers of transformers, as TRL trains and takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from grpo_jax.config.fields import may_change, require


@dataclass(frozen=True)
class SequenceClassification:
    """Judges an answer to its prompt with a reward model; named among the rewards, it is one.

    Args:
        path: Folder or hub id of an `AutoModelForSequenceClassification`.
        label: Which of several outputs is the reward; a reward model has one, and none to name.
        dtype: Type of its weights.
        batch_size: Texts read at once.
        max_tokens: Tokens of a prompt with its answer; of a longer one the beginning is left out.
    """

    path: str = ""
    label: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: int = may_change(16)
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        """Checks the ranges."""
        require(bool(self.path), "path", "a folder or hub id", self.path)
        for name in ("batch_size", "max_tokens"):
            require(getattr(self, name) >= 1, name, "a number >= 1", getattr(self, name))

    def check(self) -> None:
        """Refuses a folder that is not there, or has no such label; no weight is read."""
        from bridges.judges.reward_model import check_reward_model

        check_reward_model(self.path, self.label)

    def load(self, device: str) -> Any:
        """The model on "cpu" or "gpu:N", as a `bridges.judges.reward_model.RewardModel`."""
        from bridges.judges.reward_model import load_reward_model

        return load_reward_model(
            self.path,
            label=self.label,
            device=device,
            dtype=self.dtype,
            batch_size=self.batch_size,
            max_tokens=self.max_tokens,
        )

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights; activations grow with batch_size x max_tokens and stay small beside them."""
        from bridges import shapes

        size = shapes.model_size(self.path, "AutoModelForSequenceClassification")
        weights = size * shapes.ITEM_BYTES[self.dtype]
        return [("reward model", weights, self.dtype), ("scoring", 2**29, "allowance")]
