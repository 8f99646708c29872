"""What tasks have in common whose texts are drawn: judges, how a completion is read, what is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from grpo_jax.config.fields import require
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.errors import is_own_doing
from grpo_jax.rollout.data import SPLITS, PromptSet, Row, noise_seed
from grpo_jax.rollout.pipeline import at_work
from grpo_jax.rollout.prompts import make_prompt_set, prompts_of
from grpo_jax.rollout.texts import Reading
from grpo_jax.tasks.display import Chart, Curve, Display
from grpo_jax.tasks.picture_rewards import conditioned
from grpo_jax.tasks.rewriting import names_a_negative, parse_rewrite
from grpo_jax.tasks.task import Task

MINIATURE = "miniature"
"""As data.prompts: those of the small world that ships with the package."""
TRAINING_PROMPTS, TEST_PROMPTS = 2048, 256

Maker = Callable[[str, int], Iterable[Mapping[str, Any]]]
"""(split, how many) → records."""


@dataclass(frozen=True)
class PictureTask(Task):
    """Prompts for a text-to-image model: judges.renderer draws them, judges.scorer compares them."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "judges": {"renderer": {"kind": "stable_diffusion_3"}, "scorer": {"kind": "open_clip"}},
    }
    display: ClassVar[Display] = Display(
        headline=("pixel_accuracy",),
        live=(("watch/pixel_accuracy/mean", "pixels"),),
        charts=(
            Chart(
                "Pixel accuracy",
                (Curve("watch/pixel_accuracy/mean", "training batch"),),
                note="Read from the picture by rule; never trained on.",
            ),
        ),
        best="the best possible rewrite",
    )

    def check(self, config: Config) -> None:
        """Refuses missing judges, and rewards that need what is not there."""
        for name in ("renderer", "scorer"):
            require(name in config.judges, f"judges.{name}", "a judge", None)
        names = [*(reward.name for reward in config.rewards), *config.watch]
        head = getattr(config.judges["scorer"], "quality_head", None)
        require(
            "quality" not in names or head is not None,
            "rewards.quality",
            "judges.scorer.quality_head to name a safetensors file",
            head,
        )
        known = "pixel_accuracy" not in names or config.data.prompts == MINIATURE
        require(known, "watch.pixel_accuracy", f'the prompts it knows, data.prompts "{MINIATURE}"', config.data.prompts)
        conditioned(config.rewards)

    def reader(self, config: Config) -> Callable[[str, str], Reading]:
        """The prompt that a completion makes."""
        form = config.data.form
        return lambda written, prompt: parse_rewrite(written, form, prompt)

    def remark(self, completions: Sequence[str]) -> str:
        """How many completions name a negative prompt, which none is drawn with."""
        count = sum(map(names_a_negative, completions))
        if not count:
            return ""
        return (
            f"{count} of {len(completions)} completions name a negative prompt, which is left out; "
            "judges.renderer.negative_prompt is one for all pictures"
        )


def picture_prompts(config: Config, makers: Mapping[str, Maker], files: str) -> PromptSet:
    """The prompts that data.prompts names: what a maker of that name makes of each split and its size, or files.

    Args:
        config: The run's.
        makers: By name.
        files: What else may be named, for who names nothing.

    Raises:
        UserError: Nothing is named, it cannot be read, or what is made is to be read from somewhere.
    """
    name = config.data.prompts
    if name not in makers:
        require(bool(name), "data.prompts", files, name)
        return prompts_of(config.data)
    for field in ("columns", "validation", "test"):
        given = getattr(config.data, field)
        require(not given, f"data.{field}", f'nothing with data.prompts "{name}", which is made', given)
    return make_prompt_set(*map(makers[name], SPLITS, split_counts(config)))


def miniature_prompts(split: str, count: int) -> list[dict[str, Any]]:
    """What people ask for in the miniature's world."""
    return own_package("bridges", "miniature.world").prompts(split, count)


def split_counts(config: Config) -> tuple[int, int, int]:
    """How many of the miniature's prompts each split has."""
    evaluation = config.evaluation
    return TRAINING_PROMPTS, evaluation.validation_prompts or 1, evaluation.prompts or TEST_PROMPTS


class RenderedImages(NamedTuple):
    """RenderedImages of a chunk, torch float [P·G, 3, H, W] in [0, 1] on the scorer's device.

    Attributes:
        images: Of the judged texts; None where drawing failed and on_judge_error says "missing".
        baseline_images: Of the unchanged prompts from the same noise, repeated for each completion; None where no
            reward asks for them.
        seeds: P seeds of the noise.
    """

    images: Any
    baseline_images: Any
    seeds: list[int]


def make_render(judges: Mapping[str, Any], config: Config, *, baselines: bool) -> Callable[..., RenderedImages]:
    """Return render(rows, texts `[P][G]`, iteration, evaluation) → RenderedImages.

    Args:
        judges: "renderer", and perhaps "scorer", on whose device the pictures are then.
        config: Of the run.
        baselines: Whether the unchanged prompts are drawn too.
    """
    renderer, device = judges["renderer"], judges.get("scorer", judges["renderer"]).device

    def render(rows: Sequence[Row], texts: list[list[str]], iteration: int, evaluation: bool) -> RenderedImages:
        seeds = [noise_seed(config.seed, iteration, row.id, evaluation=evaluation) for row in rows]
        group = len(texts[0])
        repeated = [seed for seed in seeds for _ in range(group)]
        at_work("judges.renderer")
        try:
            images = renderer.draw([text for texts_of in texts for text in texts_of], repeated, evaluation=evaluation)
            plain = renderer.draw([row.prompt for row in rows], seeds, evaluation=evaluation) if baselines else None
        except BaseException as error:
            if config.on_judge_error == "missing" and is_own_doing(error):
                return RenderedImages(None, None, seeds)
            raise
        baseline = None if plain is None else plain.repeat_interleave(group, dim=0).to(device)
        return RenderedImages(images.to(device), baseline, seeds)

    return render
