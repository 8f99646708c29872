"""Helpers to load renderers and scorers: devices and dtypes, silent loading, clear errors, sizes."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bridges import bundled
from grpo_jax.config.fields import require
from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def torch_device(name: str | torch.device) -> torch.device:
    """Return the torch device of "cpu" or "gpu:1" (or torch's own "cuda:1")."""
    if isinstance(name, torch.device):
        return name
    return torch.device("cpu") if name.startswith("cpu") else torch.device("cuda", int(name.partition(":")[2] or 0))


def match_precision(precision: str | None) -> None:
    """Match torch's float32 precision on a GPU to the policy's, for the process; all but "highest" allow TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "highest"


def choose_workers(device: torch.device, model: torch.nn.Module) -> int:
    """Return the number of batches that `side_by_side` runs at a time: on a CPU one on each core, for a small model.

    Threads gain little in small products, and wait for each other by spinning: torch then has one, in all the process.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _pool()[1] if device.type == "cpu" and parameters < 2**25 else 1


@functools.cache
def _pool() -> tuple[ThreadPoolExecutor, int]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return ThreadPoolExecutor(threads, "batches"), threads


def side_by_side(function: Callable[..., torch.Tensor], batches: Iterable, workers: int) -> Iterator[torch.Tensor]:
    """Map a function over batches; several workers run it in threads of their own."""
    return (_pool()[0].map if workers > 1 else map)(function, batches)


def local_folder(path: str) -> Path | None:
    """Return the folder of `path`; None if it can only be a hub id, UserError if a path does not exist."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    # "owner/name" is a hub id; more slashes, or a prefix such as "/" or "./", mean a path
    looks_local = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    if looks_local or folder.exists():
        raise UserError(f"no such folder: {path}")
    return None


def load_part(kind: Any, path: str, part: str = "", **options: object) -> Any:
    """Load a part of a transformers folder or hub model, without running its code.

    `kind` is an Auto class, `part` a name for errors ("" for the whole), `options` go to `from_pretrained`.
    """
    folder = local_folder(path)
    with loading(f"the {part} of {path}" if part else path):
        return kind.from_pretrained(folder or path, trust_remote_code=False, **options)


def load_config(path: str) -> PretrainedConfig:
    """Load the config of a transformers folder or hub model."""
    from transformers import AutoConfig

    return load_part(AutoConfig, path)


def load_complete(kind: Any, path: str, *, dtype: str, device: str) -> PreTrainedModel:
    """Load a model onto "cpu" or "gpu:N"; UserError unless the folder or hub id holds all weights as safetensors."""
    options = {"dtype": DTYPES[dtype], "use_safetensors": True, "output_loading_info": True}
    model, info = load_part(kind, path, **options)
    if missing := sorted(info["missing_keys"]):  # transformers initialises them randomly
        raise UserError(f"cannot load {path} as a {type(model).__name__}: its weights lack {missing[0]}")
    return model.eval().requires_grad_(False).to(torch_device(device))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the next one if the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Load silently; a failure inside is a UserError of one line with `what` as its subject."""
    with quiet_loading():
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # files of another version may raise any type
            raise UserError(f"cannot load {what}: {first_line(error)}") from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence the libraries' progress bars, log lines and warnings while models are loaded."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    with_progress = [module for module in (diffusers_logging, transformers_logging) if module.is_progress_bar_enabled()]
    disabled = logging.root.manager.disable
    for module in with_progress:
        module.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)
        for module in with_progress:
            module.enable_progress_bar()


# Sizes of the judges, for --plan: models are built on torch's meta device, only from their config files.

MODELS = ("transformer", "unet", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
_PUBLISHED_WIDTHS = (128, 256, 512, 512)  # of the VAE's blocks, in all published pipelines


@functools.cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """Read the sizes of some pipelines and models of the hub: parameters, and edges of pictures."""
    return load_json(Path(__file__).with_name("published.json"))


def pipeline_sizes(path: str) -> tuple[dict[str, int], tuple[int, ...], int]:
    """Return the parameters of each model of a pipeline, its VAE's block widths, and its pictures' edge in pixels.

    `path` is a folder, a hub id of `published`, or "miniature". UserError if a config is missing or invalid.
    """
    if listed := published()["pipelines"].get(path):
        return listed["parameters"], _PUBLISHED_WIDTHS, listed["edge"]
    folder = _pipeline_folder(path)
    index = load_json(folder / "model_index.json")
    named = {name: index[name] for name in MODELS if index.get(name, [None])[0]}
    sizes = {name: _size(library, kind, folder / name / "config.json") for name, (library, kind) in named.items()}
    widths = _vae_widths(folder)
    drawing = load_json(folder / ("transformer" if "transformer" in named else "unet") / "config.json")
    latents = drawing.get("sample_size", 128)  # FLUX's transformer has none; its pipeline uses 128
    return sizes, widths, latents * 2 ** (len(widths) - 1)


def transformer_config(path: str) -> tuple[dict[str, Any], int]:
    """Return the config of a pipeline's transformer, and the pixels along a latent; `path` as in `pipeline_sizes`."""
    if listed := published()["pipelines"].get(path):
        require("transformer" in listed, "train", "null, or a pipeline that predicts a flow's velocity", path)
        return listed["transformer"], 2 ** (len(_PUBLISHED_WIDTHS) - 1)
    folder = _pipeline_folder(path)
    return load_json(folder / "transformer" / "config.json"), 2 ** (len(_vae_widths(folder)) - 1)


def _pipeline_folder(path: str) -> Path:
    folder = bundled(path, "renderer") or local_folder(path)
    if folder is None:
        raise UserError(f"{path}: its size is not known; give a folder with the components' config.json")
    return folder


def _vae_widths(folder: Path) -> tuple[int, ...]:
    vae = load_json(folder / "vae" / "config.json")
    return tuple(vae.get("block_out_channels") or vae["encoder_block_out_channels"])


def clip_size(model: str) -> int:
    """Count the parameters of an open_clip model, given a known name or a folder in its layout."""
    import open_clip

    folder = local_folder(model.removeprefix("local-dir:"))
    if folder is None:
        config = open_clip.get_model_config(model.replace("/", "-")) or {}
    else:
        config = load_json(folder / "open_clip_config.json")["model_cfg"]
    config = {name: value for name, value in config.items() if name != "custom_text"}
    with loading(f"the sizes of {model}"), torch.device("meta"):
        return _count(open_clip.CLIP(**config))


def model_size(path: str, auto: str = "AutoModel") -> int:
    """Count the parameters of a transformers folder's model, or a hub id of `published`; `auto` is its Auto class."""
    import transformers

    if path in published()["models"]:
        return published()["models"][path]
    folder = local_folder(path)
    if folder is None:
        raise UserError(f"{path}: its size is not known; give a folder with its config.json")
    config = load_json(folder / "config.json")
    with loading(str(folder / "config.json")), torch.device("meta"):
        typed = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
        return _count(getattr(transformers, auto).from_config(typed))


def _size(library: str, kind: str, path: Path) -> int:
    import diffusers
    import transformers

    config = load_json(path)
    with loading(f"{path}: {kind} of {library}"), torch.device("meta"):
        if library == "diffusers":
            return _count(getattr(diffusers, kind).from_config(config))
        cls = getattr(transformers, kind)
        return _count(cls(cls.config_class.from_dict(config)))


def _count(model: torch.nn.Module) -> int:
    """Count parameters and saved buffers (SD3's positions)."""
    saved = model.state_dict()
    buffers = (tensor for name, tensor in model.named_buffers() if name in saved)
    return sum(tensor.numel() for tensor in (*model.parameters(), *buffers))
