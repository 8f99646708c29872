"""Makes the environment of a task: what turns tokens into text, text into pictures, and both into rewards."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config import Config, RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import noise_seed, repeat_rows
from grpo_jax.rollout.rewards import collect_rewards, load_reward
from grpo_jax.rollout.rollout import Environment
from grpo_jax.sampling.sampler import bucket_size
from grpo_jax.tasks.prompt_enhancement import rewards as image_rewards
from grpo_jax.tasks.prompt_enhancement import rewriting as prompt_enhancement

DEFAULT_REWARDS = (RewardSection("alignment"), RewardSection("faithfulness", 0.5), RewardSection("length", 0.2))
Bridges = Callable[[str], Any]
Reward = Callable[..., Any]


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


def make_environment(
    config: Config,
    placement: Any,
    loaded: Any,
    prompt_set: Any,
    rewards: Sequence[Reward] | None,
    bridges: Callable[[], Bridges],
    say: Callable[..., None],
) -> tuple[Environment, tuple[RewardSection, ...]]:
    """The environment of config.task, and its rewards as configured.

    Args:
        config: The run.
        placement: Devices of the judges; None for a task without judges.
        loaded: The policy's folder, for its tokenizer.
        prompt_set: The data.
        rewards: Functions in place of config.rewards.
        bridges: Imports the bridges package; called only where judges are needed.
        say: Prints a line per part.
    """
    render, renderer, scorer = None, None, None
    if config.task == "prompt_enhancement":
        load = bridges()
        renderer, scorer = _load_renderer(config, placement, load, say), _load_scorer(config, placement, load, say)
    sections, functions = _rewards(config, rewards, renderer, scorer, bridges)
    watch_names, watch = _watch(config, prompt_set, placement, renderer, scorer, bridges, say)
    if renderer is not None:
        wanted = any(_takes(function, "baseline_images") for function in (*functions, *watch))
        render = make_render(renderer, scorer.device, config, baselines=wanted)
    score = make_score(
        [section.label for section in sections],
        functions,
        watch_names,
        watch,
        missing=config.on_judge_error == "missing",
    )
    encode = make_encode(loaded.tokenizer, config, loaded.pad_id, [row for part in prompt_set for row in part])
    decode = make_decode(loaded.tokenizer, config)
    say("rewards", ", ".join(describe(section) for section in sections))
    names = tuple(section.label for section in sections)
    return Environment(encode, decode, render, score, names, tuple(watch_names)), sections


def describe(section: RewardSection) -> str:
    """A reward in a few words: name, weight, condition."""
    condition = f" where {section.condition_on} ≥ {section.threshold:g}" if section.condition_on else ""
    return f"{section.label} × {section.weight:g}{condition}"


def _load_renderer(config: Config, placement: Any, bridges: Bridges, say: Callable[..., None]) -> Any:
    section = config.renderer
    renderer = bridges("diffusion").load_renderer(
        section.path,
        device=placement.renderer,
        dtype=section.dtype,
        use_t5=section.use_t5,
        cache_bytes=section.cache_megabytes * 2**20,
    )
    window = f"window {renderer.window} tokens"
    say("renderer", f"{section.path}: Stable Diffusion 3, {section.steps} steps, {window}, on {renderer.device}")
    return renderer


def _load_scorer(config: Config, placement: Any, bridges: Bridges, say: Callable[..., None]) -> Any:
    section = config.scorer
    scorer = bridges("clip").load_scorer(
        section.model, pretrained=section.pretrained, device=placement.scorer, dtype=section.dtype
    )
    say("scorer", f"{section.model}: CLIP, features of {scorer.width}, on {scorer.device}")
    return scorer


def _rewards(
    config: Config, given: Sequence[Reward] | None, renderer: Any, scorer: Any, bridges: Callable[[], Bridges]
) -> tuple[tuple[RewardSection, ...], list[Reward]]:
    """The sections in force and a function for each."""
    if given is not None:
        names = [getattr(function, "__name__", type(function).__name__) for function in given]
        if not names or len(set(names)) != len(names):
            raise UserError(f"rewards: expected at least one function, each of another name, got {names}")
        return tuple(RewardSection(name) for name in names), list(given)
    sections = tuple(config.rewards)
    if not sections and config.task == "text":
        raise UserError("rewards: a text task needs at least one, such as my_rewards.py:function")
    if not sections:
        sections = DEFAULT_REWARDS
    sections = resolve_conditions(sections)
    return sections, [_reward(section, config, renderer, scorer, bridges) for section in sections]


def resolve_conditions(sections: Sequence[RewardSection]) -> tuple[RewardSection, ...]:
    """The sections with every condition said: a reward's default one filled in, "none" as no condition.

    Raises:
        UserError: A reward that must not be earned alone (quality) has nothing to be conditioned on.
    """
    names = [section.name for section in sections]
    resolved = []
    for section in sections:
        if section.condition_on == "none":
            section = dataclasses.replace(section, condition_on=None)
        elif section.condition_on is None and section.name == "quality":
            condition = image_rewards.default_condition(section.name, names)
            if condition is None:
                raise UserError(
                    "rewards.quality: a pretty picture of something else would earn it; list alignment or "
                    "alignment_gain among the rewards, or say condition_on: none"
                )
            section = dataclasses.replace(section, condition_on=condition[0], threshold=condition[1])
        resolved.append(section)
    return tuple(resolved)


def _reward(
    section: RewardSection, config: Config, renderer: Any, scorer: Any, bridges: Callable[[], Bridges]
) -> Reward:
    """A built-in reward with its judges, or the user's by import path."""
    name, options = section.name, section.options
    if ":" in name:
        return load_reward(name)
    if config.task == "text":
        raise UserError(f"rewards.{name}: a text task takes rewards by import path, as package.module:function")
    try:
        if name == "alignment":
            return image_rewards.alignment(scorer, **options)
        if name == "alignment_gain":
            return image_rewards.alignment_gain(scorer, **options)
        if name == "faithfulness":
            return image_rewards.faithfulness(scorer, **options)
        if name == "length":
            return image_rewards.length(renderer.count_tokens, renderer.window, **options)
        if name == "quality":
            head = config.scorer.quality_head
            if head is None:
                raise UserError("rewards.quality: expected scorer.quality_head to name a safetensors file, got none")
            return image_rewards.quality(scorer, bridges()("clip").load_quality_head(head, scorer.width), **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"rewards.{name}.options: {error}") from error
    raise UserError(
        f"rewards.name: expected alignment, alignment_gain, faithfulness, length, quality, package.module:function "
        f"or file.py:function, got {name!r}"
    )


