"""Pictures that were drawn in torch, prepared for a policy that sees on the device where they are.

The arithmetic is that of the processors of Qwen-VL folders as transformers has them on torchvision, to the last bit on
one device (those on Pillow differ in the last bits). A picture becomes 8-bit first, as a file holds it: seen right
after it was drawn or read from a PNG, it is the same picture.
"""

from typing import Protocol

import torch


class Settings(Protocol):
    """What is read of `grpo_jax.models.hf.processor.PictureSettings`."""

    patch: int
    merge: int
    frames: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    rescale: float
    resample: int

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the prepared picture."""
        ...


def patches_of(images: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, tuple[int, int]]:
    """Pictures of one size as a tower takes them.

    Args:
        images: float [N, 3, H, W] in [0, 1] (beyond it they are cut off), or uint8, on any device.
        settings: the folder's.

    Returns:
        Patches f32 [N, S, C] on the same device in the processor's order, and the grid: rows and columns of patches.

    Raises:
        TypeError: they are neither floats nor uint8.
        ValueError: they are of another shape, or longer than the processor takes.
    """
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(f"images: expected [N, 3, H, W], got {list(images.shape)}")
    if images.is_floating_point():
        images = images.detach().float().clamp(0, 1).mul(255).round().to(torch.uint8)
    elif images.dtype != torch.uint8:
        raise TypeError(f"images: expected floats in [0, 1] or uint8, got {images.dtype}")
    return _patched(_normalised(_resized(images, settings), settings), settings)


def _resized(images: torch.Tensor, settings: Settings) -> torch.Tensor:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as transforms

    size = list(settings.fitted(*images.shape[-2:]))
    mode = {2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}[settings.resample]
    return transforms.resize(images, size, interpolation=mode, antialias=True)


def _normalised(images: torch.Tensor, settings: Settings) -> torch.Tensor:
    """One multiplication less: mean and deviation are those of values up to 255."""
    mean, deviation = (
        (torch.tensor(values, device=images.device) * (1.0 / settings.rescale)).view(-1, 1, 1)
        for values in (settings.mean, settings.deviation)
    )
    return images.to(torch.float32).sub_(mean).div_(deviation)


def _patched(images: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, tuple[int, int]]:
    """Merged block after merged block, each patch after patch; a still picture fills all frames of a patch."""
    patch, merge, frames = settings.patch, settings.merge, settings.frames
    count, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    blocks = images.view(count, channels, rows // merge, merge, patch, columns // merge, merge, patch)
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, frames, -1, -1)
    return blocks.reshape(count, rows * columns, channels * frames * patch * patch), (rows, columns)
