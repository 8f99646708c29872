"""Rewards of prompt enhancement: functions of pictures and texts, made from the judges they use.

``prompts`` are the user's, ``completions`` the rewrites that were rendered, ``images`` their pictures and
``baseline_images`` those of the unchanged prompts from the same noise, f32[P·G, 3, H, W] in [0, 1] on the scorer's
device. Every picture is scored against the **user's** prompt: a rewrite cannot make its own task easier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.rollout.rewards import Reward


class Scorer(Protocol):
    """A judge of pictures and texts in one space, such as CLIP."""

    def image_text(self, images: Any, texts: list[str]) -> Any:
        """Cosine similarity of each picture and its text, [B]."""

    def text_text(self, a: list[str], b: list[str]) -> Any:
        """Cosine similarity of each pair of texts, [B]."""

    def image_features(self, images: Any) -> Any:
        """Features [B, D]."""


def _values(array: Any) -> np.ndarray:
    """An array of any library as f64 on the host."""
    if hasattr(array, "detach"):
        array = array.detach().float().cpu()
    return np.asarray(array, np.float64)


def alignment(scorer: Scorer) -> Reward:
    """How well the picture shows what the user asked for: cos(image, prompt)."""

    def alignment(prompts: list[str], completions: list[str], *, images: Any, **columns: Any) -> list[float]:
        """Similarity of each picture and its user's prompt, in [-1, 1]."""
        return _values(scorer.image_text(images, prompts)).tolist()

    return alignment


def alignment_gain(scorer: Scorer) -> Reward:
    """How much better than the unchanged prompt's picture, drawn from the same noise.

    cos(image, prompt) - cos(baseline image, prompt). Inside a group the second term is a constant: as the only
    objective it trains like ``alignment``; as a figure and as a condition its 0 means something.
    """

    def alignment_gain(
        prompts: list[str], completions: list[str], *, images: Any, baseline_images: Any, **columns: Any
    ) -> list[float]:
        """Similarity gained over the unchanged prompt, in [-2, 2]."""
        after = _values(scorer.image_text(images, prompts))
        return (after - _values(scorer.image_text(baseline_images, prompts))).tolist()

    return alignment_gain


def faithfulness(scorer: Scorer, margin: float = 0.8) -> Reward:
    """Whether the rewrite still says what the prompt said: min(0, cos(rewrite, prompt) - margin).

    A hinge: above `margin` all rewrites are equally faithful, so copying the prompt is not what it teaches.

    Args:
        scorer: The judge of texts.
        margin: Similarity from which on nothing is taken off, in [-1, 1].
    """
    if not -1.0 <= margin <= 1.0:
        raise UserError(f"faithfulness: margin must be a similarity in [-1, 1], got {margin}")

    def faithfulness(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        """0 for a faithful rewrite, negative for one that drifts."""
        return np.minimum(0.0, _values(scorer.text_text(completions, prompts)) - margin).tolist()

    return faithfulness


def length(count_tokens: Callable[[list[str]], Sequence[int]], window: int, target: int | None = None) -> Reward:
    """Keeps rewrites inside the text encoder's window: -max(0, tokens - target) / window.

    What stands beyond the window is not seen by the renderer, hence costs nothing anywhere else: a policy may
    ramble there unpunished.

    Args:
        count_tokens: Texts → their lengths in the encoder's tokens, uncut.
        window: Tokens the encoder sees.
        target: Tokens from which on length costs; by default the window.
    """
    limit = window if target is None else int(target)
    if not 0 < limit <= window:
        raise UserError(f"length: target must be between 1 and the encoder's window {window}, got {target}")

    def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        """0 within the target, then a linear penalty."""
        tokens = np.asarray(count_tokens(completions), np.float64)
        return (-np.maximum(0.0, tokens - limit) / window).tolist()

    return length


def quality(scorer: Scorer, head: Callable[[Any], Any]) -> Reward:
    """How good the picture looks, whatever it shows: an aesthetic head on the scorer's features.

    Meant to be conditioned on alignment: a beautiful picture of something else is no success.

    Args:
        scorer: Gives features [B, D].
        head: Features [B, D] as the scorer gives them → scores [B].
    """

    def quality(prompts: list[str], completions: list[str], *, images: Any, **columns: Any) -> list[float]:
        """The head's score of each picture."""
        return _values(head(scorer.image_features(images))).tolist()

    return quality


def pixel_accuracy(checker: Callable[[np.ndarray, list[Any]], Any]) -> Reward:
    """The share of requested attributes that a checker reads from the pixels: a watch, no network is part of it.

    Args:
        checker: (pictures f32[B, 3, H, W], requested attributes of each) → shares [B].
    """

    def pixel_accuracy(
        prompts: list[str], completions: list[str], *, images: Any, requested: list[Any], **columns: Any
    ) -> list[float]:
        """The checker's shares, in [0, 1]."""
        return _values(checker(_values(images).astype(np.float32), requested)).tolist()

    return pixel_accuracy


def default_condition(name: str, names: Sequence[str]) -> tuple[str, float] | None:
    """What a reward is conditioned on unless the config says otherwise: (reward, threshold), or None.

    Quality counts only where alignment has been reached: where the picture fits the prompt at least as well as the
    unchanged prompt's (gain ≥ 0). For ``alignment`` alone no threshold suits every scorer: CLIP ViT-B/32 gives a
    fitting picture about 0.3 and a wrong one below 0.2, hence 0.25.
    """
    if name != "quality":
        return None
    if "alignment_gain" in names:
        return "alignment_gain", 0.0
    return ("alignment", 0.25) if "alignment" in names else None
