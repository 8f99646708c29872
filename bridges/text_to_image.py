"""Any text-to-image pipeline of diffusers: what one can do, its scheduler and its LoRA weights by config."""

import difflib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bridges.diffusion import Renderer, RenderError, RenderSettings, component_config, find_pipeline, load_pipeline
from bridges.loading import first_line, local_folder, quiet_loading, torch_device, torch_dtype
from grpo_jax.errors import UserError


def find_any(path: str) -> tuple[Path | str, dict, type]:
    """Where a pipeline is, its table of contents and its class; no weight is read.

    Raises:
        UserError: There is no such pipeline, or it draws no pictures from text.
    """
    with quiet_loading():  # it imports all pipelines, with what they warn of
        from diffusers.pipelines.auto_pipeline import AUTO_TEXT2IMAGE_PIPELINES_MAPPING
    kinds = {kind.__name__: kind for kind in AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()}
    source, index = find_pipeline(path, *kinds)
    return source, index, kinds[index["_class_name"]]


def check_abilities(path: str, *, guidance: Sequence[float], negative_prompt: str, length: int) -> None:
    """Refuses what a pipeline does not do; read from its class and the config of what draws.

    Args:
        path: As `find_any` takes it.
        guidance: The scales that are asked for, in training and in evaluation.
        negative_prompt: Empty without one.
        length: Tokens for text encoders without a window of their own; 0 takes the pipeline's.

    Raises:
        UserError: Naming the pipeline, what it cannot do, and what to do.
    """
    source, index, kind = find_any(path)
    takes = inspect.signature(kind.__call__).parameters
    config = component_config(source, f"{'transformer' if 'transformer' in index else 'unet'}/config.json")
    who = f"{path} ({kind.__name__})"
    distilled = "true_cfg_scale" in takes  # FLUX and its kin, whose guidance is at most an input of the network
    if max(guidance) > 1 and ("guidance_scale" not in takes or (distilled and not config.get("guidance_embeds"))):
        raise UserError(f"{who} draws without guidance: set guidance and eval_guidance to 1")
    # A guidance that is an input draws nothing that a picture could be led away from; consistency models' is one too.
    embedded = distilled or config.get("time_cond_proj_dim") is not None
    if negative_prompt and ("negative_prompt" not in takes or embedded):
        raise UserError(f"{who} takes no negative prompt: leave negative_prompt empty")
    if negative_prompt and min(guidance) <= 1:
        raise UserError(
            f"{who} reads a negative prompt under guidance alone: set guidance and eval_guidance above 1, or leave "
            "negative_prompt empty"
        )
    if length and "max_sequence_length" not in takes:
        raise UserError(f"{who} has text encoders of a fixed window: leave max_sequence_length at 0")


def find_scheduler(name: str, options: Mapping[str, Any]) -> type:
    """The scheduler of diffusers that has a name, and these fields in its config.

    Raises:
        UserError: There is none, or it has no such fields.
    """
    import diffusers

    kind = getattr(diffusers, name, None)
    if packages := getattr(kind, "_backends", None):  # what diffusers has in place of one that it cannot import
        missing = ", ".join(package for package in packages if importlib.util.find_spec(package) is None)
        raise UserError(f"scheduler: {name} of diffusers needs {missing}, which is not installed")
    if not (inspect.isclass(kind) and issubclass(kind, diffusers.SchedulerMixin)):
        known = [other for other in dir(diffusers) if other.endswith("Scheduler")]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0)
        raise UserError(f"scheduler: diffusers has none called {name!r}; did you mean {close[0]}?")
    fields = inspect.signature(kind.__init__).parameters.keys() - {"self"}
    if unknown := sorted(options.keys() - fields):
        raise UserError(f"scheduler_options: {name} has no {', '.join(unknown)}; it has {', '.join(sorted(fields))}")
    return kind


