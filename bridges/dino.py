"""How alike pictures are by DINOv2 (Oquab et al. 2023, arXiv:2304.07193) or another vision model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from bridges.clip import Preprocess, Preprocessing, ScoreError
from bridges.features import features_of
from bridges.loading import first_line, load_image_processor, local_folder, quiet_loading, torch_device, torch_dtype
from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError


class Likeness:
    """A loaded vision model; make one with `load_likeness`.

    Attributes:
        device: Where it runs, and where its scores are.
        name: As it was asked for.
    """

    def __init__(self, model, preprocess: Preprocess, *, name: str, device, dtype, batch_size: int):
        """Takes the parts as `load_likeness` makes them."""
        self.device, self.name = device, name
        self._model, self._preprocess, self._dtype, self._batch_size = model, preprocess, dtype, batch_size

    @property
    def summary(self) -> str:
        """One line for the opening of a run."""
        return f"{self.name}: {type(self._model).__name__}, on {self.device}"

    def image_features(self, images: torch.Tensor) -> torch.Tensor:
        """Unit features of pictures [B, 3, H, W] in [0, 1]: the class token's, float32 [B, width].

        Raises:
            ScoreError: If a feature is not finite.
        """
        features = []
        with torch.no_grad():
            for batch in images.split(self._batch_size):
                pixels = self._preprocess(batch.detach().to(self.device, torch.float32)).to(self._dtype)
                padding = pixels[-1:].expand(self._batch_size - len(pixels), *pixels.shape[1:])
                states = self._model(pixel_values=torch.cat([pixels, padding])).last_hidden_state
                features.append(functional.normalize(states[: len(pixels), 0].float(), dim=-1))
        found = torch.cat(features) if features else torch.zeros((0, self._model.config.hidden_size))
        if not torch.isfinite(found).all():
            raise ScoreError(f"{self.name}: the features of a picture are not finite")
        return found

    def image_image(self, a: torch.Tensor | Sequence[torch.Tensor], b: torch.Tensor | Sequence[torch.Tensor]):
        """Cosine similarity of the pictures of each pair, [B, 3, H, W] or B of any sizes; float32 [B]."""
        if len(a) != len(b):
            raise ValueError(f"b: expected one picture for each of {len(a)}, got {len(b)}")
        return (features_of(a, self.image_features) * features_of(b, self.image_features)).sum(-1)


def load_likeness(
    path: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    batch_size: int = 32,
    preprocessing: Preprocessing = "library",
) -> Likeness:
    """Loads a vision model whose first state stands for the picture.

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
    folder = local_folder(path)
    try:
        with quiet_loading():
            model = AutoModel.from_pretrained(folder or path, dtype=torch_type, use_safetensors=True)
            preprocess = _preprocess(folder or path, model.config)
        if preprocessing == "library":
            shortest = {"shortest_edge": preprocess.size[0]}
            preprocess = preprocess._replace(library=load_image_processor(path, size=shortest))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"cannot load {path}: {first_line(error)}") from error
    return Likeness(
        model.to(target).eval().requires_grad_(False),
        preprocess,
        name=path,
        device=target,
        dtype=torch_type,
        batch_size=batch_size,
    )


def _preprocess(source: str | Path, config) -> Preprocess:
    """What preprocessor_config.json says, but for the margin that it would cut off: all of a picture counts."""
    if not hasattr(config, "patch_size") or not hasattr(config, "image_size"):
        raise UserError(f"{source}: expected a vision model (DINOv2 or another with image_size and patch_size)")
    if isinstance(source, Path):
        path = source / "preprocessor_config.json"
    else:
        from transformers.utils import cached_file

        path = Path(str(cached_file(source, "preprocessor_config.json")))
    settings = load_json(path)
    crop = settings.get("crop_size") or settings.get("size") or {}
    size = crop.get("height", crop.get("shortest_edge")) if isinstance(crop, dict) else crop
    size = size or config.image_size
    return Preprocess((size, size), tuple(settings["image_mean"]), tuple(settings["image_std"]))
