"""Tensors of a Hugging Face folder: a table of their names, reading into stacked parameters, and writing."""

import functools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_jax.config.files import read_json, read_text
from grpo_jax.errors import UserError, short_name
from grpo_jax.models.architectures import ModelConfig, architecture_of
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.hf_config import as_user_error
from grpo_jax.models.lora import entry
from grpo_jax.models.variables import VISUAL, PyTree, Variables
from grpo_jax.models.vision.tower import TOWERS, tower_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_EXPORTED = re.compile(r"(?i).*\.(json|jinja|txt|model|tiktoken|safetensors)|LICENSE.*|README\.md|\.DS_Store")
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")


class TensorPlace(NamedTuple):
    """Place of a tensor in the parameters."""

    path: tuple[str, ...]  # keys from the parameters' root to a leaf
    index: tuple[int, ...]  # of the tensor in a stack of layers; () for an unstacked leaf
    transpose: bool  # the folder stores [out, in], or [out, ...] whose other axes are flattened; the leaf is [in, out]
    shape: tuple[int, ...]  # of the tensor in the folder

    def part(self, tensor: np.ndarray) -> np.ndarray:
        """Convert a tensor of the folder to its part of the leaf."""
        return tensor.reshape(len(tensor), -1).T if self.transpose else tensor

    def tensor(self, part: np.ndarray) -> np.ndarray:
        """Convert a part of the leaf to the folder's tensor."""
        return part.T.reshape(self.shape) if self.transpose else part


@functools.lru_cache(maxsize=8)
def shapes(config: ModelConfig) -> dict[str, PyTree]:
    """Return the shapes of the decoder's parameters, without allocation."""
    return jax.eval_shape(lambda: init_variables(config, jax.random.key(0)))["params"]


def name_table(config: ModelConfig, names: Iterable[str]) -> dict[str, TensorPlace]:
    """Return the table of tensor name → place, in the naming of a folder with these names.

    If the folder of a tied model repeats the embedding as a head, both names refer to the embedding.
    """
    names = set(names)
    naming = architecture_of(config).naming
    embedding = f"{naming.tensors['embed_tokens']}.weight"
    prefix = next((p for p in naming.prefixes if p + embedding in names), naming.prefixes[0])
    head = next((h for h in naming.heads if h in names), naming.heads[0])
    table = {}
    for path, leaf in flatten_dict(shapes(config)).items():
        kind, transpose = "bias" if path[-1] == "bias" else "weight", False
        if path == ("lm_head",):
            name = head
        elif path[0] != "layers":
            name = f"{prefix}{naming.tensors[path[0]]}.{kind}"
        else:
            name = f"{prefix}{naming.layers}.{{}}.{naming.modules[path[1]]}.{kind}"
            transpose = naming.transposed and path[-1] == "kernel"
        table |= _places(path, name, transpose, leaf.shape)
    if config.tie_word_embeddings and head in names:
        table[head] = table[prefix + embedding]
    return table


def _places(path: tuple[str, ...], name: str, transpose: bool, shape: tuple[int, ...]) -> dict[str, TensorPlace]:
    """Return the places of a leaf's tensors; their name has a {} for each axis of the leaf's stack."""
    axes = name.count("{}")
    own = shape[axes:][::-1] if transpose else shape[axes:]
    return {name.format(*index): TensorPlace(path, index, transpose, own) for index in np.ndindex(shape[:axes])}


