"""What the loaders of renderer and scorer share: names of devices and dtypes, silence, helpful errors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called "float32", "float16" or "bfloat16".

    Raises:
        ValueError: For any other name.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def torch_device(name: str | torch.device) -> torch.device:
    """The torch device of a placement's name: "cpu", "gpu:1" (torch's own "cuda:1" is understood too).

    Raises:
        ValueError: If the name is of no such form.
    """
    if isinstance(name, torch.device):
        return name
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if kind not in ("gpu", "cuda") or not (index.isdigit() or not index):
        raise ValueError(f'device: expected "cpu" or "gpu:N", got {name!r}')
    return torch.device("cuda", int(index or 0))


def local_folder(path: str) -> Path | None:
    """The folder that `path` names, or None where it can only be the name of a model on a hub.

    Raises:
        UserError: If it is written as a path, and no such folder exists.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    # "owner/name" is a hub id; more slashes, or a start such as "/" or "./", mean a path
    looks_local = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    if looks_local or folder.exists():
        raise UserError(f"no such folder: {path}")
    return None


def load_part(kind: Any, path: str, part: str = "", **options: object) -> Any:
    """Load a part of a folder of transformers, or of a model on the hub; no code that comes with it is run.

    Args:
        kind: One of transformers' Auto classes.
        path: Folder, or id on the hub.
        part: What it is, in words; "" for the whole.
        **options: Of the part.

    Raises:
        UserError: There is none, or transformers cannot read it.
    """
    folder = local_folder(path)
    try:
        with quiet_loading():
            return kind.from_pretrained(folder or path, trust_remote_code=False, **options)
    except Exception as error:
        raise UserError(f"cannot load {f'the {part} of ' if part else ''}{path}: {first_line(error)}") from error


def load_image_processor(path: str, **sizes: dict[str, int]) -> Callable[[Image], torch.Tensor]:
    """Return the function picture of Pillow → [3, H, W] of a folder's own image processor; `sizes` replace its own."""
    from transformers import AutoImageProcessor

    processor = load_part(AutoImageProcessor, path, "image processor")
    return lambda picture: processor(images=picture, return_tensors="pt", **sizes)["pixel_values"][0]


def load_config(path: str) -> PretrainedConfig:
    """Load the config of a folder of transformers, or of a model on the hub."""
    from transformers import AutoConfig

    return load_part(AutoConfig, path)


def load_settings(path: str) -> dict[str, Any]:
    """Read preprocessor_config.json of a folder, or of a model on the hub.

    Raises:
        UserError: It is not there, or no JSON.
    """
    from transformers.utils import cached_file

    name = "preprocessor_config.json"
    folder = local_folder(path)
    try:
        return load_json(folder / name if folder is not None else Path(str(cached_file(path, name))))
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"cannot read {name} of {path}: {first_line(error)}") from error


def load_complete(kind: Any, path: str, *, dtype: str) -> PreTrainedModel:
    """Load a model of transformers in evaluation, all of whose weights its folder holds, as safetensors.

    Args:
        kind: The model's class, or one of transformers' Auto classes.
        path: Folder, or id on the hub.
        dtype: "float32", "float16" or "bfloat16".

    Raises:
        UserError: There is no such model, it is of another kind, or its weights are missing, broken, or no safetensors.
    """
    torch_type, folder = torch_dtype(dtype), local_folder(path)
    try:
        with quiet_loading():
            model, info = kind.from_pretrained(
                folder or path,
                dtype=torch_type,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:
        raise UserError(f"cannot load {path}: {first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):  # transformers draws them at random
        raise UserError(f"cannot load {path} as a {type(model).__name__}: its weights lack {missing[0]}")
    return model.eval().requires_grad_(False)


def first_line(error: BaseException) -> str:
    """What an error says, in one line: its first, and the next one too where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep the libraries' progress bars, log lines and warnings off the terminal while models are loaded.

    Failures are not hidden: they arrive as exceptions, and the loaders turn them into one line.
    """
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    shown = [module for module in (diffusers_logging, transformers_logging) if module.is_progress_bar_enabled()]
    disabled = logging.root.manager.disable
    for module in shown:
        module.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        for module in shown:
            module.enable_progress_bar()
