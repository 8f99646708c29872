"""Preprocessing of torch pictures for a vision-language policy, on their device.

On one device the arithmetic is bit-equal to transformers' torchvision processors of Qwen-VL folders; those on Pillow
differ in the last bits. A picture is first converted to 8 bits, as in a file. The policy thus sees a rendered picture
exactly as if read from a PNG.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

MARGIN = 0.25  # tolerated excess of floats beyond [0, 1], as for pictures of the data


class Settings(Protocol):
    """The used fields of `grpo_jax.models.hf.image_processor.PictureSettings`."""

    patch: int
    merge: int
    frames: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    rescale: float
    resample: int

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the prepared picture."""


def patches_of(images: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return a vision tower's patches of pictures of one size, given as for `to_eight_bits`.

    Patches are f32 [N, S, C] on the same device in the processor's order, with the grid: rows and columns of patches.
    ValueError also if the aspect ratio exceeds the processor's limit.
    """
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as transforms

    size = list(settings.fitted(*images.shape[-2:]))
    mode = {2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}[settings.resample]
    images = transforms.resize(to_eight_bits(images), size, interpolation=mode, antialias=True).to(torch.float32)
    mean, deviation = (  # scaled to 255, which saves a multiplication
        (torch.tensor(values, device=images.device) * (1.0 / settings.rescale)).view(-1, 1, 1)
        for values in (settings.mean, settings.deviation)
    )
    images = images.sub_(mean).div_(deviation)
    # Patches are ordered by merged block; a still picture fills all frames of a patch.
    patch, merge, frames = settings.patch, settings.merge, settings.frames
    count, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    blocks = images.view(count, channels, rows // merge, merge, patch, columns // merge, merge, patch)
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, frames, -1, -1)
    return blocks.reshape(count, rows * columns, channels * frames * patch * patch), (rows, columns)


def to_eight_bits(images: torch.Tensor) -> torch.Tensor:
    """Convert pictures, float [N, 3, H, W] in [0, 1] or uint8, as in a file: to uint8 [N, 3, H, W] on the same device.

    An excess of less than `MARGIN` is clipped; ValueError for more.
    """
    if images.dtype == torch.uint8:
        return images
    images = images.detach().float()
    lowest, highest = torch.stack(images.aminmax()).tolist()
    if not (lowest >= -MARGIN and highest <= 1 + MARGIN):  # NaN fails both
        raise ValueError(f"images: expected floats in [0, 1] or uint8, got floats from {lowest:.4g} to {highest:.4g}")
    return images.clamp(0, 1).mul(255).round().to(torch.uint8)


def to_pillow(images: torch.Tensor) -> list[Image]:
    """Convert pictures [N, 3, H, W] to PIL images; raises as `to_eight_bits`."""
    from PIL import Image

    return [Image.fromarray(one) for one in to_eight_bits(images).permute(0, 2, 3, 1).cpu().numpy()]
