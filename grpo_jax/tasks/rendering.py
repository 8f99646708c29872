"""Drawing what the policy wrote: one noise for all rewrites of a prompt and for the prompt itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax.config.run import Config
from grpo_jax.errors import is_own_doing
from grpo_jax.rollout.data import Row, noise_seed
from grpo_jax.rollout.pipeline import at_work


class Pictures(NamedTuple):
    """Pictures of a chunk, torch float [P·G, 3, H, W] in [0, 1] on the scorer's device.

    Attributes:
        images: Of the judged texts; None where drawing failed and on_judge_error says "missing".
        baseline_images: Of the unchanged prompts from the same noise, repeated for each completion; None where no
            reward asks for them.
        seeds: P seeds of the noise.
    """

    images: Any
    baseline_images: Any
    seeds: list[int]


def make_render(judges: Mapping[str, Any], config: Config, *, baselines: bool) -> Callable[..., Pictures]:
    """render(rows, texts `[P][G]`, iteration, evaluation) → Pictures.

    Args:
        judges: "renderer", and perhaps "scorer", on whose device the pictures are then.
        config: Of the run.
        baselines: Whether the unchanged prompts are drawn too.
    """
    renderer, device = judges["renderer"], judges.get("scorer", judges["renderer"]).device

    def render(rows: Sequence[Row], texts: list[list[str]], iteration: int, evaluation: bool) -> Pictures:
        seeds = [noise_seed(config.seed, iteration, row.id, evaluation=evaluation) for row in rows]
        group = len(texts[0])
        repeated = [seed for seed in seeds for _ in range(group)]
        at_work("judges.renderer")
        try:
            images = renderer.draw([text for texts_of in texts for text in texts_of], repeated, evaluation=evaluation)
            plain = renderer.draw([row.prompt for row in rows], seeds, evaluation=evaluation) if baselines else None
        except BaseException as error:
            if config.on_judge_error == "missing" and is_own_doing(error):
                return Pictures(None, None, seeds)
            raise
        baseline = None if plain is None else plain.repeat_interleave(group, dim=0).to(device)
        return Pictures(images.to(device), baseline, seeds)

    return render
