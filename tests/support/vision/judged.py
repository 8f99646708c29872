"""Pictures for judges: floats from 0 to 1 in 256 steps, equal to 8-bit images."""

import torch
from PIL import Image
from torch.nn import functional


def noise(count: int) -> torch.Tensor:
    return torch.rand((count, 3, 24, 32), generator=torch.Generator().manual_seed(0)).mul(255).round() / 255


def smooth(count: int, height: int = 24, width: int = 24) -> torch.Tensor:
    coarse = torch.rand((count, 3, 6, 6), generator=torch.Generator().manual_seed(0))
    return (functional.interpolate(coarse, (height, width), mode="bilinear") * 255).round() / 255


def pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
