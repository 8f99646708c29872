"""Pipelines of diffusers: where one is, how it is loaded, what a renderer must know of it."""

import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bridges import bundled
from bridges.loading import first_line, local_folder, quiet_loading
from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

HUB_HELP = "log in with `hf auth login` after accepting the model's licence on its page, or give the path of a folder"


@dataclass(frozen=True)
class Description:
    """What a renderer must know of a pipeline.

    Attributes:
        kind: name of its class.
        window: tokens of a prompt that reach the picture, the special ones included: those of the text encoder that
            reads furthest.
        length: tokens given to text encoders that have no window of their own; None if all have.
        tokenizers: those that count.
        lowers: whether it reads small letters alone, without blanks at the ends.
        prefix: what it writes before each prompt.
        prefix_tokens: tokens of it that take nothing from the window.
        size: height and width that the model was made for.
        multiple: heights and widths are multiples of it.
        largest: the largest of them; None without a limit.
        takes: names of the arguments of a call.
    """

    kind: str
    window: int
    length: int | None
    tokenizers: tuple[Any, ...]
    lowers: bool
    prefix: str
    prefix_tokens: int
    size: int
    multiple: int
    largest: int | None
    takes: frozenset[str]

    def read(self, prompt: str) -> str:
        """What the tokenizers are given for a prompt."""
        return self.prefix + (prompt.lower().strip() if self.lowers else prompt)

    def check_size(self, size: int) -> None:
        """Raises UserError if the model cannot draw pictures of this height and width."""
        nearest = max(round(size / self.multiple), 1) * self.multiple
        nearest = min(nearest, self.largest or nearest)
        if size != nearest:
            limit = f" up to {self.largest}" if self.largest else ""
            raise UserError(
                f"picture size {size}: this renderer draws multiples of {self.multiple}{limit}; try {nearest}"
            )


def describe(pipeline: Any, length: int | None = None) -> Description:
    """Reads off a loaded pipeline what a renderer must know.

    Args:
        pipeline: of diffusers.
        length: tokens for text encoders without a window of their own; None takes the pipeline's default, and 1
            where it only pads what is absent with zeros (Stable Diffusion 3 without T5), which would cost time.

    Raises:
        UserError: it is made of other parts than text encoders, one denoiser and a decoder of latents, or does not
            say how many tokens it reads.
    """
    kind, takes = type(pipeline).__name__, inspect.signature(pipeline.__call__).parameters
    readers = text_readers(pipeline)
    clip = _clip_window(pipeline, [reader for reader in readers if _is_clip(reader[1])])
    others = [tokenizer for tokenizer, encoder in readers if not _is_clip(encoder)]
    if "max_sequence_length" not in takes:
        length = None
    else:
        length = length or (takes["max_sequence_length"].default if others else 1)
    if not readers or (others and not length) or not hasattr(pipeline, "vae_scale_factor"):
        raise UserError(f"a {kind} does not say how many tokens of a prompt it reads, or how its latents are drawn")
    limits = [clip if _is_clip(encoder) else length for _, encoder in readers]
    window = max(limits)
    used = [tokenizer for (tokenizer, _), limit in zip(readers, limits, strict=True) if limit == window]
    prefix = _prefix(takes)
    return Description(
        kind=kind,
        window=window,
        length=length,
        tokenizers=tuple(used),
        lowers=hasattr(pipeline, "_text_preprocessing"),
        prefix=prefix,
        # The pipeline takes up two of its own tokens into the window: the start, and the last before the prompt.
        prefix_tokens=len(used[0](prefix).input_ids) - 2 if prefix else 0,
        size=_default_size(pipeline),
        multiple=_multiple(pipeline),
        largest=_largest(pipeline),
        takes=frozenset(takes),
    )


def denoiser(pipeline: Any) -> torch.nn.Module:
    """The network that draws: a transformer or a U-Net."""
    return getattr(pipeline, "transformer", None) or pipeline.unet


def text_readers(pipeline: Any) -> list[tuple[Any, Any]]:
    """The (tokenizer, text encoder) pairs that are loaded."""
    names = [(f"tokenizer{end}", f"text_encoder{end}") for end in ("", "_2", "_3", "_4")]
    pairs = [tuple(getattr(pipeline, name, None) for name in pair) for pair in names]
    return [pair for pair in pairs if None not in pair]


