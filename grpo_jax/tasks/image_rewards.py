"""Rewards for prompts that become pictures: plain functions over the judges they are given.

Each factory takes its judges and returns `reward(prompts, completions, **columns)` in the signature of TRL:
`prompts` are the user's, `completions` the rewrites, `images` torch float [B, 3, H, W] in [0, 1] of the rewrites,
`baseline_images` those of the unchanged prompts from the same noise. The picture is always compared with the
**user's** prompt: a rewrite cannot earn anything by asking for something easier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Reward = Callable[..., Any]


def alignment(scorer: Any) -> Reward:
    """How well the rewrite's picture shows what the user asked for.

        r = cos(CLIP image, CLIP text of the user's prompt)      in [-1, 1]

    (Radford et al. 2021, arXiv:2103.00020; as a score, CLIPScore, arXiv:2104.08718.)
    """

    def reward(prompts: Sequence[str], completions: Sequence[str], *, images: Any, **columns: Any) -> Any:
        return scorer.image_text(images, list(prompts))

    return reward


def alignment_gain(scorer: Any) -> Reward:
    """How much better the rewrite's picture is than the unchanged prompt's from the same noise.

    r = cos(image, prompt) - cos(baseline image, prompt)
    """

    def reward(
        prompts: Sequence[str], completions: Sequence[str], *, images: Any, baseline_images: Any, **columns: Any
    ) -> Any:
        texts = list(prompts)
        return scorer.image_text(images, texts) - scorer.image_text(baseline_images, texts)

    return reward


def faithfulness(scorer: Any, *, threshold: float = 0.7) -> Reward:
    """Whether the rewrite still says what the prompt says: a hinge, so that nothing is gained by copying it.

        r = min(cos(text of the rewrite, text of the prompt) - threshold, 0)

    Args:
        scorer: CLIP; its text tower is used.
        threshold: Similarity from which the reward is 0.
    """
    if not -1 <= threshold <= 1:
        raise ValueError(f"threshold: expected a cosine in [-1, 1], got {threshold}")

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Any:
        return (scorer.text_text(list(completions), list(prompts)) - threshold).clamp(max=0.0)

    return reward


def length(count_tokens: Callable[[list[str]], list[int]], window: int, *, target: float | None = None) -> Reward:
    """Whether the rewrite fits what the renderer reads.

        r = -max(tokens - target, 0) / window, at least -1

    Tokens are those of the renderer's encoders, special ones included: what falls outside the window is never seen,
    so that a policy could otherwise ramble unpunished.

    Args:
        count_tokens: Tokens of each text before any is cut off.
        window: Tokens that the renderer reads.
        target: Tokens that are free; the window by default.
    """
    free = window if target is None else target
    if not 0 < free <= window:
        raise ValueError(f"target: expected a number of tokens in (0, {window}], got {target}")

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        return [max(-max(count - free, 0) / window, -1.0) for count in count_tokens(list(completions))]

    return reward


def quality(scorer: Any, head: Callable[[Any], Any]) -> Reward:
    """An aesthetic head's score of the picture, from CLIP image features alone.

    It knows nothing of the prompt, so condition it on alignment: otherwise the policy learns to draw pretty pictures
    of something else.
    """

    def reward(prompts: Sequence[str], completions: Sequence[str], *, images: Any, **columns: Any) -> Any:
        return head(scorer.image_features(images))

    return reward


def pixel_accuracy(measure: Callable[[Any, Sequence[Any]], Any]) -> Reward:
    """The miniature's watch: the share of requested attributes that a checker without networks finds.

    Args:
        measure: (images float [B, 3, H, W] as NumPy, requested attributes of each) → [B].
    """

    def reward(
        prompts: Sequence[str], completions: Sequence[str], *, images: Any, requested: Sequence[Any], **columns: Any
    ) -> Any:
        return measure(images.detach().cpu().numpy(), requested)

    return reward
