"""The files that hold a policy's tensors: read into stacked parameters, and written back."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_jax.config.files import read_json as read_json_text
from grpo_jax.config.files import read_text
from grpo_jax.errors import UserError, said
from grpo_jax.models.families import ModelConfig
from grpo_jax.models.hf.names import Place, beside, name_table, passes_through, tower_table, unflatten
from grpo_jax.models.lora import MergedKernel, entry
from grpo_jax.models.vision.pictures import VISUAL

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the shards its index names, or the single one.

    Raises:
        UserError: if there are none, or one is missing, or only formats that can run code exist.
    """
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{folder / INDEX} has no weight_map; download the folder again")
        shards = sorted({str(shard) for shard in weight_map.values()})
        missing = [s for s in shards if Path(s).name != s or not os.path.isfile(folder / s)]
        if missing:
            more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
            named = ", ".join(map(said, missing[:2]))
            raise UserError(f"{folder} lacks weight files {named}{more}; download the folder again")
        return [folder / shard for shard in shards]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise UserError(
            f"{folder} holds weights as {', '.join(others[:3])} only; just safetensors files are read: load "
            "the model with transformers and call save_pretrained, or download its safetensors version"
        )
    raise UserError(f"{folder} has no {SINGLE} or {INDEX}; give a folder with weights")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: if the file cannot be read or is something else.
    """
    text = read_text(path)
    try:
        content = read_json_text(text, whole=None)
    except ValueError as error:
        raise UserError(f"cannot read {path}: {error}; download the folder again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


class TensorFiles:
    """Tensors of several safetensors files by name, read when asked for."""

    def __init__(self, files: list[Path]):
        """Open the files' headers.

        Raises:
            UserError: if a file is truncated or not safetensors, or two hold the same name.
        """
        self._open: dict[Path, Any] = {}
        self.names: dict[str, Path] = {}
        for path in files:
            try:
                self._open[path] = safe_open(path, framework="numpy")
            except (SafetensorError, OSError, ValueError) as error:
                reason = " ".join(str(error).split())[:100]
                raise UserError(f"{path} is broken or truncated ({reason}); copy or download it again") from error
            for name in self._open[path].keys():  # noqa: SIM118 (not a dict)
                if name in self.names:
                    raise UserError(f"{said(name)} is in both {self.names[name].name} and {path.name}")
                self.names[name] = path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._open[self.names[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Safetensors' name of a tensor's dtype, from the header."""
        return self._open[self.names[name]].get_slice(name).get_dtype()

    def read(self, name: str) -> np.ndarray:
        """The tensor."""
        return self._open[self.names[name]].get_tensor(name)

    def read_finite(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """The tensor in a dtype (None: its own), for computing with.

        Raises:
            UserError: if it holds NaN or infinity, or values that the dtype cannot hold.
        """
        value = self.read(name)
        with np.errstate(over="ignore", invalid="ignore"):
            cast = value.astype(dtype or value.dtype)
            if np.isfinite(cast).all():
                return cast
            broken = not np.isfinite(value).all()
        if broken:
            raise UserError(
                f"{said(name)} holds NaN or infinite values: copy {self.names[name]} again, or make it anew"
            )
        raise UserError(f"{said(name)} holds values that {cast.dtype} cannot: take float32 or bfloat16")

    def metadata(self, path: Path) -> dict[str, str]:
        """A file's metadata; transformers asks for the format."""
        return {"format": "pt", **(self._open[path].metadata() or {})}


def read_params(config: ModelConfig, files: TensorFiles, dtype: np.dtype | None) -> dict[str, Any]:
    """The decoder's parameters as host arrays, layers stacked; ``dtype`` None keeps the folder's.

    Raises:
        UserError: naming tensors that are missing, unexpected, misshapen or of another kind, or one that is not finite.
    """
    table = name_table(config, files.names)
    unknown = [name for name in files.names if name not in table and not passes_through(config, name)]
    return _read(table, unknown, files, dtype)


def read_tower(config: ModelConfig, files: TensorFiles, dtype: np.dtype | None) -> dict[str, Any]:
    """The vision tower's parameters, as `read_params`.

    Raises:
        UserError: as `read_params`.
    """
    table = tower_table(config, files.names)
    unknown = [name for name in files.names if name not in table and beside(config, name)]
    return _read(table, unknown, files, dtype)[VISUAL]


def _read(table: dict[str, Place], unknown: list[str], files: TensorFiles, dtype: np.dtype | None) -> dict[str, Any]:
    problems = _problems(table, files) + [f"{name} is unexpected" for name in unknown]
    if problems:
        raise UserError(f"weights do not fit config.json: {listed(problems)}")
    stacked: dict[tuple[str, ...], tuple[int, ...]] = {}
    for place in table.values():
        for path in place.together or (place.path,):
            stacked[path] = max(stacked.get(path, ()), place.index)  # the last of each axis
    leaves: dict[tuple[str, ...], np.ndarray] = {}
    for name, place in table.items():
        for path, value in place.parts(files.read_finite(name, dtype)).items():
            if place.index:
                if path not in leaves:
                    leaves[path] = np.empty((*(last + 1 for last in stacked[path]), *value.shape), value.dtype)
                leaves[path][place.index] = value
            elif path not in leaves:
                leaves[path] = value
            elif not np.array_equal(leaves[path], value):
                raise UserError(f"{said(name)} differs from the embedding although tie_word_embeddings is true")
    return unflatten(leaves)


def _problems(table: dict[str, Place], files: TensorFiles) -> list[str]:
    problems = [f"{name} is missing" for name in table if name not in files.names]
    for name in files.names:
        if name not in table:
            continue
        if files.shape(name) != table[name].shape:
            problems.append(f"{name} has shape {files.shape(name)}, expected {table[name].shape}")
        if files.dtype(name) not in ("F32", "BF16", "F16"):
            problems.append(f"{name} has dtype {files.dtype(name)}, expected F32, BF16 or F16")
    return problems


def listed(problems: list[str]) -> str:
    """The first problems in one line, and how many more there are."""
    more = f"; and {len(problems) - 2} more" if len(problems) > 2 else ""
    return f"{'; '.join(problem[:100] for problem in problems[:2])}{more}"


def write_shard(
    path: Path,
    source: Path,
    table: Mapping[str, Place],
    files: TensorFiles,
    leaves: Mapping[tuple[str, ...], Any],
    dtype: np.dtype | None,
) -> None:
    """Write one file like ``source`` with the tensors of the table taken from ``leaves``.

    Raises:
        UserError: if a value is too large for float16.
    """
    tensors = {}
    for name, where in files.names.items():
        if where != source:
            continue
        value = files.read(name)
        if name in table:
            value = _exported(name, leaves, table[name], dtype or value.dtype)
        tensors[name] = np.ascontiguousarray(value).reshape(value.shape)
    save_file(tensors, path, metadata=files.metadata(source))


def _exported(name: str, leaves: Mapping[tuple[str, ...], Any], place: Place, dtype: np.dtype) -> np.ndarray:
    def part(path: tuple[str, ...]) -> np.ndarray:
        leaf = leaves[path]
        return np.asarray(leaf.at(place.index) if isinstance(leaf, MergedKernel) else entry(leaf, place.index))

    value = place.tensor(part)
    if dtype == np.float16 and np.abs(value.astype(np.float32)).max(initial=0.0) > np.finfo(np.float16).max:
        raise UserError(f"{name} no longer fits float16; export with dtype float32 or bfloat16")
    return value.astype(dtype)
