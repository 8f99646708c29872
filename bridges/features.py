"""Features of pictures that differ in size, or stand in a list more than once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
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


def features_of_distinct(
    images: torch.Tensor, encode: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
) -> torch.Tensor:
    """Features of pictures [B, 3, H, W], of which equal ones are encoded once where they lie on the host.

    A policy that has learned writes the same text often, and a text's picture is the same for a seed.

    Args:
        images: Float, at least one.
        encode: Pictures [n, 3, H, W] and where each stands in `images` → [n, width].

    Returns:
        float32 [B, width].
    """
    if images.device.type != "cpu":
        return encode(images, range(len(images)))
    pictures = images.detach().contiguous().view(torch.uint8).flatten(1).numpy()
    names = [hashlib.blake2b(picture).digest() for picture in pictures]
    _, first, places = np.unique(names, return_index=True, return_inverse=True)
    return encode(images[first], first)[places]
