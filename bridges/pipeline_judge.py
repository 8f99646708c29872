"""What the judges that draw with any pipeline of diffusers share: their fields, what they refuse, how they load."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_jax.config.fields import Count, PositiveCount, check_ranges, may_change, require
from grpo_jax.errors import UserError

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline, SchedulerMixin

    from bridges.diffusion import Renderer


@dataclass(frozen=True)
class PipelineJudge:
    """Draws pictures with a pipeline of diffusers; a subclass says which (`find`).

    Args:
        path: Folder or hub id of the pipeline, or "miniature".
        dtype: Type of its weights.
        size: Width and height in pixels; 0 takes the model's own.
        steps: Denoising steps in training.
        guidance: Guidance scale in training; 1 switches it off.
        eval_steps: Denoising steps in evaluation.
        eval_guidance: Guidance scale in evaluation.
        negative_prompt: What guidance leads away from, with guidance and eval_guidance above 1; empty is what the
            pipeline does without.
        max_sequence_length: Tokens that a text encoder without a window of its own reads; 0 takes the pipeline's.
        scheduler: Scheduler of diffusers, by its class; empty keeps the pipeline's.
        scheduler_options: Fields of the scheduler's config that differ from the pipeline's.
        lora: Folder, safetensors file or hub id of LoRA weights, which are added to the pipeline's; empty without.
        lora_scale: What they are multiplied by.
        batch_size: Pictures drawn at once.
        cache_megabytes: Memory for pictures kept by (prompt, seed, settings); 0 keeps none.
    """

    path: str = "miniature"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    size: Count = 0
    steps: PositiveCount = 10
    guidance: float = 1.0
    eval_steps: PositiveCount = 10
    eval_guidance: float = 1.0
    negative_prompt: str = ""
    max_sequence_length: int = 0
    scheduler: str = ""
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    lora: str = ""
    lora_scale: float = 1.0
    batch_size: PositiveCount = may_change(8)
    cache_megabytes: Count = may_change(256)

    def __post_init__(self) -> None:
        check_ranges(self, "")
        for name in ("guidance", "eval_guidance"):
            require(getattr(self, name) >= 1, name, "a number >= 1", getattr(self, name))
        length = self.max_sequence_length
        require(0 <= length <= 512, "max_sequence_length", "a number from 0 to 512", length)

    def check(self) -> None:
        """Refuse what is not there, and what the pipeline cannot do; read from its configs, no weight is read."""
        source, index, kind = self.find()
        self._check_abilities(source, index, kind)
        if self.scheduler or self.scheduler_options:
            find_scheduler(self.scheduler or index["scheduler"][1], self.scheduler_options)
        if self.lora:
            find_lora(self.lora)

    def find(self) -> tuple[Path | str, dict, type[DiffusionPipeline]]:
        """Find the pipeline, its table of contents and its class; no weight is read."""
        raise NotImplementedError

    def prepare(self, renderer: Renderer) -> None:
        """Set what a subclass draws with besides."""

    def _check_abilities(self, source: Path | str, index: dict, kind: type[DiffusionPipeline]) -> None:
        """Refuse guidance, a negative prompt or a length that the pipeline does not take."""
        from bridges.diffusion import component_config

        takes = inspect.signature(kind.__call__).parameters
        config = component_config(source, f"{'transformer' if 'transformer' in index else 'unet'}/config.json")
        who = f"{self.path} ({kind.__name__})"
        guidance = (self.guidance, self.eval_guidance)
        distilled = "true_cfg_scale" in takes  # FLUX and its kin, whose guidance is at most an input of the network
        if max(guidance) > 1 and ("guidance_scale" not in takes or (distilled and not config.get("guidance_embeds"))):
            raise UserError(f"{who} draws without guidance: set guidance and eval_guidance to 1")
        # A guidance that is an input has no negative prompt to lead away from; consistency models' is one too.
        embedded = distilled or config.get("time_cond_proj_dim") is not None
        if self.negative_prompt and ("negative_prompt" not in takes or embedded):
            raise UserError(f"{who} takes no negative prompt: leave negative_prompt empty")
        if self.negative_prompt and min(guidance) <= 1:
            raise UserError(
                f"{who} reads a negative prompt under guidance alone: set guidance and eval_guidance above 1, or leave "
                "negative_prompt empty"
            )
        if self.max_sequence_length and "max_sequence_length" not in takes:
            raise UserError(f"{who} has text encoders of a fixed window: leave max_sequence_length at 0")

    def load(self, device: str) -> Renderer:
        """Load the pipeline on "cpu" or "gpu:N" and draw a picture with it.

        Only safetensors are read, and no code that comes with the weights is run. Parts that check or mark pictures
        (safety checker, watermark) are left out: they would paint what is judged.

        Raises:
            UserError: No such pipeline, scheduler or LoRA; weights that are missing, broken, gated or do not fit.
        """
        from bridges.diffusion import Renderer, RenderSettings, load_pipeline
        from bridges.loading import torch_device, torch_dtype

        self.check()
        target = torch_device(device)
        source, index, kind = self.find()
        pipeline = load_pipeline(kind, source, target, torch_dtype(self.dtype), **_left_out(kind, index))
        if self.scheduler or self.scheduler_options:
            self._set_scheduler(pipeline)
        if self.lora:
            _merge_lora(pipeline, self.lora, self.lora_scale)
        training = RenderSettings(
            self.steps,
            self.guidance,
            self.size,
            batch_size=self.batch_size,
            negative_prompt=self.negative_prompt or None,
        )
        renderer = Renderer(
            pipeline,
            target,
            training,
            replace(training, steps=self.eval_steps, guidance=self.eval_guidance),
            name=self.path,
            cache_megabytes=self.cache_megabytes,
            length=self.max_sequence_length or None,
        )
        self.prepare(renderer)
        try_out(renderer)
        lora = f" and LoRA {self.lora} × {self.lora_scale:g}" if self.lora else ""
        renderer.kind = f"{renderer.about.kind} with {type(pipeline.scheduler).__name__}{lora}"
        return renderer

    def _set_scheduler(self, pipeline: DiffusionPipeline) -> None:
        from bridges.loading import first_line

        name = self.scheduler or type(pipeline.scheduler).__name__
        options = self.scheduler_options
        try:
            pipeline.scheduler = find_scheduler(name, options).from_config(pipeline.scheduler.config, **options)
        except (ImportError, TypeError, ValueError) as error:
            raise UserError(f"scheduler {name}: {first_line(error)}") from error

    def memory(self) -> list[tuple[str, int, str]]:
        """Weights from the config files, and the working memory of the VAE; LoRA weights are merged."""
        from bridges.loading import renderer_memory

        return renderer_memory(self)

    def savings(self) -> list[dict[str, object]]:
        """Fields that can take less memory; working memory first."""
        return [{"batch_size": 1}, {"dtype": "bfloat16"}]


def find_scheduler(name: str, options: Mapping[str, object]) -> type[SchedulerMixin]:
    """Find the scheduler of diffusers of that name; UserError if it is missing or lacks one of the fields."""
    import diffusers

    kind = getattr(diffusers, name, None)
    if packages := getattr(kind, "_backends", None):  # what diffusers has in place of one that it cannot import
        missing = ", ".join(package for package in packages if importlib.util.find_spec(package) is None)
        raise UserError(f"scheduler: {name} of diffusers needs {missing}, which is not installed")
    if not (inspect.isclass(kind) and issubclass(kind, diffusers.SchedulerMixin)):
        schedulers = [other for other in dir(diffusers) if other.endswith("Scheduler")]
        close = difflib.get_close_matches(name, schedulers, n=1, cutoff=0)
        raise UserError(f"scheduler: diffusers has none called {name!r}; did you mean {close[0]}?")
    fields = inspect.signature(kind.__init__).parameters.keys() - {"self"}
    if unknown := sorted(options.keys() - fields):
        raise UserError(f"scheduler_options: {name} has no {', '.join(unknown)}; it has {', '.join(sorted(fields))}")
    return kind


def find_lora(path: str) -> Path | str:
    """Find LoRA weights, a folder, a safetensors file or a hub id; UserError if a folder's file is ambiguous."""
    from bridges.loading import local_folder

    file = Path(path).expanduser()
    if file.is_file():
        return file
    folder = local_folder(path)
    if folder is None:
        return path
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(files) != 1 and "pytorch_lora_weights.safetensors" not in files:
        have = ", ".join(files) or "none"
        raise UserError(f"lora {path}: expected one safetensors file, found {have}; name the file")
    return folder


