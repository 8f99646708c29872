"""A causal language model as pure functions: prefill, decode, forward_group, head.

One scanned decoder serves every family (`families`), which says what its layers are and how positions enter. It runs
prompts [P, L] and, for each, a group of completions [P, G, T] that read the prompt's keys and values where they are.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.core.logprobs import capped, token_logprobs, wide
from grpo_jax.core.tree_logprobs import tree_logprobs
from grpo_jax.core.trie import Trie, widest_below
from grpo_jax.models import cache as caches
from grpo_jax.models.cache import Cache, Prefix
from grpo_jax.models.contexts import decode_context, extend_context, group_context, packed_context, prompt_context
from grpo_jax.models.families import ModelConfig, family_of
from grpo_jax.models.layers import Context, LayerInput, see
from grpo_jax.models.lora import LoraConfig, check_targets, init_adapters
from grpo_jax.models.vision.pictures import VISUAL, PictureStates
from grpo_jax.models.vision.tower import make_tower

Variables = Mapping[str, Any]
REMAT = ("none", "products", "layer")
PRECISIONS = ("default", "high", "highest")


class Policy(NamedTuple):
    """A language model to sample from and to train, as pure functions of its variables.

    ``variables`` is ``{"params": tree}``, or ``{"params": tree, "lora": tree}`` where adapters are in use; the same
    functions without the ``lora`` collection are the base model. Masks may be integers, as tokenizers give them.

    Attributes:
        prefill: (variables, tokens i32 [P, L], mask bool [P, L], pictures=None) -> Prefix. Prompts are padded on the
            left; pictures (`PictureStates` [P, I, ..]) take the places of their placeholder tokens.
        unstack: (variables) -> the same with each layer's weights apart, as ``decode`` takes them: a copy made
            once, where stacked weights would be copied layer by layer for every token.
        decode: (unstacked variables, prefix, tokens i32 [P, G], cache) -> (hidden [P, G, D], cache): one more
            token of each completion; the state predicts the next.
        extend: (unstacked variables, prefix, tokens i32 [P, G, A], mask bool [P, G, A], cache with rows,
            pictures=None) -> (hidden [P, G, D], cache): several more tokens of each completion, the first ones of each
            row; the last one's state predicts the next. Pictures are [P, G, I, ..].
        init_cache: (P, G, T, dtype=None) -> empty Cache for T tokens per completion.
        forward_group: (variables, prompt_tokens i32 [P, L], prompt_mask bool [P, L], tokens i32 [P, G, T],
            mask bool [P, G, T], steps=None, pictures=None, answers=None) -> hidden [P, G, T, D], the states that
            predict each completion token (the first is the prompt's last state). The prompt is computed once for its
            group. Where rows hold several completions one after the other, steps i32 [P, G, T] count the tokens of
            each from 0. Pictures [P, I, ..] are the prompts', answers [P, G, I, ..] stand among the completions.
        head: (variables) -> unembedding [V, D] in the type it is stored in, so that its gradient is too; logits are
            those of ``logits``.
        max_positions: how many tokens prompt and completion may have together, where positions end (learned ones,
            and LongRoPE's); None where they go on (other rotations).
        see: (variables, `Pictures` [.., I, ..]) -> `PictureStates` [.., I, ..], what the tower makes of pictures; None
            for a model without one.
        softcap: the cap of the logits, which ``logits`` and ``token_logprobs`` apply; None for none.
        matmul_precision: of products of matrices, in all of these functions and their gradients; None for JAX's own.
    """

    prefill: Callable[..., Prefix]
    unstack: Callable[[Variables], Variables]
    decode: Callable[..., tuple[jax.Array, Cache]]
    extend: Callable[..., tuple[jax.Array, Cache]]
    init_cache: Callable[..., Cache]
    forward_group: Callable[..., jax.Array]
    head: Callable[[Variables], jax.Array]
    max_positions: int | None = None
    see: Callable[..., PictureStates] | None = None
    softcap: float | None = None
    matmul_precision: str | None = None

    def logits(self, subscripts: str, *operands: jax.Array) -> jax.Array:
        """Logits, at least float32, of the einsum of states and (rows of) the head, both of the states' type."""
        products = jnp.einsum(
            subscripts, *operands, precision=self.matmul_precision, preferred_element_type=wide(operands[0].dtype)
        )
        return capped(products, self.softcap)

    def token_logprobs(
        self,
        variables: Variables,
        hidden: jax.Array,
        tokens: jax.Array,
        *,
        trie: Trie | None = None,
        nodes: jax.Array | None = None,
        **options: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability of each token and entropy of the distribution it was drawn from, under this policy.

        Args:
            variables: they hold the head.
            hidden: [P, G, T, D] of ``forward_group``.
            tokens: i32 [P, G, T].
            trie: the texts of which each completion is one; it must not be traced.
            nodes: i32 [P, G, T] with a trie, the node before each token; by default completions begin at its root.
            **options: temperature, allowed_tokens and chunk_size of ``core.logprobs.token_logprobs``.

        Returns:
            (logprobs, entropy), both [P, G, T], at least float32.
        """
        head = self.head(variables)
        with _precision(self.matmul_precision):
            if trie is None or nodes is not None:
                options |= {"trie": trie, "nodes": nodes, "softcap": self.softcap}
                return token_logprobs(hidden, head, tokens, **options)
            options |= {"below": widest_below(trie), "softcap": self.softcap}
            return tree_logprobs(hidden, head, tokens, trie, **options)


def _precision(name: str | None) -> Any:
    """The context in which products of matrices have this precision; None leaves JAX's own."""
    return nullcontext() if name is None else jax.default_matmul_precision(name)


class Decoder(nn.Module):
    """Embedding, scanned layers, final norm.

    Attributes:
        config: shape and choices.
        dtype: of the computation.
        param_dtype: of freshly drawn parameters.
        remat: what the backward pass computes again (see ``make_policy``).
        lora: adapters' configuration; they are used where the ``lora`` collection holds them.
        stacked: one scanned layer with stacked weights, or a layer after the other with weights of its own.
        spread: lays the states [P, S, D] that enter a stacked layer over a mesh of devices; None for one device.
    """

    config: ModelConfig
    dtype: jax.typing.DTypeLike = jnp.float32
    param_dtype: jax.typing.DTypeLike = jnp.float32
    remat: str = "products"
    lora: LoraConfig | None = None
    stacked: bool = True
    spread: Callable[[jax.Array], jax.Array] | None = None

    def setup(self):
        """Declare the weights."""
        c, family = self.config, family_of(self.config)
        self.embed_tokens = self._embedding("embed_tokens", c.vocab_size)
        if family.learned_positions:
            self.embed_positions = self._embedding("embed_positions", c.max_positions)
        if not c.tie_word_embeddings:
            self.lm_head = self._embedding("lm_head", c.vocab_size)
        self.layers = self._stack(family.block) if self.stacked else self._sequence(family.block)
        self.norm = family.final_norm(c, self.param_dtype)

    def _stack(self, block: type[nn.Module]) -> nn.Module:
        block = _remat(block, self.remat)
        stack = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            length=self.config.num_layers,
        )
        return stack(self.config, self.dtype, self.param_dtype, self.lora, self.spread)

    def _sequence(self, block: type[nn.Module]) -> list[nn.Module]:
        return [block(self.config, self.dtype, self.param_dtype, self.lora) for _ in range(self.config.num_layers)]

    def _embedding(self, name: str, rows: int) -> jax.Array:
        return self.param(name, nn.initializers.zeros, (rows, self.config.hidden_size), self.param_dtype)

    def __call__(
        self,
        tokens: jax.Array,
        context: Context,
        remembered: Sequence[LayerInput] = (),
    ) -> tuple[jax.Array, Any]:
        """Run tokens through all layers.

        Args:
            tokens: i32 [P, S], the prompts' unless they are ``remembered``, then the completions'.
            context: their positions and masks.
            remembered: for each layer the keys and values it reads when the prompts do not run; layers that are
                not stacked take them.

        Returns:
            Final states [P, S, D], and the new keys and values of the layers (see ``attend_streams``): stacked along
            a leading axis, or a list.
        """
        family = family_of(self.config)
        x = jnp.take(self.embed_tokens, tokens, axis=0, mode="clip").astype(self.dtype)
        scale = getattr(self.config, "embedding_scale", 1.0)
        x = see(x if scale == 1 else x * jnp.asarray(scale, self.dtype), context.sight)
        if family.learned_positions:
            # Past the table's end comes NaN, never another token's position.
            places = jnp.take(self.embed_positions, context.positions, axis=0, mode="fill", fill_value=jnp.nan)
            x = x + places.astype(self.dtype)
        if context.rotation is None:
            context = context._replace(rotation=family.rotation(self.config, context.positions))
        inputs = family.layer_inputs(self.config)
        if self.stacked:
            x, new_keys_values = self.layers(x, inputs, context)
            return self.norm(x), new_keys_values
        new_keys_values = []
        for i, (layer, memory) in enumerate(zip(self.layers, remembered, strict=True)):
            own = jax.tree.map(lambda x, i=i: x[i], inputs)
            x, written = layer(x, own._replace(prefix=memory.prefix, cache=memory.cache), context)
            new_keys_values.append(written)
        return self.norm(x), new_keys_values


def precision_of(compute_dtype: str, given: str | None) -> str | None:
    """The precision of products of matrices: the given one, or what the type of the activations needs.

    That is ``highest`` for float32, whose products GPUs (TF32) and TPUs (bfloat16) round otherwise, and JAX's own
    setting, None, for other types.

    Raises:
        ValueError: if it is not ``default``, ``high`` or ``highest``, as of `jax.default_matmul_precision`.
    """
    if given not in (None, *PRECISIONS):
        raise ValueError(f"matmul_precision must be one of {PRECISIONS} or None, got {given!r}")
    return "highest" if given is None and compute_dtype == "float32" else given


def make_policy(
    config: ModelConfig,
    *,
    compute_dtype: str = "float32",
    remat: str = "products",
    lora: LoraConfig | None = None,
    spread: Callable[[jax.Array], jax.Array] | None = None,
    matmul_precision: str | None = None,
) -> Policy:
    """The functions of a decoder.

    Args:
        config: its shape and choices.
        compute_dtype: ``float32``, ``bfloat16`` or ``float16``; norms, rotations and softmax are float32 either way.
        remat: what the backward pass of ``forward_group`` computes again: ``none``; ``products``, all but the products
            with weights, that is attention and what is elementwise; ``layer``, whole layers, of which only the input
            is kept.
        lora: configuration of the adapters, if variables will hold any.
        spread: see `Decoder`; ``sharding.over_prompts`` makes it.
        matmul_precision: see `precision_of`.

    Raises:
        ValueError: if dtype, remat or precision is another one, or an adapter's target is no projection of this
            architecture.
    """
    dtype = _dtype(compute_dtype, "compute_dtype")
    if remat not in REMAT:
        raise ValueError(f"remat must be one of {REMAT}, got {remat!r}")
    matmul_precision = precision_of(compute_dtype, matmul_precision)
    family = family_of(config)
    if lora is not None:
        check_targets(lora, family.projections, config.model_type)
    limit = config.max_positions if family.learned_positions else family.longest(config)
    vision = getattr(config, "vision", None)
    decoder = Decoder(config, dtype=dtype, remat=remat, lora=lora, spread=spread)
    unstacked = Decoder(config, dtype=dtype, remat="none", lora=lora, stacked=False)

    def precise(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args, **kwargs):
            with _precision(matmul_precision):
                return function(*args, **kwargs)

        return run

    def apply(variables: Variables, *args, **kwargs):
        if lora is None and "lora" in variables:
            raise ValueError("variables hold a 'lora' collection but the policy was made with lora=None")
        return decoder.apply(variables, *args, **kwargs)

    def prefill(
        variables: Variables, tokens: jax.Array, mask: jax.Array, pictures: PictureStates | None = None
    ) -> Prefix:
        mask = _as_mask("tokens", tokens, mask, 2)
        prompts = prompt_context(config, mask, tokens, pictures)
        _check_room("tokens", mask, 0, limit)
        hidden, (keys, values) = apply(variables, jnp.where(mask, tokens, 0), prompts.context)
        order = prompts.context.prompt.positions
        return Prefix(hidden[:, -1], tuple(keys), tuple(values), mask, order, prompts.lengths, prompts.advance)

    def run_unstacked(
        variables: Variables, prefix: Prefix, tokens: jax.Array, cache: Cache, context: Context
    ) -> tuple[jax.Array, Cache]:
        remembered = [
            LayerInput(prefix=(keys, values), cache=own)
            for keys, values, *own in zip(prefix.keys, prefix.values, cache.keys, cache.values, strict=True)
        ]
        hidden, written = unstacked.apply(variables, tokens, context, remembered)
        keys, values = zip(*written, strict=True)
        return hidden, cache._replace(keys=keys, values=values)

    def decode(variables: Variables, prefix: Prefix, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        if cache.rows is not None:
            return extend(variables, prefix, tokens[..., None], jnp.ones((*tokens.shape, 1), bool), cache)
        context = decode_context(config, prefix, cache, tokens.shape[1])
        hidden, cache = run_unstacked(variables, prefix, tokens, cache, context)
        return hidden, cache._replace(length=cache.length + 1)

    def extend(
        variables: Variables,
        prefix: Prefix,
        tokens: jax.Array,
        mask: jax.Array,
        cache: Cache,
        pictures: PictureStates | None = None,
    ) -> tuple[jax.Array, Cache]:
        if cache.rows is None:
            raise ValueError("cache.rows must say what each completion holds, got None")
        mask = _as_mask("tokens", tokens, mask, 3)
        context, rows = extend_context(config, prefix, cache, tokens, mask, pictures)
        row = jnp.where(mask, tokens, 0).reshape(len(tokens), -1)
        hidden, cache = run_unstacked(variables, prefix, row, cache, context)
        last = jnp.maximum(mask.sum(-1) - 1, 0)[..., None, None]
        hidden = jnp.take_along_axis(hidden.reshape(*tokens.shape, -1), last, axis=2)[:, :, 0]
        return hidden, cache._replace(length=cache.length + tokens.shape[2], rows=rows)

    def forward_group(
        variables: Variables,
        prompt_tokens: jax.Array,
        prompt_mask: jax.Array,
        tokens: jax.Array,
        mask: jax.Array,
        steps: jax.Array | None = None,
        pictures: PictureStates | None = None,
        answers: PictureStates | None = None,
    ) -> jax.Array:
        prompt_mask = _as_mask("prompt_tokens", prompt_tokens, prompt_mask, 2)
        mask = _as_mask("tokens", tokens, mask, 3)
        _check_room("prompt_tokens", prompt_mask, tokens.shape[2], limit)
        prompts = prompt_context(config, prompt_mask, prompt_tokens, pictures)
        inputs = jnp.where(mask, tokens, 0)[:, :, :-1]  # the last token predicts nothing
        if steps is None:
            context = group_context(config, prompts, inputs, mask[:, :, :-1], answers)
        elif answers is None:
            context = packed_context(prompts, steps[:, :, 1:], mask[:, :, 1:])
        else:
            raise ValueError("answers must be None where rows hold several completions (steps)")
        row = jnp.concatenate(
            [jnp.where(prompt_mask, prompt_tokens, 0), inputs.reshape(len(inputs), inputs[0].size)], 1
        )
        hidden, _ = apply(variables, row, context)
        length = prompt_mask.shape[1]
        first = jnp.broadcast_to(hidden[:, None, length - 1 : length], (*tokens.shape[:2], 1, hidden.shape[-1]))
        rest = hidden[:, length:].reshape(*inputs.shape, hidden.shape[-1])
        if steps is not None:  # wherever a completion begins, the prompt's last state predicts
            rest = jnp.where(steps[:, :, 1:, None] == 0, first, rest)
        return jnp.concatenate([first, rest], axis=2)

    return Policy(
        precise(prefill),
        _unstack,
        precise(decode),
        precise(extend),
        partial(_init_cache, config, dtype),
        precise(forward_group),
        partial(_head, config),
        limit,
        vision and precise(make_tower(vision, dtype, remat, lora, spread)),
        getattr(config, "logit_softcap", None),
        matmul_precision,
    )


def _remat(block: type[nn.Module], remat: str) -> type[nn.Module]:
    if remat == "none":
        return block
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "products" else None
    return nn.remat(block, prevent_cse=False, policy=keep)


def _init_cache(
    config: ModelConfig, compute_dtype: Any, prompts: int, group: int, length: int, dtype: Any = None
) -> Cache:
    shape = (prompts, config.num_kv_heads, group, length, config.head_dim)
    return caches.init_cache(config.num_layers, shape, dtype or compute_dtype)


def _unstack(variables: Variables) -> Variables:
    """Stacked ``layers`` of every collection as ``layers_0``, ``layers_1``, ...; a tower as it is."""

    def split(tree: Mapping[str, Any]) -> dict[str, Any]:
        stacked = tree.get("layers", {})
        count = len(next(iter(jax.tree.leaves(stacked)), ()))
        apart = {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count)}
        return {name: part for name, part in tree.items() if name != "layers"} | apart

    return {name: tree if name == VISUAL else split(tree) for name, tree in variables.items()}


def _head(config: ModelConfig, variables: Variables) -> jax.Array:
    return variables["params"]["embed_tokens" if config.tie_word_embeddings else "lm_head"]


def init_variables(
    config: ModelConfig,
    key: jax.Array,
    *,
    param_dtype: str = "float32",
    lora: LoraConfig | None = None,
) -> dict[str, Any]:
    """Freshly drawn variables: normal weights (``Family.initial_stddev``), unit norms, zero biases; float32 adapters.

    The forward pass is traced for its shapes only. Under ``jax.eval_shape`` nothing is allocated.
    """
    decoder = Decoder(config, param_dtype=_dtype(param_dtype, "param_dtype"), remat="none")
    context = prompt_context(config, jnp.ones((1, 1), bool)).context
    shapes = jax.eval_shape(decoder.init, key, context.positions, context)["params"]
    weights_key, adapters_key = jax.random.split(key)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(weights_key, len(leaves))
    params = [
        _draw([entry.key for entry in path], leaf, subkey, config)
        for (path, leaf), subkey in zip(leaves, keys, strict=True)
    ]
    variables = {"params": jax.tree_util.tree_unflatten(structure, params)}
    if lora is not None:
        variables["lora"] = init_adapters(variables["params"], adapters_key, lora)
    return variables


def _draw(path: list[str], leaf: jax.ShapeDtypeStruct, key: jax.Array, config: ModelConfig) -> jax.Array:
    if path[-1] == "scale":
        return jnp.ones(leaf.shape, leaf.dtype)
    if path[-1] in ("bias", "excess"):
        return jnp.zeros(leaf.shape, leaf.dtype)
    stddev = family_of(config).initial_stddev(config, path[-2:][0])
    return (jax.random.normal(key, leaf.shape, jnp.float32) * stddev).astype(leaf.dtype)


def _dtype(name: str, argument: str) -> jnp.dtype:
    if str(name) not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{argument} must be 'float32', 'bfloat16' or 'float16', got {name!r}")
    return jnp.dtype(name)


def _as_mask(name: str, tokens: jax.Array, mask: jax.Array, rank: int) -> jax.Array:
    """The mask of tokens of this rank as bool; tokenizers give integers."""
    if tokens.ndim != rank or tokens.shape != mask.shape or 0 in tokens.shape:
        raise ValueError(
            f"{name} and its mask must have the same shape of rank {rank} and no empty axis, "
            f"got {tokens.shape} and {mask.shape}"
        )
    integers = [jnp.issubdtype(array.dtype, jnp.integer) for array in (tokens, mask)]
    if not integers[0] or not (integers[1] or mask.dtype == jnp.bool_):
        raise TypeError(f"{name} must be integers and its mask bool or integers, got {tokens.dtype} and {mask.dtype}")
    return mask.astype(bool)


def _check_room(name: str, mask: jax.Array, steps: int, limit: int | None) -> None:
    """Some positions end; under jit only the completions' length is known here."""
    if limit is None:
        return
    longest = 1 if isinstance(mask, jax.core.Tracer) else int(mask.sum(axis=1).max())
    if longest + steps > limit:
        raise ValueError(
            f"{name} and completions must have at most {limit} tokens together, as many as the model has positions; "
            f"got {longest} and {steps}"
        )
