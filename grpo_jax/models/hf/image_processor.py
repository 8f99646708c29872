"""Preparation of pictures by a folder's settings and Hugging Face image processor. No code of a folder is run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic.dataclasses import dataclass

from grpo_jax.errors import UserError
from grpo_jax.models import hf_config
from grpo_jax.models.hf.weights import read_json_file
from grpo_jax.models.hf_config import STRICT, Positions, Positive, Side, as_user_error, failures_named
from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Picture

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of settings: under "image_processor" of the first (transformers 5), or alone in the second."""
TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
EDGES = {"qwen2_vl": 448, "qwen2_5_vl": 448, "qwen3_vl": 512}
"""Pixels along the sides of a picture by default: 256 tokens, and whole windows."""
LONGEST_SHAPE = 200  # the largest ratio of sides that the processor takes
_SETTINGS = {"patch_size": "patch", "merge_size": "merge", "temporal_patch_size": "frames"}
_SETTINGS |= {"rescale_factor": "rescale", "resample": "resample", "image_mean": "mean", "image_std": "deviation"}
"""Fields of `PictureSettings`, by their names in a folder."""


@dataclass(frozen=True, config=STRICT)
class PictureSettings:
    """Settings of a folder's image processor."""

    patch: Side = 14  # pixels along a patch's side
    merge: Side = 2  # patches along the side of a merged token
    frames: Side = 2  # repetitions of a still picture in a patch (temporal_patch_size)
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)  # per channel, subtracted after rescaling
    deviation: tuple[Positive, Positive, Positive] = (0.26862954, 0.26130258, 0.27577711)  # per channel, the divisor
    rescale: Positive = 1 / 255  # factor of a pixel's value in [0, 255]
    resample: Literal[2, 3] = 3  # Pillow's number of the filter: 2 bilinear, 3 bicubic
    least: Positions = 56 * 56  # min_pixels of a prepared picture
    most: Positions = 28 * 28 * 1280  # max_pixels of one
    edge: int = 0  # side in pixels of every prepared picture, a square; 0 keeps each picture's shape

    @property
    def step(self) -> int:
        """Return the side of a merged token in pixels; a prepared picture's sides are multiples of it."""
        return self.patch * self.merge

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a prepared picture in pixels: `edge`, or those of the processor's `smart_resize`.

        ValueError if the picture's aspect ratio exceeds the processor's limit.
        """
        if min(height, width) < 1 or max(height, width) > LONGEST_SHAPE * min(height, width):
            limit = f"a side may be at most {LONGEST_SHAPE} times as long as the other"
            raise ValueError(f"it is {width} x {height} pixels: {limit}")
        if self.edge:
            return self.edge, self.edge
        step, rows, columns = self.step, round(height / self.step), round(width / self.step)
        if rows * columns * step**2 > self.most:
            scale = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(side / scale / step)) for side in (height, width))
        elif rows * columns * step**2 < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(side * scale / step) for side in (height, width))
        return rows * step, columns * step

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of patches for a picture of this size; raises as `fitted`."""
        fitted = self.fitted(height, width)
        return fitted[0] // self.patch, fitted[1] // self.patch


def read_settings(folder: Path, vision: VisionConfig, size: int | None = None) -> PictureSettings:
    """Read the settings of a local folder; patches must suit the tower of `vision`.

    `size` is the `edge`: 0 keeps each picture's shape; None takes the architecture's, within the folder's limits.
    UserError if settings are missing, belong to another processor, or do not suit the size.
    """
    path, fields = _fields(folder)
    with as_user_error(str(path), ValueError, TypeError, AttributeError):
        settings = _settings(fields)
        for name in ("patch_size", "merge_size", "temporal_patch_size"):
            mine, its = (getattr(part, _SETTINGS[name]) for part in (settings, vision))
            hf_config.expect(mine == its, name, f"{its}, as the tower takes it (config.json, vision_config)", mine)
    edge = _default_edge(settings, EDGES[vision.model_type]) if size is None else size
    step, expected = settings.step, ""
    if edge % step:
        expected = f"a multiple of {step}, the pixels of a token (such as {max(1, round(edge / step)) * step})"
    elif edge and not settings.least <= edge**2 <= settings.most:
        expected = f"a side of {settings.least} to {settings.most} pixels in all, as the policy's folder has it"
    if expected:
        raise UserError(f"data.picture_size: expected {expected}, got {edge}")
    return dataclasses.replace(settings, edge=edge)


