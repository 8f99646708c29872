"""Prompts to pictures, through diffusers' `StableDiffusion3Pipeline` (Esser et al. 2024, arXiv:2403.03206).

The noise of a picture is a function of its seed alone and is drawn on the CPU, so that it is the same on
every device; the batch shape is fixed, so that a picture does not depend on how many others were asked for.
"""

import copy
import json
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

from bridges import bundled
from bridges.loading import first_line, local_folder, quiet_loading, torch_device, torch_dtype
from grpo_jax.errors import UserError

T5_WINDOW = 256  # the pipeline's own default for the tokens of the T5 encoder
HUB_HELP = (
    "log in with `hf auth login` after accepting the model's licence on its page, or give the path of a "
    "folder that holds a StableDiffusion3Pipeline"
)


class RenderError(RuntimeError):
    """The pipeline failed, or a picture came out with values that are not finite."""


@dataclass(frozen=True)
class RenderSettings:
    """How pictures are drawn.

    Attributes:
        steps: denoising steps.
        guidance: classifier-free guidance scale; 1 does without, at half the cost.
        size: height and width in pixels.
        max_sequence_length: tokens given to the T5 encoder, at most 512; None is 256 with T5 and 1 without it
            (the pipeline pads what is absent with zeros, which cost time).
        batch_size: pictures drawn at once; the last batch of a call is padded to it.
    """

    steps: int
    guidance: float
    size: int
    max_sequence_length: int | None = None
    batch_size: int = 1

    def __post_init__(self):
        """Checks the ranges."""
        for name in ("steps", "size", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.guidance < 1:
            raise ValueError(f"guidance: expected at least 1, got {self.guidance}")
        if self.max_sequence_length is not None and not 1 <= self.max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length: expected 1 to 512, got {self.max_sequence_length}")


class _ImageCache:
    """Pictures by key, least recently used first out, bounded in bytes."""

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
    """A loaded pipeline with its image cache; make one with `load_renderer`.

    Attributes:
        pipeline: the `StableDiffusion3Pipeline`.
        device: where it runs, and where its pictures are.
        window: tokens of a prompt that reach the picture, the special ones included: T5's where it is loaded
            (fewer if the settings' `max_sequence_length` is less), otherwise those of the CLIP encoders.
    """

    def __init__(self, pipeline, device: torch.device, cache_bytes: int):
        """Takes the parts as `load_renderer` makes them."""
        self.pipeline = pipeline
        self.device = device
        self.has_t5 = pipeline.text_encoder_3 is not None
        clip_window = _clip_window(pipeline)
        pipeline.tokenizer_max_length = clip_window
        self.window = T5_WINDOW if self.has_t5 else clip_window
        # Copies: a tokenizer keeps its truncation between calls, and counting goes on while another thread renders.
        used = [pipeline.tokenizer_3] if self.has_t5 else [pipeline.tokenizer, pipeline.tokenizer_2]
        self._counters = [copy.deepcopy(tokenizer) for tokenizer in used]
        self._cache = _ImageCache(cache_bytes)
        self._negatives: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lock = threading.Lock()  # the pipeline's scheduler keeps state during a call

    @property
    def default_size(self) -> int:
        """Height and width that the model was made for."""
        return self.pipeline.default_sample_size * self.pipeline.vae_scale_factor

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Tokens of each text, special ones included, before any is cut off at `window`."""
        # verbose=False: texts longer than the window are what is being counted, not worth a warning
        counts = [[len(t(text, verbose=False).input_ids) for text in texts] for t in self._counters]
        return [max(column) for column in zip(*counts, strict=True)]

    def render(self, prompts: list[str], seeds: list[int], settings: RenderSettings) -> torch.Tensor:
        """Draws one picture per prompt and seed.

        Args:
            prompts: B texts.
            seeds: B seeds of the noise, from 0 to 2^63 - 1; equal seeds give equal noise.
            settings: how to draw.

        Returns:
            Pictures, float32 [B, 3, size, size] in [0, 1], on the renderer's device. Equal (prompt, seed)
            pairs are drawn once, and pictures already in the cache are not drawn again.

        Raises:
            ValueError: if prompts and seeds differ in number.
            UserError: if the model cannot draw pictures of this size.
            RenderError: if the pipeline fails or a picture holds a value that is not finite.
        """
        if len(prompts) != len(seeds):
            raise ValueError(f"seeds: expected one for each of {len(prompts)} prompts, got {len(seeds)}")
        self._check_size(settings.size)
        if not prompts:
            return torch.zeros((0, 3, settings.size, settings.size), device=self.device)
        keys = [(prompt, int(seed), settings) for prompt, seed in zip(prompts, seeds, strict=True)]
        with self._lock:
            images = {key: image for key in keys if (image := self._cache.get(key)) is not None}
            missing = [key for key in dict.fromkeys(keys) if key not in images]
            for start in range(0, len(missing), settings.batch_size):
                batch = missing[start : start + settings.batch_size]
                for key, image in zip(batch, self._draw(batch, settings), strict=True):
                    images[key] = image.clone()  # its own storage: the cache counts what it keeps alive
                    self._cache.put(key, images[key])
        return torch.stack([images[key] for key in keys]).float()

    def _draw(self, batch: list[tuple], settings: RenderSettings) -> torch.Tensor:
        padded = batch + [batch[-1]] * (settings.batch_size - len(batch))
        length = settings.max_sequence_length or (T5_WINDOW if self.has_t5 else 1)
        negatives = {}
        if settings.guidance > 1:
            embeddings, pooled = self._empty_prompt(length)
            negatives["negative_prompt_embeds"] = embeddings.expand(len(padded), -1, -1)
            negatives["negative_pooled_prompt_embeds"] = pooled.expand(len(padded), -1)
        try:
            with torch.no_grad():
                images = self.pipeline(
                    prompt=[prompt for prompt, _, _ in padded],
                    generator=[torch.Generator().manual_seed(seed) for _, seed, _ in padded],
                    num_inference_steps=settings.steps,
                    guidance_scale=settings.guidance,
                    height=settings.size,
                    width=settings.size,
                    max_sequence_length=length,
                    output_type="pt",
                    **negatives,
                ).images[: len(batch)]
        except Exception as error:
            raise RenderError(f"the renderer failed: {type(error).__name__}: {first_line(error)}") from error
        finite = torch.isfinite(images).flatten(1).all(1).tolist()
        if not all(finite):
            prompt, seed, _ = batch[finite.index(False)]
            raise RenderError(
                f"picture of {prompt!r} (seed {seed}) has values that are not finite; "
                f"a renderer in {_dtype_name(images.dtype)} may need bfloat16 or float32"
            )
        return images

    def _empty_prompt(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The empty negative prompt as [1, tokens, width] and [1, width]; encoded once per length."""
        if length not in self._negatives:
            with torch.no_grad():
                embeddings, _, pooled, _ = self.pipeline.encode_prompt(
                    "", None, None, do_classifier_free_guidance=False, max_sequence_length=length
                )
            self._negatives[length] = embeddings, pooled
        return self._negatives[length]

    def _check_size(self, size: int) -> None:
        config = self.pipeline.transformer.config
        multiple = self.pipeline.vae_scale_factor * config.patch_size
        largest = multiple * config.pos_embed_max_size
        if size % multiple or size > largest:
            nearest = min(max(round(size / multiple), 1) * multiple, largest)
            raise UserError(
                f"picture size {size}: this renderer draws multiples of {multiple} up to {largest}; try {nearest}"
            )


@dataclass(frozen=True)
class ConfiguredRenderer:
    """A renderer with the settings of training and of evaluation; made by `renderers.stable_diffusion_3`."""

    renderer: Renderer
    training: RenderSettings
    evaluation: RenderSettings
    name: str

    @property
    def device(self) -> torch.device:
        """Where it runs, and where its pictures are."""
        return self.renderer.device

    @property
    def window(self) -> int:
        """Tokens of a prompt that reach the picture."""
        return self.renderer.window

    @property
    def summary(self) -> str:
        """One line for the opening of a run."""
        steps = self.training.steps
        return f"{self.name}: Stable Diffusion 3, {steps} steps, window {self.window} tokens, on {self.device}"

    def count_tokens(self, texts: list[str]) -> list[int]:
        """As `Renderer.count_tokens`."""
        return self.renderer.count_tokens(texts)

    def draw(self, texts: list[str], seeds: list[int], *, evaluation: bool) -> torch.Tensor:
        """As `Renderer.render`, with the settings of evaluation or of training."""
        return self.renderer.render(texts, seeds, self.evaluation if evaluation else self.training)


def load_renderer(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    use_t5: bool = True,
    cache_bytes: int = 256 * 2**20,
) -> Renderer:
    """Loads a Stable Diffusion 3 pipeline.

    Args:
        path: a folder in diffusers' layout, the id of one on the Hugging Face hub, or "miniature".
        device: "cpu" or "gpu:N".
        dtype: "float32", "float16" or "bfloat16"; of weights and computation.
        use_t5: load the third text encoder if the folder has one; without it prompts end at CLIP's window.
        cache_bytes: bound on the pictures kept on the device; 0 keeps none.

    Returns:
        The renderer. Only safetensors are read, and no code that comes with the weights is run.

    Raises:
        UserError: if there is no such pipeline, it is of another kind, or its weights are missing, broken or
            gated.
    """
    from diffusers import StableDiffusion3Pipeline

    target, torch_type = torch_device(device), torch_dtype(dtype)
    source, index = find_pipeline(path)
    with quiet_loading():
        has_t5 = (index.get("text_encoder_3") or [None, None])[1] is not None
        absent = {} if use_t5 and has_t5 else {"text_encoder_3": None, "tokenizer_3": None}
        try:
            pipeline = StableDiffusion3Pipeline.from_pretrained(
                source, dtype=torch_type, use_safetensors=True, **absent
            )
        except Exception as error:
            raise _cannot_load(source, error) from error
        if pipeline.transformer.dtype != torch_type:  # diffusers before `dtype=` ignores the argument
            pipeline.to(dtype=torch_type)
        pipeline.to(target)
    pipeline.set_progress_bar_config(disable=True)
    _silence_truncation(pipeline)
    return Renderer(pipeline, target, cache_bytes)


def find_pipeline(path: str | Path) -> tuple[Path | str, dict]:
    """Where a pipeline is, a folder or a hub id, and its table of contents; no weight is read.

    Args:
        path: as `load_renderer` takes it.

    Raises:
        UserError: if there is no such pipeline, or it is of another kind.
    """
    path = bundled(str(path), "renderer") or path
    source = local_folder(str(path)) or str(path)
    with quiet_loading():
        try:
            index = _model_index(source)
        except Exception as error:
            raise _cannot_load(source, error) from error
    name = index.get("_class_name")
    if name != "StableDiffusion3Pipeline":
        raise UserError(f"{source} holds a {name}; the renderer needs a StableDiffusion3Pipeline")
    return source, index


def _silence_truncation(pipeline) -> None:
    # What falls outside the window is counted by `count_tokens`; log lines in the progress bar say no more. The
    # pipeline has a line for every cut prompt, the tokenizers one for the first: they remember it in this dict.
    logging.getLogger("diffusers.pipelines.stable_diffusion_3").setLevel(logging.ERROR)
    for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2, pipeline.tokenizer_3):
        if tokenizer is not None:
            tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True


def _model_index(source: str | Path) -> dict:
    """The pipeline's table of contents, which says its class and its parts."""
    if isinstance(source, Path):
        return json.loads((source / "model_index.json").read_text())
    from huggingface_hub import hf_hub_download

    return json.loads(Path(hf_hub_download(source, "model_index.json")).read_text())


def _cannot_load(source: str | Path, error: Exception) -> UserError:
    reason = first_line(error)
    if isinstance(source, Path):
        return UserError(f"cannot load the renderer from {source}: {reason}; is the folder complete?")
    return UserError(f"cannot load the renderer {source!r} from the hub: {HUB_HELP} ({reason})")


def _clip_window(pipeline) -> int:
    parts = ((pipeline.tokenizer, pipeline.text_encoder), (pipeline.tokenizer_2, pipeline.text_encoder_2))
    # a tokenizer saved without a limit reports 1e30: the encoder's positions are the real one
    return min(min(t.model_max_length, e.config.max_position_embeddings) for t, e in parts)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