def _watch(
    config: Config,
    prompt_set: Any,
    placement: Any,
    renderer: Any,
    scorer: Any,
    bridges: Callable[[], Bridges],
    say: Callable[..., None],
) -> tuple[list[str], list[Reward]]:
    """Measures that are logged beside the rewards and never trained on."""
    names, functions = list(config.watch), []
    for name in names:
        if name == "pixel_accuracy":
            if any("requested" not in row.columns for row in prompt_set.train[:1]):
                raise UserError('watch.pixel_accuracy: expected the miniature\'s prompts (data.prompts "miniature")')
            functions.append(image_rewards.pixel_accuracy(bridges()("miniature.world").pixel_accuracy))
        else:
            functions.append(_reward(RewardSection(name), config, renderer, scorer, bridges))
    if config.scorer.watch_model and scorer is not None:
        second = bridges()("clip").load_scorer(
            config.scorer.watch_model,
            pretrained=config.scorer.watch_pretrained,
            device=placement.scorer,
            dtype=config.scorer.dtype,
        )
        say("watch", f"{config.scorer.watch_model}: a second CLIP that is never trained on")
        names.append("watch_alignment")
        functions.append(image_rewards.alignment(second))
    return names, functions


def make_render(renderer: Any, device: Any, config: Config, *, baselines: bool) -> Callable[..., Pictures]:
    """render(rows, texts [P][G], iteration, evaluation) → Pictures; one noise for all texts of a prompt."""
    from bridges.diffusion import RenderError, RenderSettings

    section = config.renderer
    size = section.size or renderer.pipeline.default_sample_size * renderer.pipeline.vae_scale_factor
    training = RenderSettings(section.steps, section.guidance, size, batch_size=section.batch_size)
    evaluating = RenderSettings(section.eval_steps, section.eval_guidance, size, batch_size=section.batch_size)

    def render(rows: Sequence[Any], texts: list[list[str]], iteration: int, evaluation: bool) -> Pictures:
        settings = evaluating if evaluation else training
        seeds = [noise_seed(config.seed, iteration, row.id, evaluation=evaluation) for row in rows]
        group = len(texts[0])
        repeated = [seed for seed in seeds for _ in range(group)]
        try:
            images = renderer.render([text for texts_of in texts for text in texts_of], repeated, settings)
            plain = renderer.render([row.prompt for row in rows], seeds, settings) if baselines else None
        except RenderError:
            if config.on_judge_error == "missing":
                return Pictures(None, None, seeds)
            raise
        baseline = None if plain is None else plain.repeat_interleave(group, dim=0).to(device)
        return Pictures(images.to(device), baseline, seeds)

    return render