def try_out(renderer: Renderer) -> None:
    """Draw a picture in two steps, before anything is trained on; UserError if the pipeline or its scheduler cannot.

    Noise that no seed controls is refused too: pictures of one seed would then differ by more than their words.
    """
    import math

    import torch
    from PIL import Image

    from bridges.diffusion import RenderError

    settings = max(renderer.training, renderer.evaluation, key=lambda settings: settings.guidance)
    before = _random_states(renderer.device)
    try:
        # of img2img's steps the share `strength` is taken
        settings = replace(settings, steps=math.ceil(2 / renderer.options.get("strength", 1)))
        renderer.render([""], [0], settings, [Image.new("RGB", (8, 8))] if renderer.takes_pictures else None)
    except RenderError as error:
        raise UserError(f"{renderer.about.kind}: {error}") from error
    if not all(map(torch.equal, before, _random_states(renderer.device))):
        scheduler = type(renderer.pipeline.scheduler).__name__
        raise UserError(f"{renderer.about.kind}: {scheduler} draws noise that no seed decides; take another scheduler")


def _random_states(device: torch.device) -> list[torch.Tensor]:
    import torch

    cards = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cards]


def _left_out(kind: type[DiffusionPipeline], index: dict) -> dict[str, object]:
    """Replacements of parts that the folder lacks or that would paint the pictures."""
    parts: dict[str, object] = {name: None for name, value in index.items() if value == [None, None]}
    painting = {"safety_checker": None, "requires_safety_checker": False, "add_watermarker": False}
    takes = inspect.signature(kind.__init__).parameters
    return parts | {name: value for name, value in painting.items() if name in takes}


def _merge_lora(pipeline: DiffusionPipeline, path: str, scale: float) -> None:
    """Add LoRA weights to those of the pipeline."""
    from bridges.loading import first_line, quiet_loading

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
