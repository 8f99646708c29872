"""A language policy: pure functions of its variables, the folder that they come from, and how both are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.dynamic_scale import DynamicScale

from grpo_jax.config.sections import LoraSection, PolicySection
from grpo_jax.core.logprobs import capped, token_logprobs, tree_logprobs, wide
from grpo_jax.core.trie import Trie, widest_below
from grpo_jax.errors import UserError
from grpo_jax.models import hf
from grpo_jax.models.architectures import ModelConfig, architecture_of
from grpo_jax.models.attention import Context, LayerInput, choose_attention
from grpo_jax.models.cache import Cache, Prefix, init_cache
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.fused_projections import apart_and_joined, join, joined_config, separate
from grpo_jax.models.hf.chat import Message, conversation_encoder
from grpo_jax.models.hf.peft import load_adapters, save_adapters
from grpo_jax.models.lora import LoraConfig, check_targets, init_adapters, merge, quantise
from grpo_jax.models.positions import decode_context, extend_context, group_context, packed_context, prompt_context
from grpo_jax.models.sharding import OverPrompts, make_mesh, over_prompts, shard, shard_policy
from grpo_jax.models.variables import VALUE, PyTree, Variables, copied, init_value_head, unstack, with_tower
from grpo_jax.models.vision.pictures import PictureStates
from grpo_jax.models.vision.tower import TOWERS, make_tower


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A language model to sample from and to train, as pure functions of its variables.

    Variables are ``{"params": tree}``, with ``"lora"`` where adapters are in use: without that collection the same
    functions are the base model. Masks may be integers, as tokenizers give them. `make_policy` makes the functions
    alone, `load_policy` all of it.

    Attributes:
        prefill: (variables, tokens i32 [P, L], mask bool [P, L], pictures=None) -> Prefix. Prompts are padded on the
            left; pictures (`PictureStates` [P, I, ..]) take the places of their placeholder tokens.
        unstack: (variables) -> the same with each layer's weights apart, as ``decode_step`` takes them: a copy made
            once, where stacked weights would be copied layer by layer for every token. On a GPU or TPU, whose decoding
            waits for its weights, matrices get the type of the computation; on one CUDA device they are joined too
            (`joined`).
        decode_step: (unstacked variables, prefix, tokens i32 [P, G], cache) -> (hidden [P, G, D], cache): one more
            token of each completion; the state predicts the next.
        extend: (unstacked variables, prefix, tokens i32 [P, G, A], mask bool [P, G, A], cache with rows,
            pictures=None) -> (hidden [P, G, D], cache): several more tokens of each completion, the first ones of
            each row; the last one's state predicts the next. Pictures are [P, G, I, ..].
        init_cache: (P, G, T, dtype=None) -> empty Cache for T tokens per completion.
        forward_group: (variables, prompt_tokens i32 [P, L], prompt_mask bool [P, L], tokens i32 [P, G, T],
            mask bool [P, G, T], steps=None, pictures=None, answers=None) -> hidden [P, G, T, D], the states that
            predict each token (the first is the prompt's last state). The prompt is computed once for its group.
            Where a row holds several completions one after the other, steps i32 [P, G, T] count the tokens of each
            from 0. Pictures [P, I, ..] are the prompts', answers [P, G, I, ..] stand among the completions.
        head: (variables) -> unembedding [V, D] in its stored type, so that its gradient has that type too.
        max_positions: The most tokens of prompt and completion together, where positions end (learned ones, and
            LongRoPE's); None where they go on (other rotations).
        encode_images: (variables, `Pictures` [.., I, ..]) -> `PictureStates` [.., I, ..]; None without a tower.
        softcap: The cap of the logits, which ``logits`` and ``token_logprobs`` apply; None for none.
        matmul_precision: Of products of matrices, in all of these functions and their gradients; None for JAX's own.
        lora: Configuration of the adapters; None without.
        source: The Hugging Face folder as read, without weights; None for functions alone.
        variables: The weights as loaded, on their devices.
        mesh: The devices where they are several, else None.
    """

    prefill: Callable[..., Prefix]
    unstack: Callable[[Variables], Variables]
    decode_step: Callable[..., tuple[jax.Array, Cache]]
    extend: Callable[..., tuple[jax.Array, Cache]]
    init_cache: Callable[..., Cache]
    forward_group: Callable[..., jax.Array]
    head: Callable[[Variables], jax.Array]
    max_positions: int | None = None
    encode_images: Callable[..., PictureStates] | None = None
    softcap: float | None = None
    matmul_precision: str | None = None
    lora: LoraConfig | None = None
    source: hf.PolicyFolder | None = None
    variables: Variables = dataclasses.field(default_factory=dict)
    mesh: jax.sharding.Mesh | None = None

    def replace(self, **fields: Any) -> Policy:
        """Return the policy with other values of these fields."""
        return dataclasses.replace(self, **fields)

    @property
    def folder(self) -> hf.PolicyFolder:
        """The source; ValueError for functions alone."""
        if self.source is None:
            raise ValueError("this policy has functions alone (make_policy); load_policy gives it a folder")
        return self.source

    @property
    def config(self) -> ModelConfig:
        """Shape and choices of the decoder."""
        return self.folder.config

    @property
    def tokenizer(self) -> hf.Tokenizer:
        """The folder's Hugging Face tokenizer."""
        return self.folder.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        return self.folder.eos_ids

    @property
    def pad_id(self) -> int:
        """The token that pads."""
        return self.folder.pad_id

    @property
    def params(self) -> PyTree:
        """The weights as loaded, without adapters."""
        return self.variables["params"]

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
        """Log-probability of each token and entropy of the distribution it was drawn from, both [P, G, T] and wide.

        Args:
            hidden: [P, G, T, D] of ``forward_group``.
            tokens: i32 [P, G, T].
            trie: The texts of which each completion is one; it must not be traced.
            nodes: i32 [P, G, T] with a trie, the node before each token; by default completions begin at its root.
            **options: temperature, allowed_tokens and chunk_size of ``core.logprobs.token_logprobs``.
        """
        head = self.head(variables)
        with _precision(self.matmul_precision):
            if trie is None or nodes is not None:
                options |= {"trie": trie, "nodes": nodes, "softcap": self.softcap}
                return token_logprobs(hidden, head, tokens, **options)
            options |= {"below": widest_below(trie), "softcap": self.softcap}
            return tree_logprobs(hidden, head, tokens, trie, **options)

    def encode(self, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as left-padded tokens i32 [P, L] and their mask bool [P, L], by the chat template if there is one.

        Marks such as ``<|im_end|>`` come from the template alone; in a prompt they are text. UserError where the
        template or the tokenizer fails, or a prompt cannot be encoded.
        """
        chat = bool(getattr(self.tokenizer, "chat_template", None))
        encode = conversation_encoder(self.tokenizer, chat=chat, vocab_size=self.config.vocab_size)
        ids = [encode([Message("user", (prompt,))]) for prompt in prompts]
        width = max(map(len, ids))
        tokens = np.full((len(ids), width), self.pad_id, np.int32)
        mask = np.arange(width) >= width - np.array([[len(row)] for row in ids])
        for row, entry in zip(tokens, ids, strict=True):
            row[width - len(entry) :] = entry
        return tokens, mask

    def decode(self, samples: PyTree) -> list[list[str]]:
        """Completions of a sampler as texts `[P][G]`, special tokens left out."""
        tokens, mask = jax.device_get((samples.tokens, samples.mask))
        return [
            [self.tokenizer.decode(row[real], skip_special_tokens=True) for row, real in zip(*group, strict=True)]
            for group in zip(tokens, mask, strict=True)
        ]

    def save(self, folder: str | Path, variables: Variables, *, dtype: str = "float32") -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads (Qwen-VL: `AutoModelForImageTextToText`).

        It appears at once, when complete. Adapters are merged into the weights, in float32 and a layer at a time. In
        float32 nothing that was trained is rounded away; bfloat16 keeps little of what small adapters changed.
        Tensors that are not the policy's (a frozen vision tower) are copied. UserError where the folder cannot be
        written.
        """
        variables = {**variables, "params": separate(variables["params"], self.config)}
        hf.save_folder(folder, self.folder.path, self.config, merge(variables, self.lora), dtype=dtype)

    def save_adapters(self, folder: str | Path, variables: Variables) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` loads onto the base model; it appears when complete.

        UserError where there are no adapters, or the folder cannot be written.
        """
        if self.lora is None:
            raise UserError("--adapters: this run trained all weights and has none (policy.lora.rank 0)")
        save_adapters(folder, variables["lora"], self.lora, self.config, base=self.folder.name)


_WITHOUT_WEIGHTS = [field.name for field in dataclasses.fields(Policy) if field.name != "variables"]
jax.tree_util.register_dataclass(Policy, data_fields=["variables"], meta_fields=_WITHOUT_WEIGHTS)


def _precision(name: str | None) -> AbstractContextManager[object]:
    """The context in which products of matrices have this precision; None leaves JAX's own."""
    return nullcontext() if name is None else jax.default_matmul_precision(name)


def precision_of(compute_dtype: str, precision: str | None) -> str | None:
    """The configured precision of products of matrices, or the one that the activations' type needs.

    That is ``highest`` for float32, whose products GPUs (TF32) and TPUs (bfloat16) round otherwise; None, JAX's own,
    for other types.
    """
    return "highest" if precision is None and compute_dtype == "float32" else precision


def make_loss_scale(compute_dtype: str) -> DynamicScale | None:
    """Flax's dynamic loss scale for float16, whose smallest numbers gradients would fall below; None for other types.

    It starts at 2¹⁶, is halved by an update whose gradients overflow (which is left out), and doubled after 2,000
    updates in a row that did not. It does not fall below 1: what overflows there is not the scale's doing.
    """
    if compute_dtype != "float16":
        return None
    start = jnp.full((), 2.0**16, jnp.float32)
    return DynamicScale(fin_steps=jnp.zeros((), jnp.int32), scale=start, minimum_scale=1.0)


def make_policy(
    config: ModelConfig,
    *,
    compute_dtype: str = "float32",
    remat: str = "products",
    lora: LoraConfig | None = None,
    spread: OverPrompts | None = None,
    matmul_precision: str | None = None,
    attn_implementation: str = "auto",
    platform: str | None = None,
) -> Policy:
    """Make the functions of a decoder.

    Args:
        compute_dtype: ``float32``, ``bfloat16`` or ``float16``; norms, rotations and softmax are float32 either way.
        remat: Rematerialisation in the backward pass of ``forward_group``: ``none``; ``products``, all but the
            products with weights, that is attention and what is elementwise; ``layer``, whole layers, of which only
            the input is kept.
        lora: Configuration of the adapters, if variables will hold any.
        spread: See `Decoder`; ``sharding.over_prompts`` makes it.
        matmul_precision: See `precision_of`.
        attn_implementation: ``eager`` for scores and softmax as products; ``auto`` takes Pallas kernels where they can
            be had (see `choose_attention`).
        platform: What they are compiled for, see `platform_of`; None for JAX's first device.

    Raises:
        ValueError: An adapter's target is no projection of this architecture.
    """
    dtype = jnp.dtype(compute_dtype)
    matmul_precision = precision_of(compute_dtype, matmul_precision)
    architecture = architecture_of(config)
    if lora is not None:
        check_targets(lora, architecture.projections, config.model_type)
    limit = config.max_positions if architecture.learned_positions else architecture.longest(config)
    platform = platform or platform_of(jax.devices()[0])
    attention = choose_attention(platform, dtype, attn_implementation, over_mesh=spread is not None)
    joins = platform == "cuda" and spread is None
    apart_config = joined_config(config) if joins else config
    make_decoder = partial(Decoder, dtype=dtype, lora=lora, attention=attention, apart=platform == "cuda")
    decoder = make_decoder(config, remat=remat, spread=spread)
    sequence = make_decoder(apart_config, remat=remat, stacked=False)  # of `keeps_layers_apart`
    unstacked = make_decoder(apart_config, remat="none", stacked=False)

    def precise(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        @wraps(function)
        def run(*args, **kwargs):
            with _precision(matmul_precision):
                return function(*args, **kwargs)

        return run

    def apart(variables: Variables) -> Variables:
        layers = unstack(variables, None if platform == "cpu" else dtype)
        return join(layers, config) if joins else layers

    def apply(variables: Variables, *args, **kwargs):
        if lora is None and "lora" in variables:
            raise ValueError("variables hold a 'lora' collection but the policy was made with lora=None")
        if "layers" in variables["params"]:
            return decoder.apply(variables, *args, **kwargs)
        hidden, written = sequence.apply(apart(variables), *args, **kwargs)
        return hidden, None if written[0] is None else tuple(zip(*written, strict=True))

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
        arrays = zip(prefix.keys, prefix.values, cache.keys, cache.values, strict=True)
        layer_inputs = [LayerInput(prefix=layer[:2], cache=layer[2:]) for layer in arrays]
        hidden, written = unstacked.apply(variables, tokens, context, layer_inputs)
        keys, values = zip(*written, strict=True)
        return hidden, cache._replace(keys=keys, values=values)

    def decode_step(variables: Variables, prefix: Prefix, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
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
        else:
            context = packed_context(prompts, steps[:, :, 1:], mask[:, :, 1:])
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

    def empty_cache(prompts: int, group: int, length: int, cache_dtype: jax.typing.DTypeLike | None = None) -> Cache:
        shape = (prompts, config.num_kv_heads, group, length, config.head_dim)
        return init_cache(config.num_layers, shape, cache_dtype or dtype)

    def head(variables: Variables) -> jax.Array:
        return variables["params"]["embed_tokens" if config.tie_word_embeddings else "lm_head"]

    vision = config.vision
    return Policy(
        prefill=precise(prefill),
        unstack=apart,
        decode_step=precise(decode_step),
        extend=precise(extend),
        init_cache=empty_cache,
        forward_group=precise(forward_group),
        head=head,
        max_positions=limit,
        encode_images=vision and precise(make_tower(vision, dtype, remat, lora, spread)),
        softcap=getattr(config, "logit_softcap", None),
        matmul_precision=matmul_precision,
        lora=lora,
    )


def platform_of(device: jax.Device) -> str:
    """Name what programs are compiled for: cpu, tpu, cuda, or gpu for one that Triton compiles no kernels for."""
    if device.platform != "gpu":
        return device.platform
    return "cuda" if float(getattr(device, "compute_capability", "8.0")) >= 8 else "gpu"


def _as_mask(name: str, tokens: jax.Array, mask: jax.Array, rank: int) -> jax.Array:
    """The mask of tokens of this rank as bool; tokenizers give integers."""
    if tokens.ndim != rank or tokens.shape != mask.shape or 0 in tokens.shape:
        raise ValueError(
            f"{name} and its mask must have the same shape of rank {rank} and no empty axis, "
            f"got {tokens.shape} and {mask.shape}"
        )
    return mask.astype(bool)


def _check_room(name: str, mask: jax.Array, steps: int, limit: int | None) -> None:
    """Refuse more tokens than there are positions; under jit only the completions' length is known here."""
    if limit is None:
        return
    longest = 1 if isinstance(mask, jax.core.Tracer) else int(mask.sum(axis=1).max())
    if longest + steps > limit:
        raise ValueError(
            f"{name} and completions must have at most {limit} tokens together, as many as the model has positions; "
            f"got {longest} and {steps}"
        )


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
        section: How the policy is trained: types, adapters, quantisation, mesh; by default all weights, in float32.
        devices: As many as the mesh takes; the first ones by default.
        vision: Whether the vision tower is loaded; None loads it where there is one. A trained one, or one with
            adapters, always is.
        value_head: Whether the variables get a value head, for PPO.
        seed: Of fresh adapters.
        **options: Fields of the section to replace, such as compute_dtype="bfloat16".

    Raises:
        UserError: Something is missing, truncated or unsupported, or does not fit mesh, adapters or pictures.
    """
    section = (section or PolicySection()).replace(**options)
    mesh_shape = section.mesh
    devices = devices or jax.devices()[: mesh_shape.size]
    mesh = make_mesh(mesh_shape.fsdp, mesh_shape.tensor, devices) if mesh_shape.size > 1 else None
    platform = platform_of(devices[0])

    def put(tree: PyTree) -> PyTree:
        return copied(tree, devices[0]) if mesh is None else shard(tree, mesh)

    def store(params: Variables) -> dict[str, PyTree]:
        params = apart_and_joined(params, read.config) if keeps_layers_apart(section, platform) else params
        return put(params) if section.quantised == "none" else quantise(params, section.quantised, devices[0])

    read = folder if isinstance(folder, hf.PolicyFolder) else hf.read_folder(folder)
    try:
        weights = hf.load_weights(read, param_dtype=weight_dtype(section), put=store).params
    except ValueError as error:  # a weight that the mesh does not divide
        raise UserError(f"policy.mesh: {error}") from error
    config = read.config
    policy = configured_functions(section, config, mesh, platform)
    lora = policy.lora
    variables: dict[str, PyTree] = {"params": weights}
    tower = None
    if (config.vision is not None if vision is None else vision) or needs_tower(section, lora):
        _check_tower(section, read)
        tower = hf.load_tower(read, param_dtype=tower_dtype(section), put=put)
        variables = with_tower(variables, tower, trained=section.vision == "train")
    if lora is not None:
        if section.lora.path is None:
            key = jax.random.fold_in(jax.random.key(seed), 2**30)
            adapters = init_adapters(hf.shapes(config), key, lora, tower)
        else:
            adapters = load_adapters(section.lora.path, config)[1]
        variables["lora"] = put(adapters)
    if value_head:
        variables[VALUE] = put({VALUE: init_value_head(config.hidden_size)})[VALUE]
    return policy.replace(source=read, variables=variables, mesh=mesh)


def weight_dtype(section: PolicySection) -> str:
    """The type of the weights: trained ones are float32."""
    return section.frozen_dtype if section.lora.used else "float32"


def keeps_layers_apart(section: PolicySection, platform: str | None = None) -> bool:
    """Whether each layer of a frozen policy has arrays of its own, with projections joined, in place of stacks.

    On a CUDA device decoding then reads the only copy of the weights, and an update copies none out of a stack. Of a
    stack one layer's program serves all and is compiled in less time: trained weights, which decoding casts in any
    case, are stacked, and so is what lies over a mesh or on a TPU, whose compiler takes many times as long.
    """
    as_computed = section.quantised != "none" or section.frozen_dtype == section.compute_dtype
    on_cuda = (platform or platform_of(jax.devices()[0])) == "cuda" and section.mesh.size == 1
    return section.lora.used and as_computed and on_cuda


def tower_dtype(section: PolicySection) -> str:
    """The type of the vision tower's weights, which may be frozen where the rest is trained."""
    return "float32" if section.vision == "train" else section.frozen_dtype


def configured_functions(
    section: PolicySection, config: ModelConfig, mesh: jax.sharding.Mesh | None, platform: str | None = None
) -> Policy:
    """The functions of `make_policy` as a section asks for them, over the mesh if there is one."""
    policy = make_policy(
        config,
        compute_dtype=section.compute_dtype,
        remat=section.remat,
        lora=lora_config(section.lora, config),
        spread=over_prompts(mesh),
        matmul_precision=section.matmul_precision,
        attn_implementation=section.attn_implementation,
        platform=platform,
    )
    return shard_policy(policy, mesh)


def lora_config(section: LoraSection, model: ModelConfig) -> LoraConfig | None:
    """The adapters' configuration, None where all weights are trained; UserError where they do not fit the model."""
    if section.path is not None:
        return load_adapters(section.path, model)[0]
    if section.rank == 0:
        return None
    projections = tuple(architecture_of(model).projections)
    tower = ()
    if section.vision:
        if model.vision is None:
            raise UserError(f"policy.lora.vision: this {model.model_type} has no vision tower; leave it out")
        tower = tuple(TOWERS[model.vision.model_type].projections)
    try:
        lora = LoraConfig(section.rank, section.alpha, tuple(section.targets) or projections, tower)
        check_targets(lora, projections, model.model_type)
        return lora
    except ValueError as error:
        raise UserError(f"policy.lora: {error}") from error


def needs_tower(section: PolicySection, lora: LoraConfig | None) -> bool:
    """Whether the vision tower takes part in training, whatever the prompts are."""
    return section.vision == "train" or (lora is not None and bool(lora.vision))


def _check_tower(section: PolicySection, read: hf.PolicyFolder) -> None:
    name = section.path or read.name
    if read.config.vision is None:
        field = "policy.vision" if section.vision == "train" else "policy.path"
        raise UserError(
            f"{field}: {name} has no vision tower, and pictures need one: give a Qwen2-VL, Qwen2.5-VL or "
            "Qwen3-VL folder"
        )
    if not read.config.rope.sections:
        raise UserError(
            f"policy.path: {name} does not say how positions have rows and columns (mrope_section in "
            "config.json), which pictures need"
        )
