"""Similarity of pictures by DINOv2 (Oquab et al. 2023, arXiv:2304.07193), as a reward.

    python -m grpo_jax.train --judges.likeness examples/judges/dino.py:Dino --rewards '["alignment", "likeness"]'

It needs only the extra `diffusion`; the weights come from the hub, or from a folder.
"""

from typing import Any

from grpo_jax import Judge


class Dino(Judge):
    """Score the similarity of a picture and the unchanged prompt's picture, by shapes and places."""

    model: str = "facebook/dinov2-base"
    """Folder or hub id of a DINOv2 of transformers."""
    batch_size: int = 32
    """Pictures per batch."""

    def load(self, device: str) -> "Likeness":
        """Load the model and its image processor; only safetensors are read."""
        from transformers import AutoImageProcessor, AutoModel

        from bridges.loading import torch_device

        model = AutoModel.from_pretrained(self.model, use_safetensors=True).to(torch_device(device))
        processor = AutoImageProcessor.from_pretrained(self.model)
        return Likeness(model.eval().requires_grad_(False), processor, self.batch_size)


class Likeness:
    """A loaded DINOv2; calling it gives the reward."""

    def __init__(self, model: Any, processor: Any, batch_size: int):
        self._model, self._processor, self._batch_size = model, processor, batch_size

    def __str__(self) -> str:
        return f"{type(self._model).__name__} on {self._model.device}"

    def features(self, images: Any) -> Any:
        """Return unit features [B, D] of pictures float [B, 3, H, W] in [0, 1]: the class token's state."""
        import torch

        found = []
        for batch in images.split(self._batch_size):
            pixels = self._processor(images=list(batch), do_rescale=False, return_tensors="pt")["pixel_values"]
            found.append(self._model(pixel_values=pixels.to(self._model.device)).last_hidden_state[:, 0])
        return torch.nn.functional.normalize(torch.cat(found), dim=-1)

    def __call__(self, prompts: list, completions: list, *, images: Any, baseline_images: Any, **columns: Any) -> Any:
        """Return the cosine of each picture and the unchanged prompt's picture, from the same noise."""
        return (self.features(images) * self.features(baseline_images)).sum(-1)
