"""Results on the GPU against the CPU, and against transformers on the CPU: products, decoder, update.

Products are in full float32 by default (`jax.default_matmul_precision("highest")`; a GPU would round them to TF32). The
tests make the comparisons with transformers on the CPU, for more fields. Without a GPU the first device is the CPU, and
its differences from itself are 0.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from outcome import Figures, Measurements, compared, needs
from support import tiny_decoders, tiny_update

from grpo_jax.config.sections import AlgorithmSection
from grpo_jax.models.lora import as_array, quantise
from grpo_jax.models.policy import Policy
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams
from grpo_jax.training.batch import Batch, pack
from grpo_jax.training.objectives import make_forward

EXACT = 1e-4  # of log-probabilities in float32, as in the tests
SLOPES = 1e-3  # of gradients, by the largest, as in the tests
NARROW = 0.05  # mean difference of log-probabilities, bfloat16 from float32; a CPU's is 0.013


def measurements(tiny: bool) -> Measurements:
    """Everything by name; tiny: fewer architectures."""
    decoders = ("llama",) if tiny else ("llama", "gpt2")
    texts = ("qwen2",) if tiny else ("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma2", "gemma3_text")
    towers = ("qwen2_vl",) if tiny else ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    rows: dict[str, Callable[[], Figures]] = {}
    for architecture in decoders:
        rows[f"decoder {architecture}, float32 highest, against the CPU"] = functools.partial(decoder, architecture)
        rows[f"decoder {architecture}, bfloat16 against float32"] = functools.partial(narrow, architecture)
        rows[f"sampler {architecture}, against the CPU and the update's pass"] = functools.partial(
            sampler, architecture
        )
    rows["update, against the CPU"] = update
    rows["packed rows, against rows of their own"] = packing
    for kind in ("int8", "int4"):
        rows[f"{kind} base, against its rounded weights"] = functools.partial(quantised, kind)
    for architecture in texts:
        rows[f"{architecture}, logits and gradients, against transformers"] = functools.partial(
            transformers_text, architecture
        )
    for architecture in towers:
        rows[f"vision tower {architecture}, against transformers"] = functools.partial(transformers_tower, architecture)
    return {"products of float32": products} | {name: functools.partial(exactly, row) for name, row in rows.items()}


def products() -> Figures:
    """Errors of a product by norms, with JAX's default precision and in full: 3e-4 is TF32, 1e-7 float32."""
    a, b = np.random.default_rng(0).normal(size=(2, 512, 512)).astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    errors = {}
    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            product = np.asarray(jax.jit(jnp.matmul)(a, b), np.float64)
        errors[precision] = float(np.linalg.norm(product - exact) / np.linalg.norm(exact))
    return compared(errors["highest"], 1e-6, default=errors["default"])


def exactly(measure: Callable[[], Figures]) -> Figures:
    """Under full float32 products."""
    with jax.default_matmul_precision("highest"):
        return measure()


def on_both(function: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
    """Results of a function on the first device and on the CPU, on the host."""
    places = jax.devices()[0], jax.local_devices(backend="cpu")[0]
    return tuple(jax.device_get(function(*jax.device_put(given, place))) for place in places)


def apart(some: Any, others: Any) -> float:
    """The largest difference of two trees of arrays."""
    pairs = zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()) for a, b in pairs)


def looked_at(policy: Any, variables: Any, batch: Any, **options: Any) -> jax.Array:
    """Log-probabilities [P, G, T] of a batch's completions; 0 where there is none."""
    hidden = policy.forward_group(variables, *batch)
    logs, _ = policy.token_logprobs(variables, hidden, batch[2], **options)
    return jnp.where(batch[3], logs, 0)


