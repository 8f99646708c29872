"""Features of pictures by DINOv2 (Oquab et al. 2023, arXiv:2304.07193) or another vision model of transformers."""

from __future__ import annotations

from typing import Any

import torch

from bridges.clip import ImageEncoder, Preprocess, Preprocessing
from bridges.loading import load_image_processor, load_part, load_settings, torch_device, torch_dtype
from grpo_jax.errors import UserError


def load_dino(
    path: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    batch_size: int = 32,
    preprocessing: Preprocessing = "library",
) -> ImageEncoder:
    """Load a vision model whose first state, the class token's, stands for the picture.

    Only safetensors are read, and no code that comes with the weights is run.

    Args:
        path: A folder or an id on the hub.
        device: "cpu" or "gpu:N".
        dtype: "float32", "float16" or "bfloat16".
        batch_size: Pictures encoded at once; smaller batches are padded to it.
        preprocessing: What resizes pictures of another size: "library" is the folder's image processor.

    Raises:
        UserError: There is no such model, it is no vision model, or its weights are missing or broken.
    """
    from transformers import AutoModel

    target, torch_type = torch_device(device), torch_dtype(dtype)
    model = load_part(AutoModel, path, dtype=torch_type, use_safetensors=True)
    preprocess = _preprocess(path, model.config)
    if preprocessing == "library":
        shortest = {"shortest_edge": preprocess.size[0]}
        preprocess = preprocess._replace(library=load_image_processor(path, size=shortest))
    model = model.to(target).eval().requires_grad_(False)
    return ImageEncoder(
        lambda pixels: model(pixel_values=pixels).last_hidden_state[:, 0],
        preprocess,
        name=path,
        kind=type(model).__name__,
        device=target,
        dtype=torch_type,
        batch_size=batch_size,
        width=model.config.hidden_size,
    )


def _preprocess(path: str, config: Any) -> Preprocess:
    """What preprocessor_config.json says, but for the margin that it would cut off: all of a picture counts."""
    if not hasattr(config, "patch_size") or not hasattr(config, "image_size"):
        raise UserError(f"{path}: expected a vision model (DINOv2 or another with image_size and patch_size)")
    settings = load_settings(path)
    crop = settings.get("crop_size") or settings.get("size") or {}
    size = crop.get("height", crop.get("shortest_edge")) if isinstance(crop, dict) else crop
    size = size or config.image_size
    return Preprocess((size, size), tuple(settings["image_mean"]), tuple(settings["image_std"]))