def find_lora(path: str) -> Path | str:
    """A folder or a safetensors file of LoRA weights, or the hub id of one.

    Raises:
        UserError: There is no such folder, or it does not say which of its files is meant.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return file
    folder = local_folder(path)
    if folder is None:
        return path
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(files) != 1 and "pytorch_lora_weights.safetensors" not in files:
        found = ", ".join(files) or "none"
        raise UserError(f"lora {path}: expected one safetensors file, found {found}; name the file")
    return folder


def load_any(
    path: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    length: int = 0,
    scheduler: str = "",
    scheduler_options: Mapping[str, Any] | None = None,
    lora: str = "",
    lora_scale: float = 1.0,
    cache_bytes: int = 256 * 2**20,
) -> Renderer:
    """Loads a text-to-image pipeline.

    Args:
        path: A folder in diffusers' layout, the id of one on the Hugging Face hub, or "miniature".
        device: "cpu" or "gpu:N".
        dtype: "float32", "float16" or "bfloat16"; of weights and computation.
        length: Tokens for text encoders without a window of their own; 0 takes the pipeline's.
        scheduler: Class of diffusers in place of the pipeline's own; empty keeps it.
        scheduler_options: Fields of its config that differ from those of the pipeline's scheduler.
        lora: As `find_lora` takes it; empty without.
        lora_scale: What LoRA weights are multiplied by.
        cache_bytes: Bound on the pictures kept on the device; 0 keeps none.

    Returns:
        The renderer. Only safetensors are read, no code that comes with the weights is run, and what checks or marks
        pictures (safety checker, watermark) is left out: it would paint what is judged.

    Raises:
        UserError: There is no such pipeline, scheduler or LoRA, or weights are missing, broken, gated or do not fit.
    """
    target, torch_type = torch_device(device), torch_dtype(dtype)
    source, index, kind = find_any(path)
    pipeline = load_pipeline(kind, source, target, torch_type, **_left_out(kind, index))
    if scheduler or scheduler_options:
        name, options = scheduler or type(pipeline.scheduler).__name__, scheduler_options or {}
        try:
            pipeline.scheduler = find_scheduler(name, options).from_config(pipeline.scheduler.config, **options)
        except (ImportError, TypeError, ValueError) as error:
            raise UserError(f"scheduler {name}: {first_line(error)}") from error
    if lora:
        _merge_lora(pipeline, lora, lora_scale)
    return Renderer(pipeline, target, cache_bytes, length or None)


def try_out(renderer: Renderer, settings: RenderSettings) -> None:
    """Draws a picture in two steps, before anything is trained on.

    Raises:
        UserError: The pipeline cannot draw with these settings and its scheduler, or draws noise of which no seed
            decides: pictures of one seed would then differ by more than their words.
    """
    before = _random_states(renderer.device)
    try:
        renderer.render([""], [0], replace(settings, steps=2))
    except RenderError as error:
        raise UserError(f"{renderer.about.kind}: {error}") from error
    if not all(map(torch.equal, before, _random_states(renderer.device))):
        scheduler = type(renderer.pipeline.scheduler).__name__
        raise UserError(f"{renderer.about.kind}: {scheduler} draws noise that no seed decides; take another scheduler")


def _random_states(device: torch.device) -> list[torch.Tensor]:
    cards = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cards]


def _left_out(kind: type, index: Mapping[str, Any]) -> dict[str, Any]:
    """What is passed in place of parts: those that the folder says it lacks, and what would paint the pictures."""
    parts: dict[str, Any] = {name: None for name, value in index.items() if value == [None, None]}
    painting = {"safety_checker": None, "requires_safety_checker": False, "add_watermarker": False}
    known = inspect.signature(kind.__init__).parameters
    return parts | {name: value for name, value in painting.items() if name in known}


def _merge_lora(pipeline: Any, path: str, scale: float) -> None:
    """Adds LoRA weights to those of the pipeline."""
    if not hasattr(pipeline, "load_lora_weights"):
        raise UserError(f"lora: a {type(pipeline).__name__} takes no LoRA weights")
    with quiet_loading():
        try:
            pipeline.load_lora_weights(find_lora(path), use_safetensors=True)
        except UserError:
            raise
        except Exception as error:  # weights of another network raise what they like
            raise UserError(f"cannot load LoRA weights from {path}: {first_line(error)}") from error
        fitting = pipeline.get_list_adapters()
        if not fitting:
            raise UserError(f"lora {path}: none of its weights belongs to a {type(pipeline).__name__}")
        pipeline.fuse_lora(components=list(fitting), lora_scale=scale)  # by default FLUX's text encoder is left out
        pipeline.unload_lora_weights()