def find_pipeline(path: str | Path, *kinds: str) -> tuple[Path | str, dict]:
    """Where a pipeline is, a folder or a hub id, and its table of contents; no weight is read.

    Args:
        path: a folder in diffusers' layout, the id of one on the Hugging Face hub, or "miniature".
        *kinds: names of the classes that will do; none for all.

    Raises:
        UserError: if there is no such pipeline, it is of another kind, or needs code that comes with it.
    """
    path = bundled(str(path), "renderer") or path
    source = local_folder(str(path)) or str(path)
    index = component_config(source, "model_index.json")
    name = index.get("_class_name")
    if kinds and name not in kinds:
        needed = kinds[0] if len(kinds) == 1 else "text-to-image pipeline of diffusers"
        raise UserError(f"{source} holds a {name}; the renderer needs a {needed}")
    if foreign := [part for part, value in index.items() if isinstance(value, list) and _is_foreign(value[0])]:
        raise UserError(f"{source}: {', '.join(foreign)} would run code that comes with the weights")
    return source, index


def _is_foreign(library: str | None) -> bool:
    """Whether a table of contents names a module that is not diffusers' or transformers' own."""
    import diffusers

    return library not in (None, "diffusers", "transformers") and not hasattr(diffusers.pipelines, library)


def component_config(source: Path | str, file: str) -> dict:
    """A config file of a pipeline's folder, or of one on the hub.

    Raises:
        UserError: it is not there, or no JSON.
    """
    with quiet_loading():
        try:
            if isinstance(source, Path):
                return load_json(source / file)
            from huggingface_hub import hf_hub_download

            return load_json(hf_hub_download(source, file))
        except Exception as error:
            raise _cannot_load(source, error) from error


def load_pipeline(kind: Any, source: Path | str, device: torch.device, dtype: torch.dtype, **parts: Any) -> Any:
    """Loads a pipeline, silently; only safetensors are read, and no code that comes with the weights is run.

    Args:
        kind: its class, or one of diffusers' automatic ones.
        source: as `find_pipeline` gives it.
        device: where it will run.
        dtype: of weights and computation.
        **parts: what is given in place of parts of the folder; None for those that are left out.

    Raises:
        UserError: its weights are missing, broken or gated.
    """
    with quiet_loading():
        try:
            pipeline = kind.from_pretrained(source, dtype=dtype, use_safetensors=True, **parts)
        except Exception as error:
            raise _cannot_load(source, error) from error
        if denoiser(pipeline).dtype != dtype:  # diffusers before `dtype=` ignores the argument
            pipeline.to(dtype=dtype)
        pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    _silence_truncation(pipeline)
    return pipeline


def _cannot_load(source: str | Path, error: Exception) -> UserError:
    reason = first_line(error)
    if isinstance(source, Path):
        return UserError(f"cannot load the renderer from {source}: {reason}; is the folder complete?")
    return UserError(f"cannot load the renderer {source!r} from the hub: {HUB_HELP} ({reason})")


def _silence_truncation(pipeline: Any) -> None:
    # What falls outside the window is counted by `count_tokens`; log lines in the progress bar say no more. The
    # pipeline has a line for every cut prompt, the tokenizers one for the first: they remember it in this dict.
    logging.getLogger(type(pipeline).__module__).setLevel(logging.ERROR)
    for tokenizer, _ in text_readers(pipeline):
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True


def _is_clip(encoder: Any) -> bool:
    return encoder.config.model_type == "clip_text_model"


def _clip_window(pipeline: Any, readers: list[tuple[Any, Any]]) -> int | None:
    """Tokens that the CLIP encoders read, which the pipeline is told."""
    if not readers:
        return None
    # a tokenizer saved without a limit reports 1e30: the encoder's positions are the real one
    window = min(min(t.model_max_length, e.config.max_position_embeddings) for t, e in readers)
    for tokenizer, _ in readers:
        tokenizer.model_max_length = window
    if hasattr(pipeline, "tokenizer_max_length"):
        pipeline.tokenizer_max_length = window
    return window


def _prefix(takes: Mapping[str, inspect.Parameter]) -> str:
    """Sana's instruction to its encoder, which is a language model."""
    lines = takes["complex_human_instruction"].default if "complex_human_instruction" in takes else None
    return "\n".join(lines or ())


def _default_size(pipeline: Any) -> int:
    sample = getattr(pipeline, "default_sample_size", None) or denoiser(pipeline).config.sample_size
    return sample * pipeline.vae_scale_factor


def _multiple(pipeline: Any) -> int:
    patch = denoiser(pipeline).config.get("patch_size") or 1
    return math.lcm(pipeline.vae_scale_factor * patch, pipeline.image_processor.config.vae_scale_factor)


def _largest(pipeline: Any) -> int | None:
    """Stable Diffusion 3 has a table of positions; the others compute or interpolate them."""
    if not type(pipeline).__name__.startswith("StableDiffusion3"):
        return None
    return _multiple(pipeline) * denoiser(pipeline).config.pos_embed_max_size
