"""Tasks with a renderer: rewards of pictures and texts, judges, prompts, and the report's pictures.

Rewards name what they use: the user's ``prompts``, the rendered ``completions``, their pictures ``images``, and
``baseline_images``, those of the unchanged prompts from the same noise. Pictures are f32[P·G, 3, H, W] in [0, 1] on the
scorer's device. Every picture is scored against the **user's** prompt, so a rewrite cannot make its own task easier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.named import own_package
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError, raised_by_user_code
from grpo_jax.rollout.data import SPLITS, PromptSet, Row
from grpo_jax.rollout.encoding import ParsedCompletion, continued
from grpo_jax.rollout.pictures import RenderedImages
from grpo_jax.rollout.pipeline import set_current_judge
from grpo_jax.rollout.prompts import make_prompt_set, prompts_of
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.tasks.renderer import learn_pictures, noise_seeds
from grpo_jax.tasks.rewriting import parse_rewrite
from grpo_jax.tasks.task import Chart, Curve, Display, Task, TaskData
from grpo_jax.training.estimators import Invalid

if TYPE_CHECKING:
    from torch import Tensor

    from bridges.clip import Scorer
    from bridges.diffusion import Renderer
    from bridges.judges.object_detection import Detector
    from bridges.judges.vqa import Answerer

WORLDS = {"miniature": "world", "miniature_scenes": "scenes", "miniature_erring": "erring"}
"""Values of data.prompts: prompts of the small world that ships with the package, of its harder world (several objects,
counts, places, bindings), and of those the counts and colours, which one of its renderers often draws wrong."""
TRAINING_PROMPTS, TEST_PROMPTS = 2048, 256


def _values(array: object) -> np.ndarray:
    """Convert an array of any library to f64 on the host, with NaN for masked NumPy values."""
    if (detach := getattr(array, "detach", None)) is not None:
        array = detach().cpu().double().numpy()
    return np.ma.filled(np.asanyarray(array, np.float64), np.nan)


def alignment(prompts: list[str], *, images: Tensor, scorer: Scorer) -> np.ndarray:
    """Return the similarity of picture and user's prompt, cos(image, prompt), in [-1, 1]."""
    return _values(scorer.image_text(images, prompts))


def alignment_gain(prompts: list[str], *, images: Tensor, baseline_images: Tensor, scorer: Scorer) -> np.ndarray:
    """Return the gain over the unchanged prompt's picture from the same noise, in [-2, 2].

    It is cos(image, prompt) - cos(baseline image, prompt). Within a group the second term is constant, so as the only
    objective it trains like `alignment`. As a measure or a condition, 0 means no improvement.
    """
    return alignment(prompts, images=images, scorer=scorer) - alignment(prompts, images=baseline_images, scorer=scorer)


@dataclass(frozen=True)
class Faithfulness:
    """Hinge on the similarity of rewrite and prompt: min(0, cos(rewrite, prompt) - margin).

    Above `margin`, in [-1, 1], all rewrites are equally faithful, so copying the prompt is not rewarded.
    """

    margin: float = 0.8
    best: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        require(-1.0 <= self.margin <= 1.0, "margin", "a similarity in [-1, 1]", self.margin)

    def __call__(self, prompts: list[str], completions: list[str], *, scorer: Scorer) -> np.ndarray:
        """Return 0 for a faithful rewrite, less for one that drifts."""
        return np.minimum(0.0, _values(scorer.text_text(completions, prompts)) - self.margin)


@dataclass(frozen=True)
class Length:
    """Penalty for tokens beyond `target` (None: the text encoder's window): -max(0, tokens - target) / window.

    The renderer does not see text beyond the window, so no other reward penalises rambling there.
    """

    target: int | None = None
    best: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        require(self.target is None or self.target > 0, "target", "a number > 0", self.target)

    def __call__(self, completions: list[str], *, renderer: Renderer) -> np.ndarray:
        """Return 0 within the target, then a linear penalty; UserError for a target beyond the window."""
        window = renderer.window
        limit = window if self.target is None else int(self.target)
        if limit > window:
            raise UserError(f"length: target must be between 1 and the encoder's window {window}, got {self.target}")
        tokens = np.asarray(renderer.count_tokens(completions), np.float64)
        return -np.maximum(0.0, tokens - limit) / window


