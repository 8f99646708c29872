"""Rewards of prompt enhancement: functions of pictures and texts, made from the judges they use.

``prompts`` are the user's, ``completions`` the rewrites that were rendered, ``images`` their pictures and
``baseline_images`` those of the unchanged prompts from the same noise, f32[P·G, 3, H, W] in [0, 1] on the scorer's
device. Every picture is scored against the **user's** prompt: a rewrite cannot make its own task easier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.tasks.rewards import Reward

BUILT_IN = ("alignment", "alignment_gain", "faithfulness", "length", "quality")


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


def quality(scorer: Scorer, head: Callable[[np.ndarray], np.ndarray]) -> Reward:
    """How good the picture looks, whatever it shows: an aesthetic head on the scorer's features.

    Meant to be conditioned on alignment: a beautiful picture of something else is no success.

    Args:
        scorer: Gives features [B, D].
        head: Features [B, D] → scores [B], such as `load_quality_head` returns.
    """

    def quality(prompts: list[str], completions: list[str], *, images: Any, **columns: Any) -> list[float]:
        """The head's score of each picture."""
        return _values(head(_values(scorer.image_features(images)))).tolist()

    return quality


def load_quality_head(path: str | Path) -> Callable[[np.ndarray], np.ndarray]:
    """Reads a linear aesthetic head from safetensors: ``weight`` [D] or [1, D], optionally ``bias`` [1].

    The head is applied to features of length 1, as LAION's linear heads are.

    Raises:
        UserError: If the file is missing or is no such head.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not Path(path).is_file():
        raise UserError(f"quality head {path} does not exist")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"quality head {path} is no readable safetensors file: {error}") from None
    if "weight" not in tensors or tensors["weight"].size != tensors["weight"].shape[-1]:
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        raise UserError(f"quality head {path} must hold weight [D] or [1, D] and optionally bias [1], got {found}")
    weight = tensors["weight"].reshape(-1).astype(np.float64)
    bias = float(tensors["bias"].reshape(-1)[0]) if "bias" in tensors else 0.0

    def head(features: np.ndarray) -> np.ndarray:
        if features.shape[-1] != len(weight):
            raise ValueError(f"the quality head is for {len(weight)} features, the scorer gives {features.shape[-1]}")
        return features / np.linalg.norm(features, axis=-1, keepdims=True) @ weight + bias

    return head


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


def make_reward(
    name: str,
    options: Mapping[str, float] | None = None,
    *,
    scorer: Scorer,
    count_tokens: Callable[[list[str]], Sequence[int]],
    window: int,
    head: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Reward:
    """A built-in reward by the name it has in a config.

    Args:
        name: One of `BUILT_IN`.
        options: faithfulness takes ``margin``; length takes ``target``.
        scorer: The judge of pictures and texts.
        count_tokens: Texts → lengths in the renderer's tokens.
        window: The renderer's window in tokens.
        head: The aesthetic head, for quality.

    Raises:
        UserError: If there is no such reward or option, or quality has no head.
    """
    known = {"faithfulness": ("margin",), "length": ("target",)}.get(name, ())
    given = dict(options or {})
    if name not in BUILT_IN:
        raise UserError(f"no reward {name!r}: choose {', '.join(BUILT_IN)}, or package.module:function, or file.py:function")
    unknown = [option for option in given if option not in known]
    if unknown:
        raise UserError(f"reward {name} has no option {unknown[0]!r} (its options: {', '.join(known) or 'none'})")
    if name == "quality":
        if head is None:
            raise UserError("reward quality needs an aesthetic head: set scorer.quality_head to its safetensors file")
        return quality(scorer, head)
    if name == "length":
        return length(count_tokens, window, **given)  # type: ignore[arg-type]
    if name == "faithfulness":
        return faithfulness(scorer, **given)
    return alignment(scorer) if name == "alignment" else alignment_gain(scorer)


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
