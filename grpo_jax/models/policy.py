"""A language policy as pure functions of its variables, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.dynamic_scale import DynamicScale

from grpo_jax.config.policy import LoraSection, PolicySection
from grpo_jax.core.logprobs import capped, token_logprobs, wide
from grpo_jax.core.tree_logprobs import tree_logprobs
from grpo_jax.core.trie import Trie, widest_below
from grpo_jax.errors import UserError
from grpo_jax.models import cache as caches
from grpo_jax.models.attention import Context, LayerInput
from grpo_jax.models.cache import Cache, Prefix
from grpo_jax.models.contexts import decode_context, extend_context, group_context, packed_context, prompt_context
from grpo_jax.models.decoder import REMAT, Decoder, as_dtype
from grpo_jax.models.families import ModelConfig, family_of
from grpo_jax.models.hf import load_folder
from grpo_jax.models.hf.tokens import chat_renderer, prompt_encoder
from grpo_jax.models.lora import LoraConfig, check_targets, init_adapters
from grpo_jax.models.variables import VISUAL
from grpo_jax.models.vision.pictures import PictureStates
from grpo_jax.models.vision.tower import make_tower

Variables = Mapping[str, Any]


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
    dtype = as_dtype(compute_dtype, "compute_dtype")
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


def lora_config(section: LoraSection, model: Any) -> Any:
    """The `LoraConfig` for a model's config, or None where all weights are trained.

    Raises:
        UserError: A target is no projection of this architecture, or the folder that the section names does not fit it.
    """
    from grpo_jax.models.families import family_of
    from grpo_jax.models.hf.peft import load_adapters
    from grpo_jax.models.lora import LoraConfig, check_targets
    from grpo_jax.models.vision.tower import TOWERS

    if section.path is not None:
        return load_adapters(section.path, model)[0]
    if section.rank == 0:
        return None
    projections = tuple(family_of(model).projections)
    tower = ()
    if section.vision:
        if getattr(model, "vision", None) is None:
            raise UserError(f"policy.lora.vision: this {model.model_type} has no vision tower; leave it out")
        tower = tuple(TOWERS[model.vision.family].projections)
    try:
        lora = LoraConfig(section.rank, section.alpha, tuple(section.targets) or projections, tower)
        check_targets(lora, projections, model.model_type)
        return lora
    except ValueError as error:
        raise UserError(f"policy.lora: {error}") from error


def first_adapters(
    section: LoraSection, lora: Any, model: Any, params: Any, seed: int, visual: Any = None
) -> dict[str, Any]:
    """The `lora` collection that training begins with: the folder's that the section names, else fresh ones."""
    from grpo_jax.models.hf.peft import load_adapters

    if section.path is not None:
        return load_adapters(section.path, model)[1]
    return init_adapters(params, jax.random.fold_in(jax.random.key(seed), 2**30), lora, visual)


def needs_tower(section: PolicySection, lora: Any) -> bool:
    """Whether the vision tower takes part in training, whatever the prompts are."""
    return section.vision == "train" or (lora is not None and bool(lora.vision))


def make_loss_scale(compute_dtype: str) -> DynamicScale | None:
    """Flax's dynamic scale for float16, None for types with float32's range.

    It starts at 2¹⁶, is halved by an update whose gradients overflow (which is left out), and doubled after 2,000
    updates in a row that did not. It does not fall below 1: what overflows there is not the scale's doing.

    Args:
        compute_dtype: Type of the activations.
    """
    if compute_dtype != "float16":
        return None
    start = jnp.full((), 2.0**16, jnp.float32)
    return DynamicScale(fin_steps=jnp.zeros((), jnp.int32), scale=start, minimum_scale=1.0)


class LanguagePolicy(NamedTuple):
    """A loaded language policy.

    Attributes:
        functions: Its pure functions: prefill, decode, forward_group, head, …
        params: Its weights, float32.
        config: The decoder's shape and choices.
        tokenizer: The folder's.
        eos_ids: Tokens that end a completion.
        pad_id: Token that fills up.
        visual: The weights of its vision tower, or None if it was not asked for.
    """

    functions: Policy
    params: dict[str, Any]
    config: Any
    tokenizer: Any
    eos_ids: tuple[int, ...]
    pad_id: int
    visual: dict[str, Any] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """What its functions take: the weights, and the vision tower's where it is loaded."""
        return {"params": self.params} | ({} if self.visual is None else {VISUAL: self.visual})

    def encode(self, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as left-padded tokens i32 [P, L] and their mask bool [P, L], by the chat template if there is one.

        Marks such as ``<|im_end|>`` come from the template alone; in a prompt they are text.

        Raises:
            UserError: The chat template or the tokenizer fails, or a prompt cannot be encoded.
        """
        chat = bool(getattr(self.tokenizer, "chat_template", None))
        render = chat_renderer(self.tokenizer) if chat else str
        vocabulary = self.config.vocab_size
        encode = prompt_encoder(self.tokenizer, render, add_special_tokens=not chat, vocab_size=vocabulary)
        ids = [encode(prompt) for prompt in prompts]
        width = max(map(len, ids))
        tokens = np.full((len(ids), width), self.pad_id, np.int32)
        mask = np.arange(width) >= width - np.array([[len(row)] for row in ids])
        for row, entry in zip(tokens, ids, strict=True):
            row[width - len(entry) :] = entry
        return tokens, mask

    def decode(self, samples: Any) -> list[list[str]]:
        """Completions of a sampler as texts `[P][G]`, special tokens left out."""
        tokens, mask = jax.device_get((samples.tokens, samples.mask))
        return [
            [self.tokenizer.decode(row[real], skip_special_tokens=True) for row, real in zip(*group, strict=True)]
            for group in zip(tokens, mask, strict=True)
        ]


def load_policy(
    folder: str | Path,
    *,
    compute_dtype: str = "float32",
    remat: str = "products",
    vision: bool = False,
    matmul_precision: str | None = None,
) -> LanguagePolicy:
    """Loads a folder of one of the architectures in docs/policies.md.

    Args:
        folder: A local folder, or a hub id.
        compute_dtype: Type of the activations; the weights are float32.
        remat: What the backward pass computes again (`make_policy`).
        vision: Whether to load the vision tower too, where there is one.
        matmul_precision: Of products of matrices (`precision_of`).

    Raises:
        UserError: Something is missing, truncated, or of an unsupported kind; says how to mend it.
    """
    loaded = load_folder(folder, param_dtype="float32", vision=vision)
    functions = make_policy(loaded.config, compute_dtype=compute_dtype, remat=remat, matmul_precision=matmul_precision)
    return LanguagePolicy(
        functions, loaded.params, loaded.config, loaded.tokenizer, loaded.eos_ids, loaded.pad_id, loaded.visual
    )