def questions(*, images: Tensor, questions: list[list[str] | str | None], scorer: Answerer) -> list[float | None]:
    """Return the mean P("Yes") of the row's questions about the picture, in [0, 1]; None if a row has none.

    It needs a judge that answers (`questions@vqa`); any other is a UserError.
    """
    if not hasattr(scorer, "yes"):
        raise UserError("it needs a judge of kind vqa: name it questions@JUDGE")
    lists = [[texts] if texts and isinstance(texts, str) else texts or [] for texts in questions]
    rows = [row for row, texts in enumerate(lists) for _ in texts]
    answers = _values(scorer.yes(images[rows], [text for texts in lists for text in texts]))
    return _means_by_row(answers, rows, lists)


_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def soft_tifa(*, images: Tensor, vqa_list: list[list[tuple[str, str]] | None], scorer: Answerer) -> list[float | None]:
    """Compute GenEval 2's Soft-TIFA (arXiv:2512.16853), in [0, 1]; None if a row has no questions.

        (Π_q P(answer_q))^(1 / Q),  the geometric mean over the row's questions

    `vqa_list` has pairs [question, answer], as in GenEval 2's rows. It needs a judge that answers (`soft_tifa@vqa`);
    any other is a UserError.
    """
    if not hasattr(scorer, "begins"):
        raise UserError("it needs a judge of kind vqa: name it soft_tifa@JUDGE")
    asked = [(row, *pair) for row, pairs in enumerate(vqa_list) for pair in pairs or []]
    rows, texts = [row for row, *_ in asked], [f"{question} Answer in one word." for _, question, _ in asked]
    chances = _values(scorer.begins(images[rows], texts, [_spellings(answer) for *_, answer in asked]))
    logs = np.log(np.maximum(chances.astype(np.float64), 1e-300))
    return [None if mean is None else float(np.exp(mean)) for mean in _means_by_row(logs, rows, vqa_list)]


def _means_by_row(values: np.ndarray, rows: list[int], asked: Sequence[Sequence | None]) -> list[float | None]:
    """Return the mean of each row's values; None if a row has no questions."""
    return [float(values[np.equal(rows, row)].mean()) if those else None for row, those in enumerate(asked)]


def _spellings(answer: str) -> list[str]:
    """Return the spellings of a one-word answer: lower or upper case, a number as a word and as a digit."""
    same = next(((word, str(n)) for n, word in enumerate(_NUMBERS) if answer.lower() in (word, str(n))), (answer,))
    words = [spelt for word in same for spelt in (word, word.lower(), word.capitalize())]
    return [*words, *(f" {word}" for word in words)]


def geneval(
    *, images: Tensor, include: list[list[dict[str, Any]] | None], detector: Detector, scorer: Scorer, **columns: Any
) -> list[float | None]:
    """Score a picture by GenEval's rules, with its row's `include`, `exclude` and `tag`; None without them.

    `judges.detector` is of kind object_detection; the scorer classifies colours (with `geneval@clip`, that judge).
    """
    others = {name: columns.get(name) or [None] * len(include) for name in ("exclude", "tag")}
    rows = zip(include, others["exclude"], others["tag"], strict=True)
    return detector.geneval(images, [{"include": a, "exclude": b, "tag": tag} for a, b, tag in rows], scorer)


def pixel_accuracy(*, images: Tensor, requested: list[Mapping[str, Any]]) -> np.ndarray:
    """Return the share of requested attributes that a checker without a network finds in the pixels, in [0, 1].

    For several objects, it is 1 if all are as requested, else 0.
    """
    world = "scenes" if requested and "objects" in requested[0] else "world"
    checker = own_package("bridges", f"miniature.{world}").pixel_accuracy
    return _values(checker(_values(images).astype(np.float32), requested))


REWARDS = {
    "alignment": alignment,
    "alignment_gain": alignment_gain,
    "faithfulness": Faithfulness,
    "length": Length,
    "questions": questions,
    "soft_tifa": soft_tifa,
    "geneval": geneval,
    "pixel_accuracy": pixel_accuracy,
}
"""Rewards by their name in a config."""


