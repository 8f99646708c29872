"""CLIP (Radford et al. 2021, arXiv:2103.00020) through open_clip."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_jax.config.fields import require
from grpo_jax.config.judge import Judge
from grpo_jax.errors import UserError

if TYPE_CHECKING:
    from bridges.clip import Preprocess, Scorer


class OpenClip(Judge):
    """Score pictures and texts by their similarity in CLIP's space."""

    model: str = "miniature"
    """Open_clip model name, a local folder, or "miniature"."""
    pretrained: str | None = None
    """Weights of a model name: a tag such as laion2b_s34b_b79k, or a safetensors file."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of its weights."""

    def check(self) -> None:
        """Refuse a missing model, without reading weights."""
        self._open_clip_name()

    def load(self, device: str) -> Scorer:
        """Load the model on "cpu" or "gpu:N"; UserError if it is unknown, or weights are missing or not safetensors."""
        import open_clip

        from bridges.clip import Scorer
        from bridges.loading import DTYPES, choose_workers, loading, torch_device

        target = torch_device(device)
        name = self._open_clip_name()
        with loading(f"the scorer {name} ({self.pretrained})" if self.pretrained else f"the scorer {name}"):
            tag = open_clip.get_pretrained_cfg(name, self.pretrained) if self.pretrained else {}
            model = open_clip.create_model(
                name,
                pretrained=self.pretrained,
                precision={"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[self.dtype],
                device=target,
                # some published weights need the other GELU: open_clip only warns, and scores suffer
                force_quick_gelu=bool(tag.get("quick_gelu")),
                require_pretrained=True,
                weights_only=True,  # published weights that are not safetensors: load only tensors, no objects
            )
            tokenizer = open_clip.get_tokenizer(name)
        model.eval().requires_grad_(False)
        preprocess = self._preprocess(model.visual.preprocess_cfg)
        options = {"dtype": DTYPES[self.dtype], "batch_size": 32, "workers": choose_workers(target, model)}
        return Scorer(model, tokenizer, preprocess, name=self.model, device=target, **options)

    def memory(self) -> list[tuple[str, int, str]]:
        """Return the weights; activations are a few tens of megabytes."""
        from bridges import loading

        weights = loading.clip_size(self._source()) * loading.DTYPES[self.dtype].itemsize
        return [("CLIP", weights, self.dtype), ("scoring", 2**28, "allowance")]

    def _preprocess(self, settings: dict) -> Preprocess:
        from open_clip.transform import PreprocessCfg, image_transform_v2

        from bridges.clip import Preprocess

        size = settings["size"]
        height, width = (size, size) if isinstance(size, int) else size
        require(height == width, self.model, "a model of square pictures", size)
        library = image_transform_v2(PreprocessCfg(**settings), is_train=False)
        return Preprocess(height, tuple(settings["mean"]), tuple(settings["std"]), library)

    def _source(self) -> str:
        """Return the model's name, or local-dir: and the folder of a bundled one."""
        from bridges import bundled

        folder = bundled(self.model, "scorer")
        return self.model if folder is None else f"local-dir:{folder}"

    def _open_clip_name(self) -> str:
        """Return the name for open_clip, after checks that it lacks; without reading weights."""
        import open_clip

        from bridges.loading import local_folder

        model = self._source()
        if model.replace("/", "-") in open_clip.list_models():  # the papers write "ViT-B/32"
            model = model.replace("/", "-")
            tags = open_clip.list_pretrained_tags_by_model(model)
            file = Path(self.pretrained or "")
            named = self.pretrained in tags or (file.is_file() and file.suffix == ".safetensors")
            expected = f"a safetensors file or weights of {model}, {', '.join(tags)}"
            require(named, "judges.scorer.pretrained", expected, self.pretrained)
            return model
        if not model.startswith("hf-hub:"):
            folder = local_folder(model.removeprefix("local-dir:"))
            if folder is None:
                known = "neither a folder nor a model of open_clip.list_models()"
                raise UserError(f"scorer {model}: {known}; one of the hub is hf-hub:{model}")
            have = sorted(path.name for path in folder.iterdir())
            complete = (folder / "open_clip_config.json").is_file() and any(folder.glob("*.safetensors"))
            require(complete, f"scorer {folder}", "open_clip_config.json and a safetensors file", have)
            model = f"local-dir:{folder}"
        expected = f"null, as {self.model} has its own weights"  # open_clip would ignore it
        require(not self.pretrained, "judges.scorer.pretrained", expected, self.pretrained)
        return model
