"""Render prompts with a text-to-image pipeline of diffusers.

The noise of a picture depends only on its seed and is drawn on the CPU, so it is the same on every device. The batch
shape is fixed, so a picture does not depend on the other pictures of a call.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bridges import bundled
from bridges.judges import PipelineJudge, RenderSettings
from bridges.loading import DTYPES, choose_workers, first_line, loading, local_folder, side_by_side, torch_device
from grpo_jax.config.fields import require
from grpo_jax.config.files import load_json

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    TextReader = tuple[PreTrainedTokenizerBase, PreTrainedModel]


def token_limits(
    pipeline: DiffusionPipeline, length: int | None = None
) -> tuple[int | None, list[tuple[PreTrainedTokenizerBase, int]]]:
    """Return the token limit of text encoders without their own window, and each tokenizer with its limit.

    A `length` of None takes the pipeline's default. UserError if the pipeline has no such limit.
    """
    kind, readers = type(pipeline).__name__, text_readers(pipeline)
    clip = _clip_window(pipeline, [reader for reader in readers if _is_clip(reader[1])])
    others = [tokenizer for tokenizer, encoder in readers if not _is_clip(encoder)]
    argument = inspect.signature(pipeline.__call__).parameters.get("max_sequence_length")
    length = None if argument is None else length or argument.default
    known = readers and (length or not others) and hasattr(pipeline, "vae_scale_factor")
    require(known, kind, "a pipeline that says how many tokens it reads and how its latents are drawn", kind)
    return length, [(tokenizer, clip if _is_clip(encoder) else length) for tokenizer, encoder in readers]


def denoiser(pipeline: DiffusionPipeline) -> torch.nn.Module:
    """Return the transformer or U-Net."""
    return getattr(pipeline, "transformer", None) or pipeline.unet


def text_readers(pipeline: DiffusionPipeline) -> list[TextReader]:
    """Return the loaded (tokenizer, text encoder) pairs."""
    names = [(f"tokenizer{end}", f"text_encoder{end}") for end in ("", "_2", "_3", "_4")]
    pairs = [tuple(getattr(pipeline, name, None) for name in pair) for pair in names]
    return [pair for pair in pairs if None not in pair]


def _is_clip(encoder: PreTrainedModel) -> bool:
    return encoder.config.model_type == "clip_text_model"


def _clip_window(pipeline: DiffusionPipeline, readers: list[TextReader]) -> int | None:
    """Return the token window of the CLIP encoders, and set it in the pipeline and its tokenizers."""
    if not readers:
        return None
    # a tokenizer saved without a limit reports 1e30; the encoder's positions are the real limit
    window = min(min(t.model_max_length, e.config.max_position_embeddings) for t, e in readers)
    for tokenizer, _ in readers:
        tokenizer.model_max_length = window
    if hasattr(pipeline, "tokenizer_max_length"):
        pipeline.tokenizer_max_length = window
    return window


def find_pipeline(path: str | Path, *kinds: str) -> tuple[Path | str, dict]:
    """Find a pipeline and its table of contents, without reading weights.

    `path` is a folder in diffusers' layout, a hub id, or "miniature"; `kinds` are the accepted class names, none for
    all. UserError if there is no such pipeline, or it needs its own code.
    """
    import diffusers
    from huggingface_hub import hf_hub_download

    path = bundled(str(path), "renderer") or path
    source = local_folder(str(path)) or str(path)
    file = "model_index.json"
    with _loading(source):
        index = load_json(source / file if isinstance(source, Path) else Path(hf_hub_download(source, file)))
    name = index.get("_class_name")
    needed = kinds[0] if len(kinds) == 1 else "text-to-image pipeline of diffusers"
    require(not kinds or name in kinds, str(source), f"a {needed}", f"a {name}")
    libraries = {part: value[0] for part, value in index.items() if isinstance(value, list)}
    known = {None, "diffusers", "transformers", *dir(diffusers.pipelines)}
    foreign = [part for part, library in libraries.items() if library not in known]
    require(not foreign, str(source), "no code that comes with the weights", ", ".join(foreign))
    return source, index


def load_pipeline(
    kind: type[DiffusionPipeline], source: Path | str, device: torch.device, dtype: torch.dtype, **parts: object
) -> DiffusionPipeline:
    """Load a pipeline silently, only from safetensors and without running code of its folder.

    `source` is from `find_pipeline`. `parts` replace parts of the folder; None omits a part. UserError if the weights
    are missing, broken or gated.
    """
    with _loading(source):
        pipeline = kind.from_pretrained(source, dtype=dtype, use_safetensors=True, **parts)
        if denoiser(pipeline).dtype != dtype:  # diffusers before `dtype=` ignores the argument
            pipeline.to(dtype=dtype)
        pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    # Silence truncation warnings: `count_tokens` reports the same. The pipeline warns for every truncated prompt, a
    # tokenizer only once, which it remembers in this dict.
    logging.getLogger(type(pipeline).__module__).setLevel(logging.ERROR)
    for tokenizer, _ in text_readers(pipeline):
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return pipeline


def _loading(source: Path | str) -> AbstractContextManager[None]:
    """Load silently; report a failure in one line that tells how to get the weights."""
    hub = "log in with `hf auth login` after accepting the model's licence on its page, or give the path of a folder"
    return loading(f"the renderer {source} ({'is the folder complete?' if isinstance(source, Path) else hub})")


UNCHANGED = {"clean_caption": False, "use_resolution_binning": False}
"""For pipelines that would otherwise draw other words, or another size than requested."""


class RenderError(RuntimeError):
    """The pipeline failed, or a picture is not finite."""


class _ImageCache:
    """LRU cache of pictures by key, bounded in bytes."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.images: OrderedDict[tuple, torch.Tensor] = OrderedDict()
        self.bytes = 0

    def get(self, key: tuple) -> torch.Tensor | None:
        if key in self.images:
            self.images.move_to_end(key)
        return self.images.get(key)

    def put(self, key: tuple, image: torch.Tensor) -> None:
        if key in self.images or image.nbytes > self.max_bytes:
            return
        self.images[key] = image
        self.bytes += image.nbytes
        while self.bytes > self.max_bytes:
            self.bytes -= self.images.popitem(last=False)[1].nbytes


