"""`CLIPModel` folders of transformers, PickScore among them, as the scorers that `bridges.clip` has of open_clip."""

from __future__ import annotations

from typing import Any

import torch

from bridges.clip import Preprocess, Preprocessing, Scorer, load_quality_head
from bridges.loading import (
    first_line,
    load_complete,
    load_config,
    load_image_processor,
    load_part,
    load_settings,
    local_folder,
    torch_device,
)
from bridges.loading import torch_dtype as dtype_of
from grpo_jax.errors import UserError

BICUBIC, BILINEAR = 3, 2  # Pillow's numbers


class _Towers:
    """A `CLIPModel` with open_clip's names."""

    def __init__(self, model: Any):
        self.model = model

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, H, W] → features [B, width]."""
        return _features(self.model.get_image_features(pixel_values=pixels))

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [B, window] → features [B, width]; what stands behind a text's end is not seen from there."""
        return _features(self.model.get_text_features(input_ids=tokens))


def _features(found: Any) -> torch.Tensor:
    return getattr(found, "pooler_output", found)  # transformers before 5 gave the tensor alone


class _Tokens:
    """A folder's tokenizer, for texts that fill the window of the text tower."""

    def __init__(self, tokenizer: Any, window: int):
        self._tokenizer, self.context_length = tokenizer, window

    def __call__(self, texts: list[str]) -> torch.Tensor:
        """Texts → tokens [B, window], cut off or padded."""
        options = {"padding": "max_length", "truncation": True, "max_length": self.context_length}
        return self._tokenizer(texts, **options, return_tensors="pt").input_ids

    def encode(self, text: str) -> list[int]:
        """All of a text's tokens, without start and end."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def check_clip_model(path: str) -> None:
    """Refuses a folder of another kind; of a model on the hub nothing is read.

    Raises:
        UserError: Saying what it is.
    """
    if local_folder(path) is not None:
        _require_clip(path)


def load_clip_model(
    path: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    batch_size: int = 32,
    quality_head: str | None = None,
    preprocessing: Preprocessing = "library",
) -> Scorer:
    """Loads a `CLIPModel` with its tokenizer and what its preprocessor does.

    Args:
        path: Folder, or id on the hub.
        device: "cpu" or "gpu:N".
        dtype: "float32", "float16" or "bfloat16".
        batch_size: Pictures or texts encoded at once; smaller batches are padded to it.
        quality_head: A head for `Scorer.quality` (`bridges.clip.load_quality_head`), or None.
        preprocessing: What resizes pictures of another size: "library" is the folder's image processor.

    Raises:
        UserError: It is no such model, or a file of it is missing or broken.
    """
    from transformers import AutoTokenizer, CLIPModel

    config, target = _require_clip(path), torch_device(device)
    tokenizer = load_part(AutoTokenizer, path, "tokenizer")
    highest, size = max(tokenizer.get_vocab().values(), default=0), config.text_config.vocab_size
    if highest >= size:
        raise UserError(
            f"{path}: its tokenizer has a token {highest}, its model {size} tokens: they do not belong together; "
            "download the folder again"
        )
    preprocess = _preprocess(path)
    if preprocessing == "library":
        preprocess = preprocess._replace(library=load_image_processor(path))
    model = load_complete(CLIPModel, path, dtype=dtype).to(target)
    scorer = Scorer(
        _Towers(model),
        _Tokens(tokenizer, config.text_config.max_position_embeddings),
        preprocess,
        name=path,
        device=target,
        dtype=dtype_of(dtype),
        batch_size=batch_size,
        cache_size=4096,
    )
    if quality_head is not None:
        scorer.quality_head = load_quality_head(quality_head, scorer.width)
    return scorer


def _require_clip(path: str) -> Any:
    config = load_config(path)
    if config.model_type != "clip":
        raise UserError(f"{path}: expected a CLIPModel of transformers, it is a {config.model_type} model")
    return config


def _preprocess(path: str) -> Preprocess:
    """What preprocessor_config.json says."""
    settings = load_settings(path)
    try:
        size, crop = settings.get("size", 224), settings.get("crop_size", 224)
        shortest = size.get("shortest_edge") if isinstance(size, dict) else size
        height, width = (crop["height"], crop["width"]) if isinstance(crop, dict) else (crop, crop)
        filters = {BICUBIC: "bicubic", BILINEAR: "bilinear"}
        mean, deviation = (tuple(map(float, settings[name])) for name in ("image_mean", "image_std"))
        interpolation = filters[settings.get("resample", BICUBIC)]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read preprocessor_config.json of {path}: {first_line(error)}") from error
    if not shortest == height == width:
        raise UserError(f"{path}: expected pictures resized and cropped to one edge, got {size} and {crop}")
    return Preprocess((height, width), mean, deviation, interpolation)
