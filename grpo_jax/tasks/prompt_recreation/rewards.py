"""Rewards of prompt recreation: how alike the picture that was drawn and the one that was shown are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from grpo_jax.rollout.inputs.pictures import read_rgb
from grpo_jax.tasks.picture_rewards import REWARDS as SHARED


class Comparer(Protocol):
    """A judge of two pictures, such as CLIP or DINO."""

    def image_image(self, a: Any, b: Sequence[Any]) -> Any:
        """How alike the pictures of each pair are, [B]; the second are torch tensors [3, H, W] of any sizes."""


def similarity(
    prompts: list[str], completions: list[str], *, images: Any, target: list[Any], scorer: Comparer, **columns: Any
) -> Any:
    """How alike the drawn picture and the row's own are to the scorer: a cosine in [-1, 1]."""
    return scorer.image_image(images, tensors_of(target))


def tensors_of(sources: Sequence[Any]) -> list[Any]:
    """Pictures of rows as torch float [3, H, W] in [0, 1]; one that is repeated is the same tensor."""
    import torch

    read: dict[int, Any] = {}
    for source in sources:
        if id(source) not in read:
            array = np.asarray(read_rgb(source), np.float32) / 255
            read[id(source)] = torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1)))
    return [read[id(source)] for source in sources]


REWARDS = {"similarity": similarity, **{name: SHARED[name] for name in ("length", "quality", "pixel_accuracy")}}
"""By the name that a config uses."""
