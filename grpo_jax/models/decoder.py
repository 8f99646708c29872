"""The scanned decoder that serves every architecture (`architectures`), and its freshly drawn weights."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.models.architectures import ModelConfig, architecture_of
from grpo_jax.models.attention import Context, LayerInput, embed_pictures
from grpo_jax.models.layers import draw_params, recomputed, remat_block
from grpo_jax.models.lora import LoraConfig, init_adapters
from grpo_jax.models.positions import prompt_context
from grpo_jax.models.sharding import OverPrompts
from grpo_jax.models.variables import PyTree


class Decoder(nn.Module):
    """Embedding, scanned layers, final norm."""

    config: ModelConfig  # shape and choices
    dtype: jax.typing.DTypeLike = jnp.float32  # of the computation
    remat: str = "products"  # see `Policy`
    lora: LoraConfig | None = None  # adapters' configuration; they are used where the `lora` collection holds them
    stacked: bool = True  # one scanned layer with stacked weights, or a layer after the other with weights of its own
    # lays the states [P, S, D] that enter a layer over a mesh of devices; None for one device
    spread: OverPrompts | None = None
    attention: str = "rows"  # see `attend_streams`
    apart: bool = False  # see `Projection`

    def setup(self):
        """Declare the weights."""
        c, architecture = self.config, architecture_of(self.config)
        self.embed_tokens = self._table("embed_tokens", c.vocab_size)
        if architecture.learned_positions:
            self.embed_positions = self._table("embed_positions", c.max_positions)
        if not c.tie_word_embeddings:
            self.lm_head = self._table("lm_head", c.vocab_size)
        block = remat_block(architecture.block, self.remat, scanned=self.stacked)
        settings = c, self.dtype, self.lora, self.spread, self.attention, self.apart
        if self.stacked:
            stack = nn.scan(
                block,
                variable_axes={"params": 0, "lora": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast),
                length=c.num_layers,
            )
            self.layers = stack(*settings)
        else:
            self.layers = [block(*settings) for _ in range(c.num_layers)]
        self.norm = architecture.final_norm(c)

    def _table(self, name: str, rows: int) -> jax.Array:
        """Declare a table [rows, D]."""
        return self.param(name, nn.initializers.zeros, (rows, self.config.hidden_size))

    def _recomputed(self, layer: nn.Module) -> Callable[..., PyTree]:
        return partial(recomputed(layer.clone(parent=None)), layer.variables["params"], layer.variables.get("lora", {}))

    def __call__(
        self,
        tokens: jax.Array,
        context: Context,
        cached_inputs: Sequence[LayerInput] = (),
    ) -> tuple[jax.Array, PyTree]:
        """Run tokens i32 [P, S], the prompts' unless their keys are cached, then the completions'.

        Returns the final states [P, S, D], and new keys and values of the layers (see ``attend_streams``): stacked
        along a leading axis, or a list. Unstacked layers take those they read, if any, from `cached_inputs`.
        """
        architecture = architecture_of(self.config)
        x = jnp.take(self.embed_tokens, tokens, axis=0, mode="clip").astype(self.dtype)
        x = x if self.spread is None else self.spread.embedded(x)
        scale = getattr(self.config, "embedding_scale", 1.0)
        x = embed_pictures(x if scale == 1 else x * jnp.asarray(scale, self.dtype), context.vision)
        if architecture.learned_positions:
            # Past the table's end comes NaN, never another token's position.
            places = jnp.take(self.embed_positions, context.positions, axis=0, mode="fill", fill_value=jnp.nan)
            x = x + places.astype(self.dtype)
        if context.rotation is None:
            context = context._replace(rotation=architecture.rotation(self.config, context.positions))
        inputs = architecture.layer_inputs(self.config)
        if self.stacked:
            x, new_keys_values = self.layers(x, inputs, context)
            return self.norm(x), new_keys_values
        new_keys_values = []
        layers = [self._recomputed(layer) for layer in self.layers] if self.remat == "layer" else self.layers
        cached_inputs = cached_inputs or [LayerInput()] * len(layers)
        for i, (layer, cached) in enumerate(zip(layers, cached_inputs, strict=True)):
            layer_input = jax.tree.map(lambda x, i=i: x[i], inputs)
            x, written = layer(x, layer_input._replace(prefix=cached.prefix, cache=cached.cache), context)
            new_keys_values.append(written)
        return self.norm(x), new_keys_values


def init_variables(
    config: ModelConfig,
    key: jax.Array,
    *,
    param_dtype: str = "float32",
    lora: LoraConfig | None = None,
) -> dict[str, PyTree]:
    """Draw variables: normal weights (``Architecture.initial_stddev``), unit norms, zero biases, float32 adapters."""
    decoder = Decoder(config, remat="none")
    context = prompt_context(config, jnp.ones((1, 1), bool)).context
    shapes = jax.eval_shape(decoder.init, key, context.positions, context)["params"]
    weights_key, adapters_key = jax.random.split(key)
    architecture = architecture_of(config)
    params = draw_params(
        shapes, weights_key, lambda names: architecture.initial_stddev(config, names[-2:][0]), param_dtype
    )
    variables = {"params": params}
    if lora is not None:
        variables["lora"] = init_adapters(variables["params"], adapters_key, lora)
    return variables
