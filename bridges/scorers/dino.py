"""DINOv2 (Oquab et al. 2023, arXiv:2304.07193) through transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from grpo_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from bridges.clip import ImageEncoder, Preprocess

PUBLISHED: dict[str, int] = {
    "facebook/dinov2-small": 22_056_576,
    "facebook/dinov2-base": 86_580_480,
    "facebook/dinov2-large": 304_368_640,
}
"""Parameters of models on the hub."""


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
        """Refuse a folder that is not there; no weight is read."""
        from bridges.loading import local_folder

        local_folder(self.model)

    def load(self, device: str) -> ImageEncoder:
        """Load the model on "cpu" or "gpu:N"; the feature of a picture is the first state, the class token's.

        Only safetensors are read, and no code that comes with the weights is run.

        Raises:
            UserError: No such model, no vision model, or missing or broken weights.
        """
        from transformers import AutoModel

        from bridges.clip import ImageEncoder
        from bridges.loading import load_image_processor, load_part, torch_device, torch_dtype

        target, dtype = torch_device(device), torch_dtype(self.dtype)
        model = load_part(AutoModel, self.model, dtype=dtype, use_safetensors=True)
        preprocess = self._preprocess(model.config)
        if self.preprocessing == "library":
            shortest = {"shortest_edge": preprocess.size[0]}
            preprocess = preprocess._replace(library=load_image_processor(self.model, size=shortest))
        model = model.to(target).eval().requires_grad_(False)
        return ImageEncoder(
            lambda pixels: model(pixel_values=pixels).last_hidden_state[:, 0],
            preprocess,
            name=self.model,
            kind=type(model).__name__,
            device=target,
            dtype=dtype,
            batch_size=32,
            width=model.config.hidden_size,
        )

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights; activations are a few tens of megabytes."""
        from bridges import loading

        count = PUBLISHED.get(self.model) or loading.model_size(self.model)
        return [("DINO", count * loading.ITEM_BYTES[self.dtype], self.dtype), ("scoring", 2**28, "allowance")]

    def _preprocess(self, config: PretrainedConfig) -> Preprocess:
        """The transform of preprocessor_config.json, without its crop of the margin: all of a picture counts."""
        from bridges.clip import Preprocess, resize_and_crop
        from bridges.loading import load_settings

        if not hasattr(config, "patch_size") or not hasattr(config, "image_size"):
            raise UserError(f"{self.model}: expected a vision model (DINOv2 or another with image_size and patch_size)")
        settings = load_settings(self.model)
        crop = settings.get("crop_size") or settings.get("size") or {}
        size = crop.get("height", crop.get("shortest_edge")) if isinstance(crop, dict) else crop
        size = size or config.image_size
        return Preprocess(
            (size, size), tuple(settings["image_mean"]), tuple(settings["image_std"]), resize_and_crop(size)
        )
