"""Features of pictures that differ in size, or stand in a list more than once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def features_of(
    images: torch.Tensor | Sequence[torch.Tensor], encode: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Features of pictures, each of which is encoded once.

    Args:
        images: Float [B, 3, H, W], or B pictures [3, H, W] of any sizes.
        encode: Pictures of one size [n, 3, H, W] → [n, width].

    Returns:
        float32 [B, width].
    """
    if isinstance(images, torch.Tensor) or not len(images):
        return encode(images if isinstance(images, torch.Tensor) else torch.zeros((0, 3, 1, 1)))
    different = {id(image): image for image in images}
    shapes: dict[tuple[int, ...], list[int]] = {}
    for key, image in different.items():
        shapes.setdefault(tuple(image.shape), []).append(key)
    found = {}
    for keys in shapes.values():
        found |= dict(zip(keys, encode(torch.stack([different[key] for key in keys])), strict=True))
    return torch.stack([found[id(image)] for image in images])
