"""Detectors of transformers, whose objects GenEval's rules judge (Ghosh et al. 2023, arXiv:2310.11513)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from grpo_jax.config.fields import PositiveCount, require, resume_mutable
from grpo_jax.config.judge import Judge
from grpo_jax.errors import UserError

if TYPE_CHECKING:
    from bridges.detection import Detector


class ObjectDetection(Judge):
    """Judges a picture by the objects that a detector finds: what is there, how many, where, and of which colour."""

    path: str = ""
    """Folder or hub id of an object-detection model of transformers."""
    threshold: float = 0.3
    """Score that an object must exceed."""
    counting_threshold: float = 0.9
    """The same of prompts whose tag is "counting"."""
    position_threshold: float = 0.1
    """Share of two objects' sizes by which they must lie apart to stand beside each other."""
    most_objects: PositiveCount = 16
    """Objects of a kind, at most."""
    partial: bool = False
    """Earn the share of what is asked for that is there, in place of 1 where all is and else 0."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights."""
    batch_size: PositiveCount = resume_mutable(8)
    """Pictures looked at at once."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path", "a folder or hub id", self.path)
        for name in ("threshold", "counting_threshold", "position_threshold"):
            require(0 <= getattr(self, name) < 1, name, "a number in [0, 1)", getattr(self, name))

    def check(self) -> None:
        """Refuse a folder that is not there; no weight is read."""
        from bridges.loading import load_config, local_folder

        if local_folder(self.path) is not None:
            load_config(self.path)

    def load(self, device: str) -> Detector:
        """Load the detector on "cpu" or "gpu:N".

        Raises:
            UserError: No such model, none that detects objects, or weights that are missing, broken, or no safetensors.
        """
        from transformers import AutoImageProcessor, AutoModelForObjectDetection

        from bridges.detection import Detector
        from bridges.loading import load_complete, load_part, torch_device

        target = torch_device(device)
        processor = load_part(AutoImageProcessor, self.path, "image processor")
        if not hasattr(processor, "post_process_object_detection"):
            raise UserError(f"{self.path}: expected a model that detects objects, its image processor reads no boxes")
        model = load_complete(AutoModelForObjectDetection, self.path, dtype=self.dtype).to(target)
        return Detector(self, model, processor, target)

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights, and an allowance of a gigabyte for a batch."""
        from bridges import loading

        weights = loading.model_size(self.path, "AutoModelForObjectDetection") * loading.ITEM_BYTES[self.dtype]
        return [("detector", weights, self.dtype), ("looking", 2**30, "allowance")]
