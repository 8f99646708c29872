"""Prompts to pictures, through a text-to-image pipeline of diffusers.

The noise of a picture is a function of its seed alone and is drawn on the CPU, so that it is the same on
every device; the batch shape is fixed, so that a picture does not depend on how many others were asked for.
"""

import copy
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

from bridges.loading import first_line, torch_device, torch_dtype
from bridges.pipelines import describe, find_pipeline, load_pipeline

STABLE_DIFFUSION_3 = "StableDiffusion3Pipeline"
UNCHANGED = {"clean_caption": False, "use_resolution_binning": False}
"""For pipelines that would otherwise draw other words or another size than those they are asked for."""


class RenderError(RuntimeError):
    """The pipeline failed, or a picture came out with values that are not finite."""


@dataclass(frozen=True)
class RenderSettings:
    """How pictures are drawn.

    Attributes:
        steps: denoising steps.
        guidance: classifier-free guidance scale; 1 does without, at half the cost.
        size: height and width in pixels.
        max_sequence_length: tokens given to text encoders without a window of their own, at most 512; None takes
            what the renderer was loaded with.
        batch_size: pictures drawn at once; the last batch of a call is padded to it.
        negative_prompt: what guidance leads away from; None takes the pipeline's own.
    """

    steps: int
    guidance: float
    size: int
    max_sequence_length: int | None = None
    batch_size: int = 1
    negative_prompt: str | None = None

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
    """A loaded pipeline with its image cache; make one with `load_renderer` or `text_to_image.load_any`.

    Attributes:
        pipeline: of diffusers.
        device: where it runs, and where its pictures are.
        about: what is known of the pipeline.
    """

    def __init__(self, pipeline, device: torch.device, cache_bytes: int, length: int | None = None):
        """Takes a pipeline as it is loaded, and the tokens for text encoders without a window of their own."""
        self.pipeline = pipeline
        self.device = device
        self.about = describe(pipeline, length)
        # Copies: a tokenizer keeps its truncation between calls, and counting goes on while another thread renders.
        self._counters = [copy.deepcopy(tokenizer) for tokenizer in self.about.tokenizers]
        self._cache = _ImageCache(cache_bytes)
        self._negatives: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._lock = threading.Lock()  # the pipeline's scheduler keeps state during a call

    @property
    def window(self) -> int:
        """Tokens of a prompt that reach the picture (fewer if the settings' `max_sequence_length` is less)."""
        return self.about.window

    @property
    def default_size(self) -> int:
        """Height and width that the model was made for."""
        return self.about.size

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Tokens of each text, special ones included, before any is cut off at `window`."""
        # verbose=False: texts longer than the window are what is being counted, not worth a warning
        read = [self.about.read(text) for text in texts]
        counts = [[len(t(text, verbose=False).input_ids) for text in read] for t in self._counters]
        return [max(column) - self.about.prefix_tokens for column in zip(*counts, strict=True)]

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
        self.about.check_size(settings.size)
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
        length = settings.max_sequence_length or self.about.length
        options = {"guidance_scale": settings.guidance, "max_sequence_length": length, **UNCHANGED}
        try:
            with torch.no_grad():
                images = self.pipeline(
                    prompt=[prompt for prompt, _, _ in padded],
                    # One for each picture: noise has the pipeline's own shape, and a scheduler's later noise follows.
                    generator=[torch.Generator().manual_seed(seed) for _, seed, _ in padded],
                    num_inference_steps=settings.steps,
                    height=settings.size,
                    width=settings.size,
                    output_type="pt",
                    **{name: value for name, value in options.items() if name in self.about.takes},
                    **self._negative(settings, len(padded), length),
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

    def _negative(self, settings: RenderSettings, count: int, length: int | None) -> dict:
        """What the pipeline is told of the negative prompt.

        Stable Diffusion 3 would encode it anew for each picture, by T5 too: it is given the states of one.
        """
        text = settings.negative_prompt
        if settings.guidance <= 1 or (text is None and self.about.kind != STABLE_DIFFUSION_3):
            return {}
        if self.about.kind != STABLE_DIFFUSION_3:
            return {"negative_prompt": [text] * count}
        key = text or "", length
        if key not in self._negatives:
            embeddings, _, pooled, _ = self.pipeline.encode_prompt(
                key[0], None, None, do_classifier_free_guidance=False, max_sequence_length=length
            )
            self._negatives[key] = embeddings, pooled
        embeddings, pooled = self._negatives[key]
        return {
            "negative_prompt_embeds": embeddings.expand(count, -1, -1),
            "negative_pooled_prompt_embeds": pooled.expand(count, -1),
        }


@dataclass(frozen=True)
class ConfiguredRenderer:
    """A renderer with the settings of training and of evaluation, its name and what it is; made by a judge's file."""

    renderer: Renderer
    training: RenderSettings
    evaluation: RenderSettings
    name: str
    kind: str

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
        return f"{self.name}: {self.kind}, {steps} steps, window {self.window} tokens, on {self.device}"

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
    source, index = find_pipeline(path, STABLE_DIFFUSION_3)
    has_t5 = (index.get("text_encoder_3") or [None, None])[1] is not None
    absent = {} if use_t5 and has_t5 else {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = load_pipeline(StableDiffusion3Pipeline, source, target, torch_type, **absent)
    return Renderer(pipeline, target, cache_bytes)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