def tower_table(config: ModelConfig, names: Iterable[str]) -> dict[str, TensorPlace]:
    """Return the `name_table` of the vision tower, with places below ``visual``; empty without a tower."""
    vision = config.vision
    if vision is None:
        return {}
    names = set(names)
    architecture = TOWERS[vision.model_type]
    table = {}
    prefixes = architecture_of(config).naming.beside
    patches = f"{architecture.names['patch_embed']}.weight"
    prefix = next((p for p in prefixes if p + patches in names), prefixes[0])
    for path, leaf in flatten_dict(tower_shapes(vision)).items():
        module = path if len(path) == 1 else path[:-1]
        name = f"{prefix}{architecture.names['/'.join(module)]}.{'bias' if path[-1] == 'bias' else 'weight'}"
        table |= _places((VISUAL, *path), name, path[-1] == "kernel", leaf.shape)
    shape = (vision.width, vision.channels, vision.frames, vision.patch, vision.patch)
    table[prefix + patches] = table[prefix + patches]._replace(shape=shape)
    return table


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files: the single one, as transformers, else the index's; UserError if missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        weight_map = read_json_file(folder / INDEX).get("weight_map")
        shards = sorted({str(shard) for shard in weight_map.values()}) if isinstance(weight_map, dict) else []
        missing = [s for s in shards or ["that its index names"] if Path(s).name != s or not os.path.isfile(folder / s)]
        if missing:
            more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
            named = ", ".join(map(short_name, missing[:2]))
            raise UserError(f"{folder} lacks weight files {named}{more}; download the folder again")
        return [folder / shard for shard in shards]
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    instead = "; give a folder with weights"
    if others:
        instead = f" but {', '.join(others[:3])}: load the model with transformers and call save_pretrained"
    raise UserError(f"{folder} has no {SINGLE} or {INDEX}{instead}")


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a JSON object; UserError if the file cannot be read or holds anything else."""
    with as_user_error(f"cannot read {path}; download the folder again", ValueError):
        content = read_json(read_text(path), whole=None)
        if not isinstance(content, dict):
            raise ValueError(f"expected a JSON object, got {type(content).__name__}")
        return content


class TensorFiles:
    """Tensors of several safetensors files by name, read lazily."""

    def __init__(self, files: list[Path]):
        """Open the files' headers; UserError if one is truncated or not safetensors."""
        self._open: dict[Path, safe_open] = {}
        self.names: dict[str, Path] = {}
        for path in files:
            broken = f"{path} is broken or truncated; copy or download it again"
            with as_user_error(broken, SafetensorError, OSError, ValueError):
                self._open[path] = safe_open(path, framework="numpy")
            self.names |= dict.fromkeys(self._open[path].keys(), path)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return a tensor's shape, and safetensors' name of its dtype."""
        header = self._open[self.names[name]].get_slice(name)
        return tuple(header.get_shape()), header.get_dtype()

    def read(self, name: str) -> np.ndarray:
        """Read a tensor."""
        return self._open[self.names[name]].get_tensor(name)

    def read_finite(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """Read a tensor in a dtype (None: its own); UserError for NaN, infinity, or values beyond the dtype."""
        value = self.read(name)
        with np.errstate(over="ignore", invalid="ignore"):
            cast = value.astype(dtype or value.dtype)
            if not np.isfinite(cast).all():
                raise UserError(
                    f"{short_name(name)} holds NaN or infinite values, or larger ones than {cast.dtype} has: copy "
                    f"{self.names[name]} again, or take float32 or bfloat16"
                )
        return cast

    def metadata(self, path: Path) -> dict[str, str]:
        """Return a file's metadata; transformers needs the format."""
        return {"format": "pt", **(self._open[path].metadata() or {})}


