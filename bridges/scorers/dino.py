"""DINOv2 (Oquab et al. 2023, arXiv:2304.07193) through transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

PUBLISHED: dict[str, int] = {
    "facebook/dinov2-small": 22_056_576,
    "facebook/dinov2-base": 86_580_480,
    "facebook/dinov2-large": 304_368_640,
}
"""Numbers in models on the hub."""


@dataclass(frozen=True)
class Dino:
    """Judges how alike two pictures are: shapes and places count more than for CLIP, words not at all.

    Args:
        model: Folder or hub id of a vision model of transformers.
        dtype: Type of its weights.
        preprocessing: How pictures of another size are resized: "library", by the folder's image processor from 8
            bits, or "tensor", as floats on the device, which is faster and differs a little.
    """

    model: str = "facebook/dinov2-base"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    preprocessing: Literal["library", "tensor"] = "library"

    def check(self) -> None:
        """Refuses a folder that is not there; no weight is read."""
        from bridges.loading import local_folder

        local_folder(self.model)

    def load(self, device: str) -> Any:
        """The model on "cpu" or "gpu:N", as a `bridges.clip.ImageEncoder`."""
        from bridges.dino import load_dino

        return load_dino(self.model, device=device, dtype=self.dtype, preprocessing=self.preprocessing)

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights; activations are a few tens of megabytes."""
        from bridges import shapes

        count = PUBLISHED.get(self.model) or shapes.model_size(self.model)
        return [("DINO", count * shapes.ITEM_BYTES[self.dtype], self.dtype), ("scoring", 2**28, "allowance")]
