"""CLIP (Radford et al. 2021, arXiv:2103.00020) through open_clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bridges.clip import Scorer

PUBLISHED: dict[str, int] = {"ViT-B-32": 151_277_313, "ViT-L-14": 427_616_513}
"""Numbers in open_clip's models."""


@dataclass(frozen=True)
class OpenClip:
    """Judges pictures and texts by their similarity in CLIP's space.

    Args:
        model: Open_clip model name, a local folder, or "miniature".
        pretrained: Tag of the weights for a model name, such as laion2b_s34b_b79k.
        dtype: Type of its weights.
        quality_head: Safetensors file of an aesthetic head on the picture features, for the quality reward.
        preprocessing: How pictures of another size are resized: "library", by open_clip's transform from 8 bits, or
            "tensor", as floats on the device, which is faster and differs a little.
    """

    model: str = "miniature"
    pretrained: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quality_head: str | None = None
    preprocessing: Literal["library", "tensor"] = "library"

    def check(self) -> None:
        """Refuse a model that is not there; no weight is read."""
        from bridges.clip import find_clip

        find_clip(self.model, self.pretrained)

    def load(self, device: str) -> Scorer:
        """Load the model on "cpu" or "gpu:N"."""
        from bridges.clip import load_scorer

        return load_scorer(
            self.model,
            pretrained=self.pretrained,
            device=device,
            dtype=self.dtype,
            quality_head=self.quality_head,
            preprocessing=self.preprocessing,
        )

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights; activations are a few tens of megabytes."""
        from bridges import bundled, loading

        folder = bundled(self.model, "scorer")
        name = self.model if folder is None else f"local-dir:{folder}"
        count = PUBLISHED.get(name.replace("/", "-")) or loading.clip_size(name)
        return [("CLIP", count * loading.ITEM_BYTES[self.dtype], self.dtype), ("scoring", 2**28, "allowance")]