def most_patches(folder: Path, vision: VisionConfig, size: int | None = None) -> int:
    """Return the maximum patches of a prepared picture; for an incomplete folder, by its model type."""
    if any((folder / name).is_file() for name in FILES):
        settings = read_settings(folder, vision, size)
    else:
        edge = EDGES[vision.model_type] if size is None else size
        settings = PictureSettings(vision.patch, vision.merge, edge=edge)
    if not settings.edge:
        return settings.most // settings.patch**2
    rows, columns = settings.grid(settings.edge, settings.edge)
    return rows * columns


def _fields(folder: Path) -> tuple[Path, hf_config.ConfigJson]:
    for name in FILES:
        path = folder / name
        content = read_json_file(path) if path.is_file() else {}
        if name == FILES[0]:
            content = content.get("image_processor") or {}
        if isinstance(content, Mapping) and content:
            return path, content
    reason = "does not say how pictures are prepared: copy the model's preprocessor_config.json into it"
    raise UserError(f"{folder} {reason}")


def _settings(fields: hf_config.ConfigJson) -> PictureSettings:
    kind = fields.get("image_processor_type")
    hf_config.expect(kind is None or kind in TYPES, "image_processor_type", f"one of {', '.join(TYPES)}", kind)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        hf_config.expect(fields.get(name) is not False, name, "true, as pictures are prepared here", False)
    size = fields.get("size") or {}
    least = fields.get("min_pixels") or size.get("shortest_edge") or PictureSettings.least
    most = fields.get("max_pixels") or size.get("longest_edge") or PictureSettings.most
    hf_config.expect(least <= most, "min_pixels", f"at most max_pixels={most}", least)
    others = {ours: fields[name] for name, ours in _SETTINGS.items() if fields.get(name)}
    others = {name: tuple(map(float, x)) if isinstance(x, list | tuple) else x for name, x in others.items()}
    return PictureSettings(**others, least=least, most=most)


def _default_edge(settings: PictureSettings, usual: int) -> int:
    """Return the architecture's edge, adjusted to the folder's limits on pixels."""
    step = settings.step
    largest = max(1, math.isqrt(settings.most) // step) * step
    smallest = -(-math.isqrt(max(settings.least - 1, 0)) // step) * step
    return min(max(usual // step * step, smallest, step), largest)


def make_preparer(folder: Path, settings: PictureSettings) -> Callable[[Sequence[Image]], list[Picture]]:
    """Make prepare(PIL images, RGB) → patches and grid of each, by the folder's own image processor.

    It uses torchvision if installed, else Pillow; they differ in the last bits.
    """
    from transformers import AutoImageProcessor  # its own class for the folder's processor, never one of the folder

    with failures_named(f"cannot load the image processor of {folder}"):
        processor = AutoImageProcessor.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    torch_based = "Fast" in type(processor).__name__ or getattr(processor, "backend", "") == "torchvision"
    limits = {"shortest_edge": settings.least, "longest_edge": settings.most}

    def sized(picture: Image) -> Image | torch.Tensor:
        if not settings.edge:
            return picture
        side = (settings.edge, settings.edge)
        if not torch_based:
            return picture.resize(side, resample=settings.resample)
        import torch
        from torchvision.transforms.v2 import InterpolationMode
        from torchvision.transforms.v2 import functional as transforms

        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
        mode = {2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}[settings.resample]
        return transforms.resize(pixels, list(side), interpolation=mode, antialias=True)

    def prepare(pictures: Sequence[Image]) -> list[Picture]:
        if not pictures:
            return []
        form = "pt" if torch_based else "np"
        made = processor(images=[sized(picture) for picture in pictures], size=limits, return_tensors=form)
        values = np.asarray(made["pixel_values"], np.float32)
        grids = [(int(rows), int(columns)) for _, rows, columns in np.asarray(made["image_grid_thw"])]
        ends = np.cumsum([rows * columns for rows, columns in grids])
        return [Picture(*parts) for parts in zip(np.split(values, ends[:-1]), grids, strict=True)]

    return prepare