class PictureTask(Task):
    """Prompts for a text-to-image model: judges.renderer draws them, judges.scorer compares them."""

    invalid: Invalid = "worst"
    """Rewards of an invalid answer (empty, a refusal, endless thinking): "worst", the lowest of its group's valid
    answers, for each reward; "missing", none; "prompt", those of the user's prompt, rendered in its place."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "judges": {"renderer": {"kind": "stable_diffusion_3"}, "scorer": {"kind": "open_clip"}}
    }
    display: ClassVar[Display] = Display(
        headline=("pixel_accuracy",),
        live=(("eval_rewards/pixel_accuracy/mean", "pixels"),),
        charts=(
            Chart(
                "Pixel accuracy",
                (Curve("eval_rewards/pixel_accuracy/mean", "training batch"),),
                note="Read from the picture by rule; never trained on.",
            ),
        ),
    )

    def check(self, config: Config) -> None:
        """Refuse missing judges, and rewards without their judges."""
        super().check(config)
        for name in ("renderer", "scorer"):
            require(name in config.judges, f"judges.{name}", "a judge", None)
        names = [*(reward.name for reward in config.rewards), *config.eval_rewards]
        require(
            "pixel_accuracy" not in names or config.data.prompts in WORLDS,
            "eval_rewards.pixel_accuracy",
            f"the prompts it knows, data.prompts {', '.join(WORLDS)}",
            config.data.prompts,
        )

    def parser(self, config: Config) -> Callable[[str, str], ParsedCompletion]:
        """Return the parser of completions."""
        return continued if config.data.form == "append" else parse_rewrite


def picture_data(config: Config, prompts: PromptSet, defaults: Sequence[RewardSection]) -> TaskData:
    """Return prompts, rewards and renderer of a task with pictures; judges are loaded later."""
    return TaskData(
        prompts,
        TaskRewards(REWARDS, defaults=defaults),
        render=lambda judges, asked: make_render(judges, config, baselines="baseline_images" in asked),
        learn=partial(learn_pictures, config),
        invalid=config.task.invalid,
    )


Make = Callable[[str, int], Iterable[Mapping[str, Any]]]
"""(split, how many) → records of prompts."""


def picture_prompts(config: Config, makers: Mapping[str, Make] = MappingProxyType({})) -> PromptSet:
    """Return the prompts of data.prompts: those of the miniature's worlds, of a maker, or of files."""
    name = config.data.prompts
    if name not in WORLDS and name not in makers:
        require(bool(name), "data.prompts", "a .jsonl or .txt file, or builtin", name)
        return prompts_of(config)
    for field in ("columns", "validation", "test"):
        value = getattr(config.data, field)
        require(not value, f"data.{field}", f'nothing with data.prompts "{name}", which is made', value)
    make = makers[name] if name in makers else partial(own_package("bridges", "miniature.world").prompts, WORLDS[name])
    counts = (TRAINING_PROMPTS, config.evaluation.validation_prompts or 1, config.evaluation.prompts or TEST_PROMPTS)
    return make_prompt_set(*map(make, SPLITS, counts))


def make_render(judges: Mapping[str, Any], config: Config, *, baselines: bool) -> Callable[..., RenderedImages]:
    """Return render(rows, texts `[P][G]`, iteration, evaluation) → RenderedImages.

    Pictures are on the device of the judge "scorer", if there is one; `baselines` also renders the unchanged prompts.
    """
    renderer: Renderer = judges["renderer"]
    device = judges.get("scorer", renderer).device

    def render(rows: Sequence[Row], texts: list[list[str]], iteration: int, evaluation: bool) -> RenderedImages:
        seeds = noise_seeds(config, rows, texts, iteration, evaluation=evaluation)
        count = len(seeds) // sum(map(len, texts))
        words = [text for group in texts for text in group for _ in range(count)]
        plain = [*zip([row.prompt for row in rows for _ in range(len(seeds) // len(rows))], seeds, strict=True)]
        places = {pair: place for place, pair in enumerate(dict.fromkeys(plain))}
        set_current_judge("judges.renderer")
        try:
            images, baseline = renderer.draw(words, seeds, evaluation=evaluation).to(device), None
            if baselines:
                prompts, noises = map(list, zip(*places, strict=True))
                unchanged = renderer.draw(prompts, noises, evaluation=evaluation)
                baseline = unchanged[[places[pair] for pair in plain]].to(device)
        except BaseException as error:
            if config.on_judge_error == "missing" and raised_by_user_code(error):
                return RenderedImages(None, None, count)
            raise
        return RenderedImages(images, baseline, count)

    return render
