"""CLIP models of transformers, such as PickScore (Kirstain et al. 2023, arXiv:2305.01569)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from grpo_jax.config.fields import may_change, require

PUBLISHED: dict[str, int] = {
    "yuvalkirstain/PickScore_v1": 986_109_441,
    "openai/clip-vit-large-patch14": 427_616_513,
    "openai/clip-vit-base-patch32": 151_277_313,
}
"""Numbers in models on the hub."""


@dataclass(frozen=True)
class ClipModel:
    """Judges pictures and texts by their cosine in the space of a `CLIPModel` of transformers.

    Args:
        path: Folder or hub id.
        dtype: Type of its weights.
        batch_size: Pictures or texts encoded at once.
        quality_head: Safetensors file of an aesthetic head on the picture features, for the quality reward.
        preprocessing: How pictures of another size are resized: "library", by the folder's image processor from 8
            bits, or "tensor", as floats on the device, which is faster and differs a little.
    """

    path: str = "yuvalkirstain/PickScore_v1"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: int = may_change(32)
    quality_head: str | None = None
    preprocessing: Literal["library", "tensor"] = "library"

    def __post_init__(self) -> None:
        """Checks the ranges."""
        require(self.batch_size >= 1, "batch_size", "a number >= 1", self.batch_size)

    def check(self) -> None:
        """Refuses a folder that is not there or holds another model; no weight is read."""
        from bridges.judges.clip_model import check_clip_model

        check_clip_model(self.path)

    def load(self, device: str) -> Any:
        """The model on "cpu" or "gpu:N", as a `bridges.clip.Scorer`."""
        from bridges.judges.clip_model import load_clip_model

        return load_clip_model(
            self.path,
            device=device,
            dtype=self.dtype,
            batch_size=self.batch_size,
            quality_head=self.quality_head,
            preprocessing=self.preprocessing,
        )

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights; activations are some tens of megabytes."""
        from bridges import shapes

        count = PUBLISHED.get(self.path) or shapes.model_size(self.path)
        return [("CLIP", count * shapes.ITEM_BYTES[self.dtype], self.dtype), ("scoring", 2**28, "allowance")]
