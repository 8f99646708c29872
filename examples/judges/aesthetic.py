"""Aesthetic score of a picture, by a head on CLIP's features, such as LAION's predictors.

    python -m grpo_jax.train --config my.yaml --judges.beauty examples/judges/aesthetic.py:Aesthetic \
        --judges.beauty.head head.safetensors \
        --rewards '[alignment, {name: beauty, condition_on: alignment, threshold: 0.25}]'

Condition the reward on `alignment`, because a beautiful picture may show something else.
"""

import re
from typing import Any

from grpo_jax import Judge


class Aesthetic(Judge):
    """Score a picture by linear layers on its features; the judge's name is a reward."""

    head: str
    """Safetensors file with `N.weight` and `N.bias` of each layer."""
    model: str = "ViT-L-14"
    """Model of open_clip, or a folder."""
    pretrained: str | None = "openai"
    """Tag of the weights."""

    def load(self, device: str = "cpu") -> "AestheticScore":
        """Load CLIP and the head on "cpu" or "gpu:N"."""
        from safetensors.torch import load_file

        from bridges.judges.open_clip import OpenClip

        scorer = OpenClip(model=self.model, pretrained=self.pretrained).load(device)
        return AestheticScore(scorer, load_file(self.head, str(scorer.device)))


class AestheticScore:
    """A loaded head; calling it gives the reward."""

    def __init__(self, scorer: Any, weights: dict[str, Any]):
        stems = [name.removesuffix("weight") for name in weights if name.endswith("weight")]
        names = sorted(stems, key=lambda stem: [int(number) for number in re.findall(r"\d+", stem)])
        self._scorer = scorer
        self._layers = [(weights[f"{name}weight"].float(), weights[f"{name}bias"].float()) for name in names]

    def __call__(self, prompts: list, completions: list, *, images: Any, **columns: Any) -> list[float]:
        """Score pictures [B, 3, H, W] in [0, 1]."""
        features = self._scorer.image_features(images)
        for weight, bias in self._layers:
            features = features @ weight.T + bias
        return features[:, 0].tolist()