class Renderer:
    """A loaded pipeline with settings for training and evaluation, and an image cache; made by a judge's module."""

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        device: torch.device,
        training: RenderSettings,
        evaluation: RenderSettings,
        *,
        name: str = "",
        cache_megabytes: int = 256,
        length: int | None = None,
    ):
        """Wrap a loaded pipeline; `length` in tokens is for text encoders without their own window."""
        self.pipeline = pipeline
        self.device = device
        self._takes = inspect.signature(pipeline.__call__).parameters
        # the miniature was trained with one zero in place of T5's states, where diffusers has as many as T5 has tokens
        self._length, limits = token_limits(pipeline, length or (1 if bundled(name, "renderer") else None))
        self.window = max(limit for _, limit in limits)  # tokens of a prompt that affect the picture, with special ones
        sample = getattr(pipeline, "default_sample_size", None) or denoiser(pipeline).config.get("sample_size", 0)
        size = sample * pipeline.vae_scale_factor
        require(size or training.size, "size", f"the pixels of a side, as a {type(pipeline).__name__} names none", 0)
        pipeline._guidance_scale = 1.0  # guides some pipelines, such as Z-Image's, for which 0 switches it off
        self._unguided = 0.0 if getattr(pipeline, "do_classifier_free_guidance", False) else 1.0
        self.training = replace(training, size=training.size or size)
        self.evaluation = replace(evaluation, size=evaluation.size or size)
        self.name = name  # path of the pipeline
        self.kind = type(pipeline).__name__  # for the line at the start of a run
        # maps pictures and their seeds to the shown pictures; None keeps them
        self.change: Callable[[torch.Tensor, list[int]], torch.Tensor] | None = None
        # Copy them: a tokenizer keeps its truncation between calls, and counting runs while another thread renders.
        self._counters = [copy.deepcopy(tokenizer) for tokenizer, limit in limits if limit == self.window]
        self._cache = _ImageCache(cache_megabytes * 2**20)
        self._lock = threading.Lock()
        self._workers = choose_workers(device, denoiser(pipeline))
        self._idle = [pipeline]  # one for each running batch: schedulers and tokenizers keep state during a call

    def __str__(self) -> str:
        steps = f"{self.training.steps} step{'s' if self.training.steps > 1 else ''}"
        return f"{self.name}: {self.kind}, {steps}, window {self.window} tokens, on {self.device}"

    def draw(self, texts: list[str], seeds: list[int], *, evaluation: bool) -> torch.Tensor:
        """Run `render` with the settings of evaluation or training, and `change` the pictures."""
        images = self.render(texts, seeds, self.evaluation if evaluation else self.training)
        return images if self.change is None else self.change(images, seeds)

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Count the tokens of each text, including special tokens, before truncation at `window`."""
        # verbose=False: texts longer than the window need no warning here
        counts = [[len(tokenizer(text, verbose=False).input_ids) for text in texts] for tokenizer in self._counters]
        return [max(column) for column in zip(*counts, strict=True)]

    def render(self, prompts: list[str], seeds: list[int], settings: RenderSettings) -> torch.Tensor:
        """Render one picture per prompt and seed: float32 [B, 3, size, size] in [0, 1], on the renderer's device.

        Seeds are from 0 to 2^63 - 1; equal seeds give equal noise. Equal (prompt, seed) pairs are rendered once, and
        cached pictures are not rendered again.

        Raises:
            RenderError: The pipeline fails, for example at an unsupported size, or a picture is not finite.
        """
        if not prompts:
            return torch.zeros((0, 3, settings.size, settings.size), device=self.device)
        keys = [(prompt, int(seed), settings) for prompt, seed in zip(prompts, seeds, strict=True)]
        with self._lock:
            images = {key: image for key in keys if (image := self._cache.get(key)) is not None}
            missing = [key for key in dict.fromkeys(keys) if key not in images]
            size = settings.batch_size
            batches = [[key[:2] for key in missing[at : at + size]] for at in range(0, len(missing), size)]
            models = {id(part): part for part in self.pipeline.components.values() if isinstance(part, torch.nn.Module)}
            while len(self._idle) < min(self._workers, len(batches)):
                self._idle.append(copy.deepcopy(self.pipeline, dict(models)))
            drawn = side_by_side(lambda batch: self._draw(batch, settings), batches, self._workers)
            for key, image in zip(missing, itertools.chain.from_iterable(drawn), strict=True):
                images[key] = image.clone()  # its own storage: the cache counts the bytes it keeps alive
                self._cache.put(key, images[key])
        return torch.stack([images[key] for key in keys]).float()

    def _draw(
        self,
        batch: list[tuple[str, int]],
        settings: RenderSettings,
        on_step_end: Callable[..., dict[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Render one batch of (prompt, seed), padded to the settings' batch size; diffusers calls `on_step_end`."""
        padded = batch + [batch[-1]] * (settings.batch_size - len(batch))
        options = {
            "guidance_scale": settings.guidance if settings.guidance > 1 else self._unguided,
            "max_sequence_length": self._length,
            "height": settings.size,
            "width": settings.size,
            "callback_on_step_end": on_step_end,
            **UNCHANGED,
        }
        if settings.negative_prompt and settings.guidance > 1:
            options["negative_prompt"] = [settings.negative_prompt] * len(padded)
        pipeline = self._idle.pop()
        try:
            with torch.no_grad():
                images = pipeline(
                    prompt=[prompt for prompt, _ in padded],
                    # One generator per picture: it also gives the noise of the scheduler's later steps.
                    generator=[torch.Generator().manual_seed(seed) for _, seed in padded],
                    num_inference_steps=settings.steps,
                    output_type="pt",
                    **{name: value for name, value in options.items() if name in self._takes},
                ).images[: len(batch)]
        except Exception as error:
            raise RenderError(f"the renderer failed: {type(error).__name__}: {first_line(error)}") from error
        finally:
            self._idle.append(pipeline)
        if images.shape[-1] != settings.size:
            raise RenderError(f"size: the model draws {images.shape[-1]} pixels where {settings.size} were asked for")
        finite = torch.isfinite(images).flatten(1).all(1).tolist()
        if not all(finite):
            prompt, seed = batch[finite.index(False)]
            raise RenderError(
                f"picture of {prompt!r} (seed {seed}) has values that are not finite; "
                f"a renderer in {str(images.dtype).removeprefix('torch.')} may need bfloat16 or float32"
            )
        return images


def load_stable_diffusion_3(judge: PipelineJudge, device: str, *, use_t5: bool = True) -> Renderer:
    """Load a Stable Diffusion 3 pipeline; `use_t5` keeps the third text encoder, if the folder has one."""
    from diffusers import StableDiffusion3Pipeline

    target = torch_device(device)
    source, index = find_pipeline(judge.path, StableDiffusion3Pipeline.__name__)
    has_t5 = (index.get("text_encoder_3") or [None, None])[1] is not None
    absent = {} if use_t5 and has_t5 else {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = load_pipeline(StableDiffusion3Pipeline, source, target, DTYPES[judge.dtype], **absent)
    renderer = Renderer(pipeline, target, *judge.settings(), name=judge.path, cache_megabytes=judge.cache_megabytes)
    renderer.kind = "Stable Diffusion 3"
    return renderer
