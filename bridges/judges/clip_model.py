"""CLIP models of transformers, such as PickScore (Kirstain et al. 2023, arXiv:2305.01569)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridges.judges import ModelJudge
from grpo_jax.config.fields import PositiveCount, require, resume_mutable

if TYPE_CHECKING:
    import torch
    from transformers import CLIPModel as TransformersClip
    from transformers import PretrainedConfig

    from bridges.clip import Preprocess, Scorer


class ClipModel(ModelJudge):
    """Score pictures and texts by their cosine in the space of a `CLIPModel` of transformers."""

    auto = "AutoModel"
    working_bytes = 2**28  # activations are some tens of megabytes

    path: str = "yuvalkirstain/PickScore_v1"
    """Folder or hub id."""
    batch_size: PositiveCount = resume_mutable(32)
    """Pictures or texts per batch."""

    def load(self, device: str) -> Scorer:
        """Load the model with its tokenizer and image processor on "cpu" or "gpu:N"; UserError without one."""
        from transformers import AutoTokenizer, CLIPModel

        from bridges.clip import Scorer
        from bridges.loading import DTYPES, load_complete, load_config, load_part

        config = load_config(self.path)
        self.check_config(config)
        window = config.text_config.max_position_embeddings
        options = {"padding": "max_length", "truncation": True, "max_length": window, "return_tensors": "pt"}
        tokenizer = load_part(AutoTokenizer, self.path, "tokenizer")
        preprocess = self._preprocess()
        model = load_complete(CLIPModel, self.path, dtype=self.dtype, device=device)
        return Scorer(
            _Towers(model),
            lambda texts: tokenizer(texts, **options).input_ids,
            preprocess,
            name=self.path,
            device=model.device,
            dtype=DTYPES[self.dtype],
            batch_size=self.batch_size,
        )

    def check_config(self, config: PretrainedConfig) -> None:
        """Refuse another model."""
        require(config.model_type == "clip", self.path, "a CLIPModel of transformers", f"a {config.model_type} model")

    def _preprocess(self) -> Preprocess:
        """Return the transform of the folder's image processor."""
        from transformers import AutoImageProcessor

        from bridges.clip import Preprocess
        from bridges.loading import load_part

        processor = load_part(AutoImageProcessor, self.path, "image processor")
        edges = {processor.size.get("shortest_edge"), processor.crop_size["height"], processor.crop_size["width"]}
        require(len(edges) == 1, self.path, "pictures resized and cropped to one edge", edges)
        return Preprocess(
            edges.pop(),
            tuple(processor.image_mean),
            tuple(processor.image_std),
            lambda picture: processor(images=picture, return_tensors="pt")["pixel_values"][0],
        )


class _Towers:
    """A `CLIPModel` with open_clip's names."""

    def __init__(self, model: TransformersClip):
        self.model = model

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map pixels [B, 3, H, W] to features [B, width]."""
        features = self.model.get_image_features(pixel_values=pixels)
        return getattr(features, "pooler_output", features)  # transformers before 5 returned only the tensor

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, window] to features [B, width]; tokens after EOS do not count."""
        features = self.model.get_text_features(input_ids=tokens)
        return getattr(features, "pooler_output", features)
