"""Scores of pictures and texts by CLIP (Radford et al. 2021, arXiv:2103.00020).

All batches have one fixed shape, so the last bits of a score do not depend on the other inputs of a call. A resumed run
thus gets the scores of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional

from bridges.loading import side_by_side
from bridges.pixels import to_pillow

if TYPE_CHECKING:
    from PIL.Image import Image


class Preprocess(NamedTuple):
    """The evaluation transform of a vision model.

    A picture of the tower's own size is only normalised; any other goes through the model's own library, with which it
    was trained and published.
    """

    size: int  # height and width of the image tower's inputs
    mean: tuple[float, ...]  # per channel, like `std`
    std: tuple[float, ...]
    library: Callable[[Image], torch.Tensor]  # PIL image → [3, size, size], normalised

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Resize, crop or pad, and normalise float [B, 3, H, W] in [0, 1] to [B, 3, size, size]."""
        if tuple(images.shape[-2:]) != (self.size, self.size):
            return torch.stack([self.library(picture) for picture in to_pillow(images)]).to(images)
        mean = images.new_tensor(self.mean).view(-1, 1, 1)
        return (images - mean) / images.new_tensor(self.std).view(-1, 1, 1)


class Towers(Protocol):
    """A CLIP model with open_clip's interface: inputs [B, …] → features [B, width]."""

    def encode_image(self, image: torch.Tensor, /) -> torch.Tensor:
        """Return the features of pixels."""

    def encode_text(self, text: torch.Tensor, /) -> torch.Tensor:
        """Return the features of tokens."""


_CACHE_SIZE = 4096  # texts


@dataclass(eq=False, repr=False)
class Scorer:
    """A loaded CLIP: unit features of size `width`, in batches of one fixed shape, `workers` at a time."""

    model: Towers
    tokenizer: Callable[[list[str]], torch.Tensor]
    preprocess: Preprocess
    _: KW_ONLY
    name: str
    device: torch.device
    dtype: torch.dtype
    batch_size: int
    workers: int = 1

    def __post_init__(self) -> None:
        """Start with an empty cache of texts."""
        self._texts: OrderedDict[str, torch.Tensor] = OrderedDict()
        self.width = self.text_features([""]).shape[-1]

    def __str__(self) -> str:
        return f"{self.name}: CLIP, features of {self.width}, on {self.device}"

    def image_features(self, images: torch.Tensor) -> torch.Tensor:
        """Return unit features float32 [B, width] of pictures [B, 3, H, W] in [0, 1], on any device.

        Equal pictures on the host are encoded once.
        """
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise ValueError(f"images: expected float [B, 3, H, W], got {images.dtype} {list(images.shape)}")
        if not len(images):
            return torch.zeros((0, self.width), device=self.device)
        if images.device.type != "cpu":
            return self._image_features(images)
        # a trained policy often repeats a text, whose picture is the same for a seed
        pictures = images.detach().contiguous().view(torch.uint8).flatten(1).numpy()
        names = [hashlib.blake2b(picture).digest() for picture in pictures]
        _, first, places = np.unique(names, return_index=True, return_inverse=True)
        return self._image_features(images[first])[places]

    def _image_features(self, images: torch.Tensor) -> torch.Tensor:
        batches = (batch.detach().to(self.device, torch.float32) for batch in images.split(self.batch_size))
        return self._encode(self.model.encode_image, (self.preprocess(batch).to(self.dtype) for batch in batches))

    def text_features(self, texts: list[str]) -> torch.Tensor:
        """Return unit features of texts, float32 [B, width], with a cache."""
        if not texts:
            return torch.zeros((0, self.width), device=self.device)
        features = {text: self._texts[text] for text in texts if text in self._texts}
        missing = [text for text in dict.fromkeys(texts) if text not in features]
        if missing:
            tokens = self.tokenizer(missing).to(self.device).split(self.batch_size)
            features.update(zip(missing, self._encode(self.model.encode_text, tokens), strict=True))
        for text in texts:
            self._texts[text] = features[text]
            self._texts.move_to_end(text)
        while len(self._texts) > _CACHE_SIZE:
            self._texts.popitem(last=False)
        return torch.stack([features[text] for text in texts])

    def image_text(self, images: torch.Tensor, texts: list[str]) -> torch.Tensor:
        """Return the cosine similarity float32 [B] of each picture [B, 3, H, W] and its text."""
        return (self.image_features(images) * self.text_features(texts)).sum(-1)

    def text_text(self, a: list[str], b: list[str]) -> torch.Tensor:
        """Return the cosine similarity float32 [B] of the texts of each pair."""
        return (self.text_features(a) * self.text_features(b)).sum(-1)

    def _encode(self, tower: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return unit features of batches, each padded with copies of its last row to the fixed shape."""

        @torch.no_grad()
        def encode(inputs: torch.Tensor) -> torch.Tensor:
            count = len(inputs)
            padding = inputs[-1:].expand(self.batch_size - count, *inputs.shape[1:])
            return functional.normalize(tower(torch.cat([inputs, padding]))[:count].float(), dim=-1)

        return torch.cat([*side_by_side(encode, batches, self.workers)])
