"""Makes the environment of a task: what turns tokens into text, text into pictures, and both into rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config import Config
from grpo_jax.errors import UserError
from grpo_jax.rollout.chosen import Chosen
from grpo_jax.rollout.data import noise_seed, repeat_rows
from grpo_jax.rollout.rewards import Reward, collect_rewards
from grpo_jax.rollout.rollout import Environment
from grpo_jax.sampling.sampler import bucket_size
from grpo_jax.tasks.prompt_enhancement import rewards as image_rewards
from grpo_jax.tasks.prompt_enhancement import rewriting as prompt_enhancement

Bridges = Callable[[str], Any]


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
    chosen: Chosen,
    bridges: Callable[[], Bridges],
    say: Callable[..., None],
) -> Environment:
    """The environment of config.task.

    Args:
        config: The run.
        placement: Devices of the judges; None for a task without judges.
        loaded: The policy's folder, for its tokenizer.
        prompt_set: The data.
        chosen: Its rewards and watched measures.
        bridges: Imports the bridges package; called only where judges are needed.
        say: Prints a line per part.
    """
    render, renderer, scorer, second = None, None, None, None
    if config.task == "prompt_enhancement":
        load = bridges()
        renderer, scorer = _load_renderer(config, placement, load, say), _load_scorer(config, placement, load, say)
        second = _load_watching_scorer(config, placement, load, say)

    def judges(name: str) -> Any:
        if name == "head":
            return bridges()("clip").load_quality_head(config.scorer.quality_head, scorer.width)
        return scorer if name == "scorer" else getattr(renderer, name)

    functions, watch = ([make(judges) for make in makes] for makes in (chosen.rewards, chosen.watch))
    watch_names = chosen.watch_names
    if second is not None:
        watch_names, watch = (*watch_names, "watch_alignment"), [*watch, image_rewards.alignment(second)]
    if renderer is not None:
        wanted = any(_takes(function, "baseline_images") for function in (*functions, *watch))
        render = make_render(renderer, scorer.device, config, baselines=wanted)
    score = make_score(chosen.names, functions, watch_names, watch, missing=config.on_judge_error == "missing")
    encode = make_encode(loaded.tokenizer, config, loaded.pad_id, [row for part in prompt_set for row in part])
    decode = make_decode(loaded.tokenizer, config)
    return Environment(encode, decode, render, score, chosen.names, watch_names)


def check_judges(config: Config, bridges: Callable[[], Bridges]) -> None:
    """Refuses a renderer or a scorer that is not there or of another kind; no weight is read.

    Raises:
        UserError: Naming it.
    """
    if config.task != "prompt_enhancement":
        return
    load, scorer = bridges(), config.scorer
    load("diffusion").find_pipeline(config.renderer.path)
    load("clip").find_clip(scorer.model, scorer.pretrained)
    if scorer.watch_model:
        load("clip").find_clip(scorer.watch_model, scorer.watch_pretrained)


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


def _load_watching_scorer(config: Config, placement: Any, bridges: Bridges, say: Callable[..., None]) -> Any:
    section = config.scorer
    if not section.watch_model:
        return None
    scorer = bridges("clip").load_scorer(
        section.watch_model, pretrained=section.watch_pretrained, device=placement.scorer, dtype=section.dtype
    )
    say("watch", f"{section.watch_model}: a second CLIP that is never trained on")
    return scorer


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