def make_score(
    names: Sequence[str],
    functions: Sequence[Reward],
    watch_names: Sequence[str],
    watch: Sequence[Reward],
    *,
    missing: bool,
    measure: Callable[[Sequence[str], dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """score(rows, texts [P][G], pictures) → rewards f32 [P, G, N], watched f32 [P, G, W].

    Args:
        names: Of the rewards.
        functions: Rewards.
        watch_names: Of the watched measures.
        watch: Watched measures.
        missing: A reward that fails is missing; otherwise it raises.
        measure: measure(completions, columns) → further columns, asked once for all rewards.
    """
    on_error = "missing" if missing else "raise"

    def score(rows: Sequence[Any], texts: list[list[str]], pictures: Any) -> tuple[np.ndarray, np.ndarray]:
        group = len(texts[0])
        prompts, columns = repeat_rows(rows, group)
        completions = [text for texts_of in texts for text in texts_of]
        if pictures is not None and pictures.images is not None:
            columns["images"] = pictures.images
            if pictures.baseline_images is not None:
                columns["baseline_images"] = pictures.baseline_images
        if measure is not None:
            columns |= measure(completions, columns)
        rewards = collect_rewards(functions, names, prompts, completions, columns, group, on_error=on_error)
        watched = collect_rewards(watch, watch_names, prompts, completions, columns, group, on_error=on_error)
        return rewards, watched

    return score


def make_encode(
    tokenizer: Any, config: Config, pad_id: int, rows: Sequence[Any] = ()
) -> Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]:
    """encode(prompts) → left-padded tokens i32 [P, L] and mask.

    Args:
        tokenizer: The policy's.
        config: Form, instruction and limit.
        pad_id: Fills up on the left.
        rows: Rows whose longest prompt sets L, so that all batches have one shape.

    Raises:
        UserError: A prompt is longer than data.max_prompt_tokens.
    """
    section = config.data

    def tokens_of(prompts: Sequence[str]) -> list[list[int]]:
        encoded = [
            prompt_enhancement.format_prompt(tokenizer, prompt, form=section.form, instruction=section.instruction)
            for prompt in prompts
        ]
        for prompt, ids in zip(prompts, encoded, strict=True):
            if len(ids) > section.max_prompt_tokens:
                raise UserError(
                    f"prompt {prompt[:60]!r}… takes {len(ids)} tokens with its instruction; data.max_prompt_tokens is "
                    f"{section.max_prompt_tokens}: shorten it or raise the limit"
                )
        return encoded

    longest = max((len(ids) for ids in tokens_of([row.prompt for row in rows])), default=1)

    def encode(prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = tokens_of(prompts)
        width = bucket_size(max(longest, *map(len, encoded)), smallest=8)
        return prompt_enhancement.pad_left(encoded, width, pad_id)

    return encode


def make_decode(tokenizer: Any, config: Config) -> Callable[..., tuple[str, str, bool]]:
    """decode(token ids, user's prompt) → (as written, text to judge, usable)."""

    form = config.data.form
    if config.task == "recommendation" or (config.task == "text" and form == "rewrite"):
        form = "text"

    def decode(tokens: np.ndarray, prompt: str) -> tuple[str, str, bool]:
        written, rewrite = prompt_enhancement.decode_completion(tokenizer, tokens, prompt, form=form)
        return written, rewrite.text, rewrite.usable

    return decode


def _takes(function: Reward, name: str) -> bool:
    """Whether a reward names an argument of its own (and does not only swallow it in **columns)."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
