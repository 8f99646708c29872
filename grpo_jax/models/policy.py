"""A language policy: pure functions of its variables, and loading from a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.sections import PolicySection
from grpo_jax.core.logprobs import capped, token_logprobs, tree_logprobs, wide
from grpo_jax.core.trie import Trie, widest_below
from grpo_jax.errors import UserError
from grpo_jax.models.architectures import ModelConfig, architecture_of
from grpo_jax.models.attention import Cache, Context, LayerInput, Prefix, choose_attention, platform_of
from grpo_jax.models.decoder import Decoder, fuse_projections, fused_config, separate, unstack_and_fuse
from grpo_jax.models.hf import folder as hf
from grpo_jax.models.hf.chat import Message, Tokenizer, conversation_encoder, decoded, pad
from grpo_jax.models.hf.peft import load_adapters, lora_config, save_adapters
from grpo_jax.models.hf.weights import shapes
from grpo_jax.models.hf_config import as_user_error
from grpo_jax.models.lora import LoraConfig, check_targets, init_adapters, merge, needs_tower, quantise
from grpo_jax.models.positions import decode_context, extend_context, group_context, packed_context, prompt_context
from grpo_jax.models.sharding import OverPrompts, gather_columns, make_mesh, shard
from grpo_jax.models.variables import (
    VALUE,
    VISUAL,
    PyTree,
    Variables,
    copied,
    init_value_head,
    keeps_layers_apart,
    precision_of,
    tower_dtype,
    unstack,
    weight_dtype,
    with_tower,
)
from grpo_jax.models.vision.pictures import Pictures, PictureStates
from grpo_jax.models.vision.tower import Tower, encode_pictures


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A language model to sample from and to train. Its methods are pure functions of variables.

    Variables are ``{"params": tree}``, with ``"lora"`` for adapters; without that collection the same methods are the
    base model. Masks may be integers, as from tokenizers. ValueError if an adapter's target is no projection.
    """

    config: ModelConfig  # shape and choices of the decoder
    compute_dtype: str = "float32"  # or bfloat16; norms, rotary embeddings and softmax are always float32
    # rematerialisation in the backward pass of `forward_group`: `none` keeps all activations, `products` recomputes
    # attention and elementwise operations, not products with weights, and `layer` keeps only the inputs of layers
    remat: str = "products"
    lora: LoraConfig | None = None  # configuration of the adapters; None without
    mesh: jax.sharding.Mesh | None = None  # devices that share the prompts, if there are several
    matmul_precision: str | None = None  # of products and their gradients; see `precision_of`, `products`
    # `eager` computes scores and softmax as XLA products, `auto` and `cudnn` use kernels if available
    # (`choose_attention`)
    attn_implementation: str = "auto"
    platform: str = ""  # of the compiled methods (`platform_of`); by default that of JAX's first device
    source: hf.PolicyFolder | None = None  # the folder without weights; None unless `load_policy` made the policy
    variables: Variables = dataclasses.field(default_factory=dict)  # the weights as loaded, on their devices

    def __post_init__(self):
        if not self.platform:
            object.__setattr__(self, "platform", platform_of(jax.devices()[0]))
        if self.lora is not None:
            check_targets(self.lora, architecture_of(self.config).projections, self.config.model_type)

    @classmethod
    def from_section(
        cls,
        section: PolicySection,
        config: ModelConfig,
        mesh: jax.sharding.Mesh | None = None,
        platform: str | None = None,
    ) -> Policy:
        """Make a decoder's policy from a config section, without weights."""
        same = ("compute_dtype", "remat", "matmul_precision", "attn_implementation")
        options = {name: getattr(section, name) for name in same}
        return cls(config, lora=lora_config(section.lora, config), mesh=mesh, platform=platform or "", **options)

    def prefill(
        self, variables: Variables, tokens: jax.Array, mask: jax.Array, pictures: PictureStates | None = None
    ) -> Prefix:
        """Run left-padded prompts i32 [P, L] once for all their completions.

        Pictures (`PictureStates` [P, I, ..]) replace their placeholder tokens.
        """
        variables, tokens, mask, pictures = self._over_prompts(variables, tokens, mask, pictures)
        mask = mask.astype(bool)
        self.check_room("tokens", mask, 0)
        prompts = prompt_context(self.config, mask, tokens, pictures)
        hidden, (keys, values) = self._run(variables, jnp.where(mask, tokens, 0), prompts.context)
        read = prompts.context.prompt, prompts.lengths, prompts.advance
        return Prefix(hidden[:, -1], tuple(keys), tuple(values), *read)

    def decode_step(
        self, variables: Variables, prefix: Prefix, tokens: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Run one more token i32 [P, G] of each completion; returns the states [P, G, D] that predict the next.

        The variables are those of `unstack`.
        """
        if cache.rows is not None:
            return self.extend(variables, prefix, tokens[..., None], jnp.ones((*tokens.shape, 1), bool), cache)
        context = decode_context(self.config, prefix, cache, tokens.shape[1])
        hidden, cache = self._run_cached(variables, prefix, tokens, cache, context)
        return hidden, cache._replace(length=cache.length + 1)

    def extend(
        self,
        variables: Variables,
        prefix: Prefix,
        tokens: jax.Array,
        mask: jax.Array,
        cache: Cache,
        pictures: PictureStates | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Run several more tokens i32 [P, G, A] of each completion; the mask is True for the first ones of each row.

        Returns the states [P, G, D] of each row's last token, which predict the next. The variables are those of
        `unstack`, the cache has `rows`, and pictures are [P, G, I, ..].
        """
        mask = mask.astype(bool)
        context, rows = extend_context(self.config, prefix, cache, tokens, mask, pictures)
        row = jnp.where(mask, tokens, 0).reshape(len(tokens), -1)
        hidden, cache = self._run_cached(variables, prefix, row, cache, context)
        last = jnp.maximum(mask.sum(-1) - 1, 0)[..., None, None]
        hidden = jnp.take_along_axis(hidden.reshape(*tokens.shape, -1), last, axis=2)[:, :, 0]
        return hidden, cache._replace(length=cache.length + tokens.shape[2], rows=rows)

    def forward_group(
        self,
        variables: Variables,
        prompt_tokens: jax.Array,
        prompt_mask: jax.Array,
        tokens: jax.Array,
        mask: jax.Array,
        steps: jax.Array | None = None,
        pictures: PictureStates | None = None,
        observations: PictureStates | None = None,
    ) -> jax.Array:
        """Return the states [P, G, T, D] that predict each token of completions i32 [P, G, T].

        The first is the prompt's last state. Prompts i32 [P, L] run once for their group. If rows pack several
        completions, steps i32 [P, G, T] number the tokens of each from 0. `pictures` [P, I, ..] belong to the prompts,
        `observations` [P, G, I, ..] to the completions.
        """
        variables, prompt_tokens, prompt_mask, tokens, mask, steps, pictures, observations = self._over_prompts(
            variables, prompt_tokens, prompt_mask, tokens, mask, steps, pictures, observations
        )
        prompt_mask, mask = prompt_mask.astype(bool), mask.astype(bool)
        self.check_room("prompt_tokens", prompt_mask, tokens.shape[2])
        prompts = prompt_context(self.config, prompt_mask, prompt_tokens, pictures)
        inputs = jnp.where(mask, tokens, 0)[:, :, :-1]  # the last token predicts nothing
        if steps is None:
            context = group_context(self.config, prompts, inputs, mask[:, :, :-1], observations)
        else:
            context = packed_context(prompts, steps[:, :, 1:], mask[:, :, 1:])
        rows = jnp.where(prompt_mask, prompt_tokens, 0), inputs.reshape(len(inputs), inputs[0].size)
        hidden, _ = self._run(variables, jnp.concatenate(rows, axis=1), context)  # [P, L + G·(T-1), D]
        length = prompt_mask.shape[1]
        first = jnp.broadcast_to(hidden[:, None, length - 1 : length], (*tokens.shape[:2], 1, hidden.shape[-1]))
        rest = hidden[:, length:].reshape(*inputs.shape, hidden.shape[-1])
        if steps is not None:  # the prompt's last state predicts the first token of every completion
            rest = jnp.where(steps[:, :, 1:, None] == 0, first, rest)
        return jnp.concatenate([first, rest], axis=2)

    def encode_images(self, variables: Variables, pictures: Pictures) -> PictureStates:
        """Run the vision tower on `Pictures` [.., I, ..]; returns `PictureStates` [.., I, ..]."""
        tower = Tower(self.config.vision, dtype=self.dtype, remat=self.remat, lora=self.lora, spread=self._spread)
        with self._precise():
            return encode_pictures(tower, variables, pictures)

    def unstack(self, variables: Variables) -> Variables:
        """Return the variables with unstacked layers, for `decode_step`.

        This copies once; stacked weights would be copied layer by layer for every token. On GPUs and TPUs, where
        decoding is bound by reading weights, matrices are cast to the compute dtype. One CUDA device also fuses
        projections of the same states (`fuse_projections`).
        """
        layers = unstack(variables, self.dtype if self.platform != "cpu" else self._narrowed(None))
        return fuse_projections(layers, self.config) if self._fuses else layers

    def init_cache(self, prompts: int, group: int, length: int, dtype: jax.typing.DTypeLike | None = None) -> Cache:
        """Return an empty cache for `length` tokens of each completion."""
        c, dtype = self.config, dtype or self.dtype
        rows = prompts, c.num_kv_heads, group
        keys = tuple(jnp.zeros((*rows, c.head_dim, length), dtype) for _ in range(c.num_layers))
        values = tuple(jnp.zeros((*rows, length, c.head_dim), dtype) for _ in range(c.num_layers))
        return Cache(keys, values, jnp.zeros((), jnp.int32))

    def head(self, variables: Variables) -> jax.Array:
        """Return the unembedding [V, D] in its stored dtype, which its gradient then has too."""
        head = variables["params"]["embed_tokens" if self.config.tie_word_embeddings else "lm_head"]
        # Gather before the loop over chunks or tokens: with D sharded each product would be a sum over devices.
        return gather_columns(head, self.mesh)

    def logits(self, subscripts: str, *operands: jax.Array) -> jax.Array:
        """Return logits, at least float32: the einsum of states and (rows of) the head, both in the states' dtype."""
        dtype = wide(operands[0].dtype)
        operands = tuple(operand.astype(self._narrowed(operand.dtype)) for operand in operands)
        products = jnp.einsum(subscripts, *operands, precision=self.precision, preferred_element_type=dtype)
        return capped(products, self.config.logit_softcap)

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
        """Return each token's log-probability and the entropy of its distribution, both [P, G, T], at least float32.

        `hidden` [P, G, T, D] is the result of ``forward_group``, `tokens` are i32 [P, G, T]. A `trie` holds the allowed
        completions and must not be traced; `nodes` i32 [P, G, T] are then the nodes before each token, by default from
        its root. `options` are temperature, allowed_tokens and chunk_size of ``core.logprobs.token_logprobs``.
        """
        head, options = self.head(variables), options | {"softcap": self.config.logit_softcap}
        hidden = hidden.astype(self._narrowed(hidden.dtype))
        with self._precise():
            if trie is not None and nodes is None:
                return tree_logprobs(hidden, head, tokens, trie, below=widest_below(trie), **options)
            if trie is not None:
                options["allowed_tokens"] = trie, nodes
            return token_logprobs(hidden, head, tokens, **options)

    def _precise(self) -> AbstractContextManager[object]:
        """Return the context in which matrix products have the policy's precision."""
        return nullcontext() if self.precision is None else jax.default_matmul_precision(self.precision)

    def _run(self, variables: Variables, tokens: jax.Array, context: Context) -> tuple[jax.Array, PyTree]:
        """Return the final states [P, S, D] of tokens i32 [P, S], and the layers' new keys and values."""
        if self.lora is None and "lora" in variables:
            raise ValueError("variables hold a 'lora' collection but the policy was made with lora=None")
        with self._precise():
            if "layers" in variables["params"]:
                return self._decoder().apply(variables, tokens, context)
            hidden, written = self._decoder(stacked=False).apply(self.unstack(variables), tokens, context)
        return hidden, None if written[0] is None else tuple(zip(*written, strict=True))

    def _run_cached(
        self, variables: Variables, prefix: Prefix, tokens: jax.Array, cache: Cache, context: Context
    ) -> tuple[jax.Array, Cache]:
        """Return the final states [P, S, D] of tokens i32 [P, S] after cached ones, and the new cache."""
        layers = zip(prefix.keys, prefix.values, cache.keys, cache.values, strict=True)
        inputs = [LayerInput(prefix=layer[:2], cache=layer[2:]) for layer in layers]
        with self._precise():
            hidden, written = self._decoder(stacked=False, remat="none").apply(variables, tokens, context, inputs)
        keys, values = zip(*written, strict=True)
        return hidden, cache._replace(keys=keys, values=values)

    @property
    def attention(self) -> str:
        """Return the attention that `choose_attention` takes for this policy."""
        over_mesh = self.mesh is not None
        return choose_attention(self.platform, self.dtype, self.attn_implementation, over_mesh=over_mesh)

    def _decoder(self, *, stacked: bool = True, remat: str | None = None) -> Decoder:
        return Decoder(
            fused_config(self.config) if self._fuses and not stacked else self.config,
            dtype=self.dtype,
            remat=remat or self.remat,
            lora=self.lora,
            stacked=stacked,
            spread=self._spread if stacked else None,
            attention=self.attention,
            products=self.products,
        )

    def _over_prompts(self, variables: Variables, *arrays: PyTree) -> tuple[Any, ...]:
        """Shard the arguments by prompts, so that each device works on its own prompts.

        Decoding is left to XLA: for few tokens it moves the states, and each device reads only its own weights.
        """
        if self._spread is None:
            return variables, *arrays
        params = variables["params"]
        if "embed_positions" in params:  # with D sharded, the states would be sharded too
            positions = gather_columns(params["embed_positions"], self.mesh)
            variables = {**variables, "params": {**params, "embed_positions": positions}}
        return variables, *self._spread(arrays)

    def check_room(self, name: str, mask: jax.Array, steps: int) -> None:
        """Refuse more tokens than positions; under jit only the completions' length is known here."""
        limit = self.max_positions
        if limit is None:
            return
        longest = mask.sum(axis=1).max()
        longest = 1 if isinstance(longest, jax.core.Tracer) else int(longest)
        if longest + steps > limit:
            room = f"at most {limit} tokens together, as many as the model has positions"
            raise ValueError(f"{name} and completions must have {room}; got {longest} and {steps}")

    @property
    def dtype(self) -> jnp.dtype:
        """Return the compute dtype."""
        return jnp.dtype(self.compute_dtype)

    @property
    def precision(self) -> str | None:
        """Return the precision of matrix products; None for JAX's default."""
        return precision_of(self.compute_dtype, self.matmul_precision)

    @property
    def products(self) -> str:
        """Return the kind of products in `layers.Projection`; "" leaves them to XLA.

        ``apart`` on CUDA prevents fusion with other products of the same states. ``bfloat16`` on CPU, if configured.
        """
        narrow = self.platform == "cpu" and "bfloat16" in (self.compute_dtype, self.matmul_precision)
        return "apart" if self.platform == "cuda" else "bfloat16" if narrow else ""

    def _narrowed(self, dtype: Any) -> Any:
        """Return the dtype of a product's factors for arrays of this dtype."""
        return jnp.bfloat16 if self.products == "bfloat16" else dtype

    @property
    def max_positions(self) -> int | None:
        """Return the limit of prompt plus completion tokens (learned positions and LongRoPE); None without one."""
        return architecture_of(self.config).longest(self.config)

    @property
    def _fuses(self) -> bool:
        return self.platform == "cuda" and self.mesh is None

    @property
    def _spread(self) -> OverPrompts | None:
        return None if self.mesh is None else OverPrompts(self.mesh)

    def replace(self, **fields: Any) -> Policy:
        """Return the policy with these fields replaced."""
        return dataclasses.replace(self, **fields)

    @property
    def folder(self) -> hf.PolicyFolder:
        """Return the source of a policy that `load_policy` made."""
        assert self.source is not None, "load_policy gives a policy its folder"
        return self.source

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the folder's Hugging Face tokenizer."""
        return self.folder.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a completion."""
        return self.folder.eos_ids

    @property
    def pad_id(self) -> int:
        """Return the padding token."""
        return self.folder.pad_id

    @property
    def params(self) -> PyTree:
        """Return the loaded weights, without adapters."""
        return self.variables["params"]

    def encode(self, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode prompts to left-padded tokens i32 [P, L] and mask bool [P, L], with the chat template if there is one.

        Only the template adds special tokens such as ``<|im_end|>``; in a prompt they are text. UserError if the
        template or the tokenizer fails, or a prompt cannot be encoded.
        """
        chat = bool(getattr(self.tokenizer, "chat_template", None))
        encode = conversation_encoder(self.tokenizer, chat=chat, vocab_size=self.config.vocab_size)
        ids = [encode([Message("user", (prompt,))]) for prompt in prompts]
        return pad(ids, max(map(len, ids)), self.pad_id, left=True)

    def decode(self, samples: PyTree) -> list[list[str]]:
        """Decode a sampler's completions to strings `[P][G]`, without special tokens."""
        tokens, mask = jax.device_get((samples.tokens, samples.mask))
        return [
            [decoded(self.tokenizer, row[real]) for row, real in zip(*group, strict=True)]
            for group in zip(tokens, mask, strict=True)
        ]

    def save(self, folder: str | Path, variables: Variables, *, dtype: str = "float32") -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads (Qwen-VL: `AutoModelForImageTextToText`).

        The folder appears atomically. Adapters are merged into the weights, in float32 and layer by layer. float32
        rounds nothing away; bfloat16 loses most of the change from small adapters. Tensors that are not the policy's
        (a frozen vision tower) are copied. UserError if the folder cannot be written.
        """
        variables = {**variables, "params": separate(variables["params"], self.config)}
        hf.save_folder(folder, self.folder.path, self.config, merge(variables, self.lora), dtype=dtype)

    def save_adapters(self, folder: str | Path, variables: Variables) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` loads onto the base model; it appears atomically.

        UserError if there are no adapters, or the folder cannot be written.
        """
        if self.lora is None:
            raise UserError("--adapters: this run trained all weights and has none (policy.lora.rank 0)")
        save_adapters(folder, variables["lora"], self.lora, self.config, base=self.folder.name)


_WITHOUT_WEIGHTS = [field.name for field in dataclasses.fields(Policy) if field.name != "variables"]
jax.tree_util.register_dataclass(Policy, data_fields=["variables"], meta_fields=_WITHOUT_WEIGHTS)


def load_policy(
    folder: str | Path | hf.PolicyFolder,
    section: PolicySection | None = None,
    *,
    devices: Sequence[jax.Device] = (),
    vision: bool | None = False,
    value_head: bool = False,
    seed: int = 0,
    **options: Any,
) -> Policy:
    """Load a folder of one of the architectures in docs/policies.md.

    Args:
        folder: A local folder, a hub id, or the result of `hf.read_folder`.
        section: Dtypes, adapters, quantisation and mesh; by default all weights are trained, in float32.
        devices: Devices of the mesh; the first ones by default.
        vision: Whether to load the vision tower; None if there is one. A trained or adapted one is always loaded.
        value_head: Whether the variables get a value head, for PPO.
        seed: Seed of fresh adapters.
        **options: Fields of the section to replace, such as compute_dtype="bfloat16".

    Raises:
        UserError: The folder is incomplete, truncated or unsupported, or does not suit mesh, adapters or pictures.
    """
    section = (section or PolicySection()).replace(**options)
    mesh_shape = section.mesh
    devices = devices or jax.devices()[: mesh_shape.size]
    mesh = make_mesh(mesh_shape.fsdp, mesh_shape.tensor, devices) if mesh_shape.size > 1 else None
    platform = platform_of(devices[0])

    def put(tree: PyTree) -> PyTree:
        return copied(tree, devices[0]) if mesh is None else shard(tree, mesh)

    def store(params: Variables) -> dict[str, PyTree]:
        params = unstack_and_fuse(params, read.config) if keeps_layers_apart(section, platform) else params
        return put(params) if section.quantised == "none" else quantise(params, section.quantised, devices[0])

    read = folder if isinstance(folder, hf.PolicyFolder) else hf.read_folder(folder)
    with as_user_error("policy.mesh", ValueError):  # the mesh may not divide a weight
        weights = hf.load_weights(read, param_dtype=weight_dtype(section), put=store)
    config = read.config
    policy = Policy.from_section(section, config, mesh, platform)
    lora = policy.lora
    variables: dict[str, PyTree] = {"params": weights}
    tower = None
    if (config.vision is not None if vision is None else vision) or needs_tower(section, lora):
        if config.vision is None or not config.rope.sections:
            field = "policy.vision" if section.vision == "train" else "policy.path"
            lacks = "has no vision tower with an mrope_section in its config.json, and pictures need one"
            raise UserError(f"{field}: {section.path or read.name} {lacks}: give a Qwen-VL folder")
        tower = hf.load_weights(read, param_dtype=tower_dtype(section), put=put, tower=True)[VISUAL]
        variables = with_tower(variables, tower, trained=section.vision == "train")
    if lora is not None:
        if section.lora.path is None:
            key = jax.random.fold_in(jax.random.key(seed), 2**30)
            adapters = init_adapters(shapes(config), key, lora, tower)
        else:
            adapters = load_adapters(section.lora.path, config)[1]
        variables["lora"] = put(adapters)
    if value_head:
        variables[VALUE] = put({VALUE: init_value_head(config.hidden_size)})[VALUE]
    return policy.replace(source=read, variables=variables)
