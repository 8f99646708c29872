"""The base class of renderers that may learn; importing it imports no torch."""

from __future__ import annotations

from bridges.judges import PipelineJudge, RendererTraining
from grpo_jax.config.fields import require


class TrainablePipeline(PipelineJudge):
    """Base class of a renderer that may learn."""

    train: RendererTraining | None = None
    """Training of the renderer (docs/renderer.md); null for none."""

    def check(self) -> None:
        """Refuse a missing pipeline, and with `train` one that cannot be trained, without reading weights."""
        from bridges.diffusion import find_pipeline

        find_pipeline(self.path)
        if self.train:
            from bridges.trainable import check_training

            narrow = self.dtype == "float16" and not self.train.autocast  # without a loss scale gradients round to 0
            require(not narrow, "dtype", "float32 or bfloat16 with train, or train.autocast", self.dtype)
            check_training(self)

    def memory(self) -> list[tuple[str, int, str]]:
        """Return the pipeline's memory, and that of its training."""
        parts = super().memory()
        if self.train:
            from bridges.trainable import training_memory

            parts += training_memory(self, self.train)
        return parts
