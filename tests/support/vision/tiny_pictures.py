"""Tiny towers of each architecture with transformers' weights, and pictures of several sizes for them."""

from typing import Any, NamedTuple

import numpy as np
import torch
from support import torch_reference as reference
from support.folders import load_folder

from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Picture, Pictures, pack_pictures, pack_rows

ARCHITECTURES = tuple(reference.VISION)
# Rows with two pictures, one that is long, none, and three: whole windows, half windows, a single merged token.
GRIDS = (((6, 10), (4, 4)), ((2, 14),), (), ((8, 8), (10, 6), (2, 2)))


class Seeing(NamedTuple):
    """An architecture's random model.

    Attributes:
        torch: transformers'.
        loaded: its folder as we read it, tower included.
    """

    torch: Any
    loaded: Any

    @property
    def config(self) -> VisionConfig:
        """The tower's."""
        return self.loaded.config.vision

    @property
    def variables(self) -> dict[str, Any]:
        """Of the frozen tower."""
        return {"params": self.loaded.params, "visual": self.loaded.visual}


def seeing(folder, architecture: str, **overrides) -> Seeing:
    """An architecture's random model, and its folder read."""
    model = reference.model(architecture, **overrides)
    model.save_pretrained(folder)
    return Seeing(model, load_folder(folder, tokenizer=False, vision=True))


def draw(config: VisionConfig, grids=GRIDS, seed: int = 0) -> list[list[Picture]]:
    """Rows of random pictures."""
    rng = np.random.default_rng(seed)

    def picture(grid):
        return Picture(rng.standard_normal((grid[0] * grid[1], config.pixels)).astype(np.float32), grid)

    return [[picture(grid) for grid in row] for row in grids]


def packed(rows, config: VisionConfig, **shape) -> Pictures:
    """The rows in one array."""
    return pack_pictures(rows, config, **shape) if shape else pack_rows(rows, config)


def torch_states(model, rows) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """What transformers' tower makes of all rows' pictures, one after the other; and of deepstack, by layer."""
    everything = [picture for row in rows for picture in row]
    patches = torch.tensor(np.concatenate([picture.patches for picture in everything]))
    grids = torch.tensor([[1, *picture.grid] for picture in everything])
    seen = model.model.get_image_features(patches, grids, return_dict=True)
    lengths = (grids.prod(-1) // 4).tolist()  # some versions of transformers return pictures joined, some apart
    layers = (seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ()))
    states, *deepstack = (list(one.split(lengths) if torch.is_tensor(one) else one) for one in layers)
    return states, deepstack


def flat_states(states, rows, merged: int = 4) -> list:
    """Our states [P, I, M, D] of the pictures that there are, one after the other, each [its own tokens, D]."""
    return [
        states[i, j, : len(picture.patches) // merged] for i, row in enumerate(rows) for j, picture in enumerate(row)
    ]