def read_params(config: ModelConfig, folder: Path, dtype: np.dtype | None, *, tower: bool = False) -> dict[str, PyTree]:
    """Read the decoder's parameters as host arrays with stacked layers, or the vision `tower`'s, under ``visual``.

    ``dtype`` None keeps the folder's.
    """
    naming, files = architecture_of(config).naming, TensorFiles(weight_files(folder))
    table = tower_table(config, files.names) if tower else name_table(config, files.names)
    foreign = [name for name in files.names if name not in table and name.startswith(naming.beside) == tower]
    foreign = [name for name in foreign if tower or not re.search(naming.constants, name)]
    if problems := misfits({name: place.shape for name, place in table.items()}, files, foreign):
        raise UserError(f"weights do not fit config.json: {problems}")
    stacked: dict[tuple[str, ...], tuple[int, ...]] = {}
    for place in table.values():
        stacked[place.path] = max(stacked.get(place.path, ()), place.index)  # last index of each axis
    leaves: dict[tuple[str, ...], np.ndarray] = {}
    for name, place in table.items():
        path, value = place.path, place.part(files.read_finite(name, dtype))
        if place.index:
            if path not in leaves:
                leaves[path] = np.empty((*(last + 1 for last in stacked[path]), *value.shape), value.dtype)
            leaves[path][place.index] = value
        elif path not in leaves:
            leaves[path] = value
        elif not np.array_equal(leaves[path], value):
            raise UserError(f"{short_name(name)} differs from the embedding although tie_word_embeddings is true")
    return unflatten_dict(leaves)


def misfits(expected: Mapping[str, tuple[int, ...]], files: TensorFiles, foreign: Iterable[str]) -> str:
    """Describe the first differences of the files' tensors from the expected names and shapes; "" if there are none."""
    problems = [f"{name} is missing" for name in expected if name not in files.names]
    for name in (name for name in files.names if name in expected):
        shape, dtype = files.header(name)
        if shape != expected[name]:
            problems.append(f"{name} has shape {shape}, expected {expected[name]}")
        if dtype not in ("F32", "BF16", "F16"):
            problems.append(f"{name} has dtype {dtype}, expected F32, BF16 or F16")
    problems += [f"{name} is unexpected" for name in foreign]
    more = f"; and {len(problems) - 2} more" if len(problems) > 2 else ""
    return f"{'; '.join(problem[:100] for problem in problems[:2])}{more}"


def write_params(work: Path, source: Path, config: ModelConfig, params: Variables, dtype: np.dtype | None) -> None:
    """Write weight files like those of `source`, with the tensors of `params` in their place, and their index."""
    shards, leaves = weight_files(source), flatten_dict(params)
    files, total = TensorFiles(shards), 0
    table = name_table(config, files.names) | (tower_table(config, files.names) if VISUAL in params else {})
    for shard in shards:
        tensors = {}
        for name in (name for name, where in files.names.items() if where == shard):
            value = files.read(name)
            if name in table:
                value = _exported(name, leaves, table[name], dtype or value.dtype)
            tensors[name] = np.ascontiguousarray(value).reshape(value.shape)
            total += value.nbytes
        save_file(tensors, work / shard.name, metadata=files.metadata(shard))
    if shards != [source / SINGLE]:
        index = read_json_file(source / INDEX)
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": total}
        (work / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _exported(name: str, leaves: Mapping[tuple[str, ...], PyTree], place: TensorPlace, dtype: np.dtype) -> np.ndarray:
    value = place.tensor(np.asarray(entry(leaves[place.path], place.index)))
    if dtype == np.float16 and np.abs(value.astype(np.float32)).max(initial=0.0) > np.finfo(np.float16).max:
        raise UserError(f"{name} no longer fits float16; export with dtype float32 or bfloat16")
    return value.astype(dtype)


@contextmanager
def new_folder(folder: Path, marker: str, kind: str, content: str) -> Iterator[Path]:
    """Make an empty folder that gets its name at the end of the block; an earlier one stays until then.

    UserError if its `content` cannot be written, for a file, or for a folder that holds more than an export of this
    `kind`, which has the `marker` file.
    """
    present = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if folder.is_file() or (present and not (marker in present and all(map(_EXPORTED.fullmatch, present)))):
        raise UserError(f"{folder} exists and holds something else than {kind}: choose another place or remove it")
    work, old = (folder.parent / f".{folder.name}.{state}-{os.getpid()}" for state in ("writing", "old"))
    with as_user_error(f"cannot write {content} to {folder}", OSError, SafetensorError):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            yield work
            if folder.exists():
                os.rename(folder, old)
            os.rename(work, folder)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(work, ignore_errors=True)
