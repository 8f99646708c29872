"""Questions about pictures, answered by a model that sees them (VQAScore, Lin et al. 2024, arXiv:2404.01291)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from grpo_jax.config.fields import may_change, require


@dataclass(frozen=True)
class Vqa:
    """Judges a picture by P("Yes"): the probability that a model's reply to a question about it begins so.

    Args:
        path: Folder or hub id of an image-text-to-text model of transformers with a chat template.
        question: What is asked where a reward compares a picture and a prompt; {prompt} stands for the prompt.
        answer: What a reply begins with that says yes.
        dtype: Type of its weights.
        batch_size: Pictures looked at at once.
    """

    path: str = ""
    question: str = 'Does this picture show "{prompt}"? Please answer Yes or No.'
    answer: str = "Yes"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    batch_size: int = may_change(8)

    def __post_init__(self) -> None:
        """Checks the ranges."""
        require(bool(self.path), "path", "a folder or hub id", self.path)
        require("{prompt}" in self.question, "question", "a text with {prompt} in it", self.question)
        require(bool(self.answer.strip()), "answer", "a word", self.answer)
        require(self.batch_size >= 1, "batch_size", "a number >= 1", self.batch_size)

    def check(self) -> None:
        """Refuses a folder that is not there; no weight is read."""
        from bridges.loading import load_config, local_folder

        if local_folder(self.path) is not None:
            load_config(self.path)

    def load(self, device: str) -> Any:
        """The model on "cpu" or "gpu:N", as a `bridges.judges.vqa.Answerer`."""
        from bridges.judges.vqa import load_answerer

        return load_answerer(
            self.path,
            question=self.question,
            answer=self.answer,
            device=device,
            dtype=self.dtype,
            batch_size=self.batch_size,
        )

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights; of a batch, a gigabyte is allowed for."""
        from bridges import shapes

        size = shapes.model_size(self.path, "AutoModelForImageTextToText")
        weights = size * shapes.ITEM_BYTES[self.dtype]
        return [("model", weights, self.dtype), ("looking", 2**30, "allowance")]
