"""CLIP (Radford et al. 2021, arXiv:2103.00020) through open_clip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_jax.config.judge import Judge
from grpo_jax.errors import UserError

if TYPE_CHECKING:
    import torch

    from bridges.clip import Preprocess, Scorer

PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

PUBLISHED: dict[str, int] = {"ViT-B-32": 151_277_313, "ViT-L-14": 427_616_513}
"""Parameters of open_clip's models."""


class OpenClip(Judge):
    """Judges pictures and texts by their similarity in CLIP's space."""

    model: str = "miniature"
    """Open_clip model name, a local folder, or "miniature"."""
    pretrained: str | None = None
    """Tag of the weights for a model name, such as laion2b_s34b_b79k."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of its weights."""
    quality_head: str | None = None
    """Safetensors file of an aesthetic head on the picture features, for the quality reward."""
    preprocessing: Literal["library", "tensor"] = "library"
    """How pictures of another size are resized: "library", by open_clip's transform from 8 bits, or "tensor", as floats
    on the device, which is faster and differs a little."""

    def check(self) -> None:
        """Refuse a model that is not there; no weight is read."""
        self._open_clip_name()

    def load(self, device: str) -> Scorer:
        """Load the model on "cpu" or "gpu:N".

        Raises:
            UserError: The model is unknown, or its weights or the head's are missing, broken, or no safetensors.
        """
        import open_clip

        from bridges.clip import Scorer, load_quality_head
        from bridges.loading import first_line, quiet_loading, torch_device, torch_dtype

        target = torch_device(device)
        dtype = torch_dtype(self.dtype)
        name = self._open_clip_name()
        with quiet_loading():
            tag = open_clip.get_pretrained_cfg(name, self.pretrained) if self.pretrained else {}
            try:
                model = open_clip.create_model(
                    name,
                    pretrained=self.pretrained,
                    precision=PRECISIONS[self.dtype],
                    device=target,
                    # some published weights want the other GELU: open_clip only warns, and scores suffer
                    force_quick_gelu=bool(tag.get("quick_gelu")),
                    require_pretrained=True,
                    weights_only=True,  # published weights that are no safetensors: tensors, and no objects
                )
                tokenizer = open_clip.get_tokenizer(name)
            except Exception as error:
                where = f"{name} ({self.pretrained})" if self.pretrained else name
                raise UserError(f"cannot load the scorer {where}: {first_line(error)}") from error
        model.eval().requires_grad_(False)
        preprocess = self._preprocess(model.visual.preprocess_cfg)
        scorer = Scorer(model, tokenizer, preprocess, name=self.model, device=target, dtype=dtype, batch_size=32)
        if self.quality_head is not None:
            scorer.quality_head = load_quality_head(self.quality_head, scorer.width)
        return scorer

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights; activations are a few tens of megabytes."""
        from bridges import bundled, loading

        folder = bundled(self.model, "scorer")
        name = self.model if folder is None else f"local-dir:{folder}"
        count = PUBLISHED.get(name.replace("/", "-")) or loading.clip_size(name)
        return [("CLIP", count * loading.ITEM_BYTES[self.dtype], self.dtype), ("scoring", 2**28, "allowance")]

    def _preprocess(self, settings: dict) -> Preprocess:
        from open_clip.transform import PreprocessCfg, image_transform_v2

        from bridges.clip import Preprocess

        size = settings["size"]
        as_floats = settings | {"fill_color": settings["fill_color"] / 255}
        *geometry, _ = image_transform_v2(PreprocessCfg(**as_floats), is_train=False).transforms
        by_open_clip = image_transform_v2(PreprocessCfg(**settings), is_train=False)
        return Preprocess(
            size=(size, size) if isinstance(size, int) else tuple(size),
            mean=tuple(settings["mean"]),
            std=tuple(settings["std"]),
            resize=functools.partial(_resize, geometry),
            library=by_open_clip if self.preprocessing == "library" else None,
        )

    def _open_clip_name(self) -> str:
        """The name for open_clip, after checks that it leaves to a log line or a traceback; no weight is read."""
        import open_clip

        from bridges import bundled
        from bridges.loading import local_folder

        shipped = bundled(self.model, "scorer")
        model = self.model if shipped is None else f"local-dir:{shipped}"
        if model.startswith("hf-hub:"):
            return model
        if model.replace("/", "-") in open_clip.list_models():  # "ViT-B/32" is how the papers write it
            model = model.replace("/", "-")
            self._check_weights(model)
            return model
        if model.startswith("local-dir:") or "/" in model or Path(model).is_dir():
            folder = local_folder(model.removeprefix("local-dir:"))
            if folder is None:
                raise UserError(f"scorer {model}: no such folder (a model of the hub is written hf-hub:{model})")
            if not (folder / "open_clip_config.json").is_file():
                raise UserError(f"scorer {folder}: it holds no open_clip_config.json")
            if not any(folder.glob("*.safetensors")):
                raise UserError(f"scorer {folder}: it holds no safetensors file with weights")
            return f"local-dir:{folder}"
        raise UserError(f"scorer {model}: neither a folder nor a model that open_clip knows (open_clip.list_models())")

    def _check_weights(self, model: str) -> None:
        import open_clip

        pretrained = self.pretrained
        tags = open_clip.list_pretrained_tags_by_model(model)
        if pretrained is None:
            raise UserError(
                f"scorer {model}: say which weights in judges.scorer.pretrained; open_clip has {', '.join(tags)}"
            )
        if pretrained not in tags and not (Path(pretrained).is_file() and pretrained.endswith(".safetensors")):
            raise UserError(
                f"scorer {model}: {pretrained!r} is neither a safetensors file nor one of {', '.join(tags)}"
            )


def _resize(geometry: Sequence[Callable], images: torch.Tensor) -> torch.Tensor:
    """Take pictures [B, 3, H, W] through open_clip's transforms of Pillow pictures, which take tensors, but for one."""
    from open_clip.transform import ResizeKeepRatio
    from torchvision.transforms.functional import resize

    for transform in geometry:
        if isinstance(transform, ResizeKeepRatio):
            ratios = [have / want for have, want in zip(images.shape[-2:], transform.size, strict=True)]
            ratio = max(ratios) if transform.longest else min(ratios)
            images = resize(images, [round(have / ratio) for have in images.shape[-2:]], transform.interpolation)
        else:
            images = transform(images)
    return images
