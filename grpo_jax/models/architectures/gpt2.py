"""GPT-2: learned positions, layer norms, one fused projection for queries, keys and values (Radford et al. 2019)."""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import jax
from flax import linen as nn
from pydantic.dataclasses import dataclass

from grpo_jax.models import hf_config
from grpo_jax.models.attention import Context, LayerInput, LayerOutput, attend_streams
from grpo_jax.models.hf_config import STRICT, Heads, NotNegative, Positions, Rows, Width
from grpo_jax.models.layers import ACTIVATIONS, COLUMNS, FUSED, ROWS, Architecture, LayerNorm, Naming, Projection
from grpo_jax.models.lora import LoraConfig

MODEL_TYPE = "gpt2"
_REQUIRED = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")

_NEUTRAL = {
    **hf_config.NEUTRAL,
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}


@dataclass(frozen=True, config=STRICT)
class GPT2Config:
    """Shape and choices of a GPT-2; hashable, hence static under jit."""

    vocab_size: Rows  # V, rows of the embedding
    hidden_size: Width  # D
    intermediate_size: Width  # width of the MLP
    num_layers: Positions  # number of layers
    num_heads: Heads  # H, heads; divides D
    max_positions: Rows  # rows of the position embedding, the limit of prompt plus completion tokens
    activation: str = "gelu_new"  # the MLP's, one of `layers.ACTIVATIONS`
    layer_norm_eps: NotNegative = 1e-5  # epsilon of every layer norm
    tie_word_embeddings: bool = True  # the head is the embedding
    initializer_range: NotNegative = 0.02  # standard deviation at initialisation
    model_type: ClassVar[str] = MODEL_TYPE
    vision: ClassVar[None] = None
    logit_softcap: ClassVar[None] = None
    embedding_scale: ClassVar[float] = 1.0

    def __post_init__(self):
        whole = self.hidden_size % self.num_heads == 0
        hf_config.expect(whole, "n_embd", f"a multiple of n_head={self.num_heads}", self.hidden_size)
        known = self.activation in ACTIVATIONS
        hf_config.expect(known, "activation_function", f"one of {tuple(ACTIVATIONS)}", self.activation)

    @property
    def head_dim(self) -> int:
        """Return E, the head size."""
        return self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Return K: every query head has its own keys and values."""
        return self.num_heads

    @classmethod
    def from_hf(cls, config: hf_config.ConfigJson) -> "GPT2Config":
        """Read the contents of a ``config.json``; ValueErrors name the field that is missing or unsupported.

        Dropout is never applied, since sampler and update must have the same distribution. Scores are always float32
        (``reorder_and_upcast_attn``). The ``summary_*`` fields belong to a head that a language model does not have.
        """
        fields = hf_config.check_fields(config, _NEUTRAL, MODEL_TYPE, _REQUIRED)
        return cls(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["n_embd"],
            intermediate_size=fields.get("n_inner", 4 * fields["n_embd"]),
            num_layers=fields["n_layer"],
            num_heads=fields["n_head"],
            max_positions=fields["n_positions"],
            activation=fields.get("activation_function", "gelu_new"),
            layer_norm_eps=float(fields.get("layer_norm_epsilon", 1e-5)),
            tie_word_embeddings=fields.get("tie_word_embeddings", True),
            initializer_range=float(fields.get("initializer_range", 0.02)),
        )


class GPT2Block(nn.Module):
    """One layer over prompts and completions at once (see ``attend_streams``)."""

    config: GPT2Config
    dtype: jax.typing.DTypeLike
    lora: LoraConfig | None = None
    spread: Callable[[jax.Array], jax.Array] | None = None
    attention: str = "rows"
    products: str = ""

    def setup(self):
        """Declare the layer's weights."""
        c = self.config
        projection = partial(Projection, use_bias=True, dtype=self.dtype, lora=self.lora, products=self.products)
        self.ln_1 = LayerNorm(c.layer_norm_eps)
        self.c_attn = projection(3 * c.hidden_size)
        self.attn_c_proj = projection(c.hidden_size)
        self.ln_2 = LayerNorm(c.layer_norm_eps)
        self.c_fc = projection(c.intermediate_size)
        self.mlp_c_proj = projection(c.hidden_size)

    def __call__(self, x: jax.Array, layer_input: LayerInput, context: Context) -> LayerOutput:
        """Run the layer on states [P, S, D] of the running tokens; returns new states, and keys and values to cache."""
        x = x if self.spread is None else self.spread(x)
        c = self.config
        fused = self.c_attn(self.ln_1(x)).reshape(*x.shape[:-1], 3, c.num_heads, c.head_dim)
        query, key, value = fused[:, :, 0, :, None], fused[:, :, 1], fused[:, :, 2]
        mixed, new_keys_values = attend_streams(query, key, value, layer_input, context, attention=self.attention)
        x = x + self.attn_c_proj(mixed)
        inner = ACTIVATIONS[c.activation](self.c_fc(self.ln_2(x)))
        return x + self.mlp_c_proj(inner), new_keys_values


GPT2_ARCHITECTURE = Architecture(
    model_types=(MODEL_TYPE,),
    read=GPT2Config.from_hf,
    block=GPT2Block,
    final_norm=lambda config: LayerNorm(config.layer_norm_eps),
    learned_positions=True,
    longest=lambda config: config.max_positions,
    rotation=lambda config, positions: None,
    layer_inputs=lambda config: LayerInput(),
    projections={"c_attn": FUSED, "attn_c_proj": ROWS, "c_fc": COLUMNS, "mlp_c_proj": ROWS},
    # Smaller for kernels that add to the residual stream, as in the paper.
    initial_stddev=lambda config, name: (
        config.initializer_range / (math.sqrt(2 * config.num_layers) if name.endswith("c_proj") else 1)
    ),
    naming=Naming(
        prefixes=("transformer.", ""),
        heads=("lm_head.weight",),
        tensors={"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"},
        layers="h",
        modules={
            "ln_1": "ln_1",
            "c_attn": "attn.c_attn",
            "attn_c_proj": "attn.c_proj",
            "ln_2": "ln_2",
            "c_fc": "mlp.c_fc",
            "mlp_c_proj": "mlp.c_proj",
        },
        transposed=False,
        constants=r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$",
    ),
)
