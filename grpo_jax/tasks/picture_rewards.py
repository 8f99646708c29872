"""Rewards of tasks whose texts are drawn: functions of pictures and texts, and of the judges they name.

``prompts`` are the user's, ``completions`` the rewrites that were rendered, ``images`` their pictures and
``baseline_images`` those of the unchanged prompts from the same noise, f32[P·G, 3, H, W] in [0, 1] on the scorer's
device. Every picture is scored against the **user's** prompt: a rewrite cannot make its own task easier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.named import own_package
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.rewards import on_host


class Scorer(Protocol):
    """A judge of pictures and texts in one space, such as CLIP."""

    def image_text(self, images: Any, texts: list[str]) -> Any:
        """Cosine similarity of each picture and its text, [B]."""

    def text_text(self, a: list[str], b: list[str]) -> Any:
        """Cosine similarity of each pair of texts, [B]."""

    def quality(self, images: Any) -> Any:
        """How good each picture looks, [B]."""


class Answerer(Protocol):
    """A judge that looks at pictures and answers questions about them."""

    def yes(self, images: Any, questions: list[str]) -> Any:
        """Probability of a yes to each picture's question, [B]."""


class Counter(Protocol):
    """What draws, as far as the length of a text goes."""

    @property
    def window(self) -> int:
        """Tokens of a text that reach the picture."""
        ...

    def count_tokens(self, texts: list[str]) -> Sequence[int]:
        """Tokens of each text, uncut."""
        ...


def _values(array: Any) -> np.ndarray:
    """An array of any library as f64 on the host, NaN where NumPy masks it."""
    found = on_host(array)
    return np.ma.filled(np.asanyarray(array if found is None else found, np.float64), np.nan)


def alignment(prompts: list[str], completions: list[str], *, images: Any, scorer: Scorer, **columns: Any) -> np.ndarray:
    """How well the picture shows what the user asked for: cos(image, prompt), in [-1, 1]."""
    return _values(scorer.image_text(images, prompts))


def alignment_gain(
    prompts: list[str], completions: list[str], *, images: Any, baseline_images: Any, scorer: Scorer, **columns: Any
) -> np.ndarray:
    """How much better than the unchanged prompt's picture, drawn from the same noise, in [-2, 2].

    cos(image, prompt) - cos(baseline image, prompt). Inside a group the second term is a constant: as the only
    objective it trains like `alignment`; as a figure and as a condition its 0 means something.
    """
    after = _values(scorer.image_text(images, prompts))
    return after - _values(scorer.image_text(baseline_images, prompts))


@dataclass(frozen=True)
class Faithfulness:
    """Whether the rewrite still says what the prompt said: min(0, cos(rewrite, prompt) - margin).

    A hinge: above `margin` all rewrites are equally faithful, so copying the prompt is not what it teaches.

    Attributes:
        margin: Similarity from which on nothing is taken off, in [-1, 1].
    """

    margin: float = 0.8

    def __post_init__(self) -> None:
        """Checks the range."""
        require(-1.0 <= self.margin <= 1.0, "margin", "a similarity in [-1, 1]", self.margin)

    def __call__(self, prompts: list[str], completions: list[str], *, scorer: Scorer, **columns: Any) -> np.ndarray:
        """0 for a faithful rewrite, negative for one that drifts."""
        return np.minimum(0.0, _values(scorer.text_text(completions, prompts)) - self.margin)


@dataclass(frozen=True)
class Length:
    """Keeps rewrites inside the text encoder's window: -max(0, tokens - target) / window.

    What stands beyond the window is not seen by the renderer, hence costs nothing anywhere else: a policy may
    ramble there unpunished.

    Attributes:
        target: Tokens from which on length costs; None for the window.
    """

    target: int | None = None

    def __post_init__(self) -> None:
        """Checks the range."""
        require(self.target is None or self.target > 0, "target", "a number > 0", self.target)

    def __call__(self, prompts: list[str], completions: list[str], *, renderer: Counter, **columns: Any) -> np.ndarray:
        """0 within the target, then a linear penalty. Raises UserError for a target beyond the window."""
        window = renderer.window
        limit = window if self.target is None else int(self.target)
        if limit > window:
            raise UserError(f"length: target must be between 1 and the encoder's window {window}, got {self.target}")
        tokens = np.asarray(renderer.count_tokens(completions), np.float64)
        return -np.maximum(0.0, tokens - limit) / window


def quality(prompts: list[str], completions: list[str], *, images: Any, scorer: Scorer, **columns: Any) -> np.ndarray:
    """How good the picture looks, whatever it shows: an aesthetic head on the scorer's features.

    Meant to be conditioned on alignment: a beautiful picture of something else is no success.
    """
    return _values(scorer.quality(images))


def questions(
    prompts: list[str],
    completions: list[str],
    *,
    images: Any,
    questions: list[list[str] | str | None],
    scorer: Answerer,
    **columns: Any,
) -> list[float | None]:
    """How many of the row's own questions the picture answers with yes: their mean P("Yes"), in [0, 1].

    None where a row has none. It is asked of a judge that answers (`questions@vqa`).

    Raises:
        UserError: The judge is another one.
    """
    if not hasattr(scorer, "yes"):
        raise UserError("it needs a judge of kind vqa: name it questions@JUDGE")
    asked = [[texts] if isinstance(texts, str) else texts or [] for texts in questions]
    rows = [row for row, texts in enumerate(asked) for _ in texts]
    answers = _values(scorer.yes(images[rows], [text for texts in asked for text in texts]))
    return [float(answers[np.equal(rows, row)].mean()) if texts else None for row, texts in enumerate(asked)]


def pixel_accuracy(
    prompts: list[str], completions: list[str], *, images: Any, requested: list[Any], **columns: Any
) -> np.ndarray:
    """The share of requested attributes that a checker reads from the pixels, in [0, 1]: no network is part of it."""
    checker = own_package("bridges", "miniature.world").pixel_accuracy
    return _values(checker(_values(images).astype(np.float32), requested))


REWARDS = {
    "alignment": alignment,
    "alignment_gain": alignment_gain,
    "faithfulness": Faithfulness,
    "length": Length,
    "quality": quality,
    "questions": questions,
    "pixel_accuracy": pixel_accuracy,
}
"""By the name that a config uses."""


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


def conditioned(sections: Sequence[RewardSection]) -> tuple[RewardSection, ...]:
    """The sections with a reward's default condition filled in.

    Raises:
        UserError: A reward that must not be earned alone (quality) has nothing to be conditioned on.
    """
    names = [section.name for section in sections]
    resolved = []
    for section in sections:
        if section.condition_on is None and section.name == "quality":
            condition = default_condition(section.name, names)
            if condition is None:
                raise UserError(
                    "rewards.quality: a pretty picture of something else would earn it; list alignment or "
                    "alignment_gain among the rewards, or say condition_on: none"
                )
            section = dataclasses.replace(section, condition_on=condition[0], threshold=condition[1])
        resolved.append(section)
    return tuple(resolved)
