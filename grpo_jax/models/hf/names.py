"""Hugging Face tensor names ↔ places in a policy's parameters: the decoder's, and beside them a vision tower's."""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.models.decoder import init_variables
from grpo_jax.models.families import ModelConfig, family_of
from grpo_jax.models.families.family import Naming
from grpo_jax.models.vision.pictures import VISUAL
from grpo_jax.models.vision.tower import TOWERS, tower_shapes


class Place(NamedTuple):
    """Where one tensor belongs.

    Attributes:
        path: keys from the parameters' root to a leaf.
        layer: index along the leaf's first axis, or None for a leaf that is not stacked.
        transpose: the folder stores [out, in], or [out, ...] with all that follows as one axis; the leaf is [in, out].
        shape: of the tensor in the folder.
        expert: index along the leaf's second axis, or None for a leaf without experts.
        together: the paths of leaves [in, out] of all experts that are one tensor [experts, out, in]; empty for one
            leaf alone.
    """

    path: tuple[str, ...]
    layer: int | None
    transpose: bool
    shape: tuple[int, ...]
    expert: int | None = None
    together: tuple[tuple[str, ...], ...] = ()

    @property
    def index(self) -> tuple[int, ...]:
        """Where the tensor is in its leaf."""
        return tuple(index for index in (self.layer, self.expert) if index is not None)

    def parts(self, tensor: np.ndarray) -> dict[tuple[str, ...], np.ndarray]:
        """What a tensor of the folder is in the leaves, by path."""
        if self.together:
            split = np.split(tensor.swapaxes(1, 2), len(self.together), axis=2)
            return dict(zip(self.together, split, strict=True))
        return {self.path: tensor.reshape(len(tensor), -1).T if self.transpose else tensor}

    def tensor(self, part: Callable[[tuple[str, ...]], np.ndarray]) -> np.ndarray:
        """The tensor of the folder from what is in the leaves, by path."""
        if self.together:
            return np.concatenate([part(path) for path in self.together], axis=2).swapaxes(1, 2)
        return part(self.path).T.reshape(self.shape) if self.transpose else part(self.path)


def shapes(config: ModelConfig) -> dict[str, Any]:
    """The decoder's parameters as shapes; nothing is allocated."""
    return jax.eval_shape(lambda key: init_variables(config, key), jax.random.key(0))["params"]


def flatten(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Leaves of nested dictionaries by path."""
    leaves: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves.update(flatten(value, (*path, key)))
        else:
            leaves[(*path, key)] = value
    return leaves


def unflatten(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Nested dictionaries from leaves by path."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def name_table(config: ModelConfig, names: Iterable[str]) -> dict[str, Place]:
    """Tensor name → place, in the naming that a folder with these names uses.

    A tied model has no head of its own; where the folder repeats the embedding as one, both names
    lead to the embedding.
    """
    names, naming = set(names), family_of(config).naming
    embedding = f"{naming.tensors['embed_tokens']}.weight"
    prefix = next((p for p in naming.prefixes if p + embedding in names), naming.prefixes[0])
    head = next((h for h in naming.heads if h in names), naming.heads[0])
    layers, table, leaves = f"{prefix}{naming.layers}", {}, flatten(shapes(config))
    together = _together(naming, layers, names)
    for (name, parts), layer in product(naming.together.items(), range(config.num_layers if together else 0)):
        paths = tuple(("layers", part, "kernel") for part in parts)
        _, count, inner, _ = leaves[paths[0]].shape
        width = sum(leaves[path].shape[-1] for path in paths)
        table[f"{layers}.{layer}.{name}"] = Place(paths[0], layer, True, (count, width, inner), together=paths)
    for path, leaf in leaves.items():
        kind = "bias" if path[-1] == "bias" else "weight"
        if path == ("lm_head",):
            table[head] = Place(path, None, False, leaf.shape)
        elif path[0] != "layers":
            table[f"{prefix}{naming.tensors[path[0]]}.{kind}"] = Place(path, None, False, leaf.shape)
        elif path[1] not in together:
            module, transpose = f"{naming.modules[path[1]]}.{kind}", naming.transposed and path[-1] == "kernel"
            for layer, (name, place) in product(range(config.num_layers), _in_layer(path, module, transpose, leaf)):
                table[f"{layers}.{layer}.{name}"] = place._replace(layer=layer)
    if config.tie_word_embeddings and head in names:
        table[head] = table[prefix + embedding]
    return table


def _together(naming: Naming, layers: str, names: set[str]) -> set[str]:
    """The modules that this folder keeps together with others."""
    found = any(f"{layers}.0.{name}" in names for name in naming.together)
    return {part for parts in naming.together.values() for part in parts} if found else set()


def _in_layer(path: tuple[str, ...], module: str, transpose: bool, leaf: Any) -> list[tuple[str, Place]]:
    """The tensors that a stacked leaf is of a layer: one, or one for each expert."""
    if "{}" not in module:
        return [(module, Place(path, 0, transpose, leaf.shape[:0:-1] if transpose else leaf.shape[1:]))]
    place = Place(path, 0, transpose, leaf.shape[:1:-1])
    return [(module.format(expert), place._replace(expert=expert)) for expert in range(leaf.shape[1])]


def tower_table(config: ModelConfig, names: Iterable[str]) -> dict[str, Place]:
    """The same for the vision tower, whose places are below ``visual``; empty where the model has none."""
    vision = getattr(config, "vision", None)
    if vision is None:
        return {}
    names, family, table = set(names), TOWERS[vision.family], {}
    prefixes = family_of(config).naming.beside
    prefix = next((p for p in prefixes if f"{p}{family.names['patch_embed']}.weight" in names), prefixes[0])
    for path, leaf in flatten(tower_shapes(vision)).items():
        module = path if len(path) == 1 else path[:-1]
        name = f"{prefix}{family.names['/'.join(module)]}.{'bias' if path[-1] == 'bias' else 'weight'}"
        transpose = path[-1] == "kernel"
        stacked = "{}" in name
        shape = leaf.shape[1:] if stacked else leaf.shape
        shape = shape[::-1] if transpose else shape
        if module == ("patch_embed",) and transpose:
            shape = (vision.width, vision.channels, vision.frames, vision.patch, vision.patch)
        for index in range(leaf.shape[0]) if stacked else (None,):
            table[name.format(index)] = Place((VISUAL, *path), index, transpose, shape)
    return table


def passes_through(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is none of the language model's and goes to an export untouched."""
    return beside(config, name) or re.search(family_of(config).naming.constants, name) is not None


def beside(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of what stands beside the language model."""
    return name.startswith(family_of(config).naming.beside)
