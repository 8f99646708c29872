"""The description of a model architecture: a row of the table in `architectures`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from grpo_jax.models.attention import LayerInput
from grpo_jax.models.hf_config import Fields

# How the devices along a tensor axis share a projection: each makes some of its outputs, or reads some of its inputs.
# A fused one, whose outputs are several things side by side, is not cut that way.
COLUMNS, ROWS, FUSED = "columns", "rows", "fused"


class Naming(NamedTuple):
    """How the folders of an architecture name their tensors."""

    # where a folder keeps its language model; the first that has an embedding wins, and the first of all is where
    # transformers' model has it
    prefixes: tuple[str, ...]
    heads: tuple[str, ...]  # names of a head of its own
    tensors: Mapping[str, str]  # tensors outside of layers: the decoder's name → Hugging Face's behind the prefix
    layers: str  # name of the list of layers
    modules: Mapping[str, str]  # of a layer: the decoder's name → Hugging Face's, with {} for the number of an expert
    transposed: bool  # kernels are stored [out, in] (Linear), not [in, out] (Conv1D)
    constants: str  # pattern of tensors that old folders store although nothing is learned in them
    beside: tuple[str, ...] = ()  # prefixes of other parts than the language model (a vision tower)
    # of a layer, a tensor in which some folders keep what others keep apart: Hugging Face's name → the decoder's, whose
    # outputs lie one after the other in it, [experts, out, in]
    together: Mapping[str, tuple[str, ...]] = {}


class Architecture(NamedTuple):
    """One model architecture.

    Its configs are frozen dataclasses, hashable and hence static under jit, with at least the fields vocab_size,
    hidden_size, num_layers, num_heads, num_kv_heads, head_dim, max_positions, tie_word_embeddings,
    initializer_range and model_type.
    """

    model_types: tuple[str, ...]  # Hugging Face's names of its architectures
    config: type  # class of its configs
    read: Callable[[Fields], Any]  # (contents of config.json) -> a config
    # its layer, a module made as block(config, dtype, lora, spread, attention, apart) and called as
    # block(states [P, S, D], LayerInput, Context) -> (states, new keys and values; see `attend_streams`)
    block: type[nn.Module]
    # (config) -> the norm after the last layer
    final_norm: Callable[[Any], nn.Module]
    learned_positions: bool  # whether embedded positions are added to the embedded tokens
    # (config, positions i32 [S] or [P, S], or [P, S, 3] with pictures among the tokens) -> cosine and sine, each
    # float32 [.., E/2], by which the layers rotate queries and keys, with a leading axis of kinds where layers differ;
    # None where they do not rotate
    rotation: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array] | None]
    # (config) -> what each layer is given beside the states, stacked along a leading axis
    layer_inputs: Callable[[Any], LayerInput]
    # names of the layers' kernels, on which adapters can be put → `COLUMNS`, `ROWS` or `FUSED`
    projections: Mapping[str, str]
    # (config, name of a projection or embedding) -> standard deviation of freshly drawn weights
    initial_stddev: Callable[[Any, str], float]
    naming: Naming  # of the tensors in its folders
    # (config) -> how many tokens prompt and completion may have together where positions are not learned but end; None
    # where they go on
    longest: Callable[[Any], int | None] = lambda config: None