def decoder(architecture: str) -> Figures:
    """Log-probabilities and the gradient of their sum, which reaches every weight."""
    tiny = tiny_decoders.tiny(architecture)

    @jax.jit
    def pass_both_ways(variables: Any, batch: Any) -> Any:
        def total(variables: Any) -> tuple[jax.Array, jax.Array]:
            logs = looked_at(tiny.policy, variables, batch)
            return logs.sum(), logs

        (_, logs), slopes = jax.value_and_grad(total, has_aux=True)(variables)
        return logs, slopes

    (logs, slopes), (expected, wanted) = on_both(pass_both_ways, tiny.variables, tiny_decoders.group_batch())
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    slope = apart(slopes, wanted) / largest
    found = compared(apart(logs, expected), EXACT, gradient_difference=slope)
    return found | {"agrees": found["agrees"] and slope <= SLOPES}


def narrow(architecture: str) -> Figures:
    """Mean and largest difference, both on the first device."""
    tiny, batch = tiny_decoders.tiny(architecture), tiny_decoders.group_batch()
    half = Policy(tiny.config, lora=tiny.lora, compute_dtype="bfloat16")
    exact, rounded = (
        np.asarray(jax.jit(functools.partial(looked_at, policy))(tiny.variables, batch))
        for policy in (tiny.policy, half)
    )
    differences = np.abs(exact - rounded)[batch[3]]
    return compared(differences.mean(), NARROW, largest=float(differences.max()))


def sampler(architecture: str) -> Figures:
    """Greedy and drawn tokens, and how far the sampler's log-probabilities are from those of the update's pass."""
    tiny = tiny_decoders.tiny(architecture)
    prompts, mask = tiny_decoders.group_batch()[:2]
    same, difference = [], 0.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(2, 8, temperature=temperature)
        sample = make_sampler(tiny.policy, params, eos_ids=(), pad_id=0)
        keys = jax.random.split(jax.random.key(0), len(prompts))
        place = jax.devices()[0]
        card, cpu = on_both(lambda variables, keys, s=sample: s(variables, prompts, mask, keys), tiny.variables, keys)
        same.append(float((card.tokens == cpu.tokens).mean()))
        batch = prompts, mask, card.tokens, card.mask
        logs = jax.jit(functools.partial(looked_at, tiny.policy))(jax.device_put(tiny.variables, place), batch)
        difference = max(difference, apart(logs, card.logprobs))
    found = compared(difference, EXACT, same_greedy=same[0], same_drawn=same[1])
    # A draw may fall on the other side of a boundary that rounding moved, and all behind it differs then.
    return found | {"agrees": found["agrees"] and same[0] == 1 and same[1] >= 0.9}


def update() -> Figures:
    """Weights after an update by plain gradient descent, with KL and entropy."""
    section = AlgorithmSection(kl_coef=0.1, entropy_coef=0.01)

    def weights(place: Any) -> Any:
        with jax.default_device(place):
            start, state, _ = tiny_update.updated(tiny_update.make_batch(), section)
            return jax.device_get((start["params"], state.variables["params"]))

    before, after = weights(jax.devices()[0])
    started, expected = weights(jax.local_devices(backend="cpu")[0])
    moved = apart(after, before)
    assert moved > 1e-3, "the update moved nothing"
    return compared(max(apart(after, expected), apart(before, started)), EXACT, moved=moved)


def packing() -> Figures:
    """Log-probabilities of completions that share rows, on the first device."""
    tiny, rng = tiny_decoders.tiny("llama"), np.random.default_rng(0)
    lengths = np.array([[3, 8, 1, 4], [2, 1, 5, 1], [1, 2, 8, 3]])
    mask = np.arange(8) < lengths[..., None]
    prompts, prompt_mask = tiny_decoders.group_batch()[:2]
    tokens = rng.integers(0, 64, mask.shape).astype(np.int32)
    batch = Batch(jnp.asarray(prompts), jnp.asarray(prompt_mask), jnp.asarray(tokens), jnp.asarray(mask))
    shared = pack(mask, shortest=1)
    assert shared is not None and shared.source.shape[1] < mask.shape[1]
    forward = jax.jit(make_forward(tiny.policy, temperature=0.7))
    own, together = (
        np.where(mask, forward(tiny.variables, one).logprobs, 0) for one in (batch, batch._replace(packing=shared))
    )
    return compared(apart(own, together), EXACT, rows=int(shared.source.shape[1]), of=int(mask.shape[1]))


def quantised(kind: str) -> Figures:
    """The decoder on integers, against float weights that hold the rounded values; the integers against the CPU's."""
    needs("qwix")
    tiny, batch = tiny_decoders.tiny("llama"), tiny_decoders.group_batch()
    stored = [quantise(tiny.variables["params"], kind, place) for place in (jax.devices()[0], jax.devices("cpu")[0])]
    plain = jax.tree.map(
        lambda leaf: as_array(leaf, jnp.float32), stored[0], is_leaf=lambda leaf: hasattr(leaf, "qvalue")
    )
    look = jax.jit(functools.partial(looked_at, tiny.policy))
    logs, expected = (look({**tiny.variables, "params": params}, batch) for params in (stored[0], plain))
    integers = [jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), jax.device_get(one)) for one in stored]
    return compared(apart(logs, expected), EXACT, integers_apart_from_the_cpus=apart(*integers))


def transformers_text(architecture: str) -> Figures:
    """The test's comparison: log-probabilities, the GRPO loss, and every gradient."""
    needs("torch", "transformers")
    from support import torch_reference as reference
    from support.folders import load_folder

    model, batch = reference.model(architecture), reference.group_batch()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = load_folder(Path(folder), tokenizer=False)
    logits = reference.completion_logits(model, batch)
    advantages = np.ones(batch[2].shape[:2], np.float32)
    logs, _ = reference.grpo(logits, batch, advantages, np.zeros((2, *batch[2].shape), np.float32))
    # On its own log-probabilities, advantages 1 and no KL, the loss has the gradient of minus their mean.
    policy, count = Policy(loaded.config), batch[3].sum(-1, keepdims=True) * batch[3][..., 0].size

    def loss(params: Any) -> tuple[jax.Array, Any]:
        found = looked_at(policy, {"params": params}, batch, temperature=0.8)
        hidden = policy.forward_group({"params": params}, *batch)
        return -(found / count).sum(), (found, policy.logits("pgtd,vd->pgtv", hidden, policy.head({"params": params})))

    (_, (found, ours)), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(loaded.params)
    mask = batch[3]
    reference.assert_gradients_agree(model, loaded.config, slopes)
    difference = apart(np.asarray(found)[mask], logs.detach().numpy()[mask])
    return compared(difference, EXACT, logits=apart(np.asarray(ours)[mask], logits.detach().numpy()[mask]))


def transformers_tower(architecture: str) -> Figures:
    """States of pictures of several sizes, those of deepstack too."""
    needs("torch", "transformers")
    import torch
    from support.vision import tiny_pictures

    from grpo_jax.models.vision.tower import Tower, encode_pictures

    with tempfile.TemporaryDirectory() as folder:
        world = tiny_pictures.seeing(Path(folder), architecture)
    rows = tiny_pictures.draw(world.config)
    seen = jax.jit(functools.partial(encode_pictures, Tower(world.config)))(
        world.variables, tiny_pictures.packed(rows, world.config)
    )
    with torch.no_grad():
        expected, deepstack = tiny_pictures.torch_states(world.torch, rows)
    pairs = zip((seen.states, *seen.deepstack), (expected, *deepstack), strict=True)
    return compared(max(_states_apart(ours, theirs, rows) for ours, theirs in pairs), EXACT)


def _states_apart(ours: Any, theirs: Any, rows: Any) -> float:
    from support.vision import tiny_pictures

    flat = tiny_pictures.flat_states(ours, rows)
    return max(apart(np.asarray(a), b.numpy()) for a, b in zip(flat, theirs, strict=True))
