"""An update's tokens per second and model-FLOPs utilisation, beside a plain PyTorch update; log-probabilities at a V
of 151,936.

The useful work is `floor.update_work`: forward and twice that backward, each prompt once for its group. Utilisation is
that over the seconds and over the rate of products measured in this process, for the peer too, which runs each prompt
once for every completion. Both train all weights in float32 with products in bfloat16, by AdamW behind a norm clip.
"""

from __future__ import annotations

import functools
from typing import Any

import floor
import iteration_work
import jax
import jax.numpy as jnp
import numpy as np
import shapes
import timing
from outcome import Figures, Measurements, needs, needs_torch_beside_jax

from grpo_jax.config.sections import AlgorithmSection, OptimizerSection, PolicySection, TrainingSection
from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.models.policy import Policy
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import commit_to_device, init_state, make_optimizer, make_schedule
from grpo_jax.training.update import make_configured_step

LEARNING_RATE = 1e-6
ROUNDS = 5


def measurements(tiny: bool) -> Measurements:
    """The ceilings, both updates by size, then the log-probabilities three ways (PyTorch's first)."""
    rows: dict[str, Any] = {"ceilings": functools.partial(timing.ceiling_figures, tiny)}
    for size in ("0.5B",) if tiny else ("0.5B", "1.5B"):
        lengths = dict(prompt_tokens=8, new_tokens=6) if tiny else dict(prompt_tokens=128, new_tokens=128)
        case = shapes.case(size, tiny, prompts=2 if tiny else 4, group=4 if tiny else 8, **lengths)
        # PyTorch first: it gives its memory back, where JAX keeps what it once took.
        rows[f"{size}, update, PyTorch"] = functools.partial(plain_torch, case, tiny)
        rows[f"{size}, update, grpo_jax"] = functools.partial(ours, case, tiny)
    for way in ("PyTorch", "in chunks", "all logits"):
        rows[f"log-probabilities, {way}"] = functools.partial(logprobs, way, tiny)
    return rows


def figures(case: iteration_work.Case, seconds: float, tiny: bool) -> Figures:
    """Tokens of the completions per second, and the share of the measured products' rate."""
    rate = timing.ceilings(tiny)["flops_per_second"]
    return {
        "tokens_per_second": case.prompts * case.group * case.new_tokens / seconds,
        "seconds": seconds,
        "mfu": floor.update_work(case).flops / seconds / rate,
    }


def tokens_of(case: iteration_work.Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts i32 [P, L], completions i32 [P, G, T], advantages f32 [P, G]."""
    rng, rows = np.random.default_rng(0), (case.prompts, case.group)
    prompts = rng.integers(0, case.vocabulary, (case.prompts, case.prompt_tokens)).astype(np.int32)
    completions = rng.integers(0, case.vocabulary, (*rows, case.new_tokens)).astype(np.int32)
    return prompts, completions, rng.normal(size=rows).astype(np.float32)


def ours(case: iteration_work.Case, tiny: bool, config: Any = None, **options: Any) -> Figures:
    """The compiled step of a run; `config` is of another decoder than the case's, `options` are of its section."""
    config, section = config or iteration_work.decoder_config(case), OptimizerSection(learning_rate=LEARNING_RATE)
    policy = Policy.from_section(PolicySection(compute_dtype="bfloat16", **options), config, None)
    optimizer = make_optimizer(section, make_schedule(section, 1))
    algorithm, training = AlgorithmSection(advantage="grpo"), TrainingSection(prompts_per_batch=case.prompts)
    forward = make_forward(policy, temperature=1.0)
    step = make_configured_step(forward, optimizer, algorithm, training, max_new_tokens=case.new_tokens)
    variables = shapes.variables(config, "float32")
    state = commit_to_device(init_state(variables, optimizer, keep_reference=False, take_over=True))
    del variables
    prompts, completions, advantages = jax.device_put(tokens_of(case), jax.devices()[0])
    masks = jnp.ones(prompts.shape, bool), jnp.ones(completions.shape, bool)
    batch = Batch(prompts, masks[0], completions, masks[1], advantages=advantages)

    def update() -> Any:
        nonlocal state
        state, report = step(state, batch)
        return report

    taken = timing.seconds(update, rounds=ROUNDS)
    report = update()
    assert np.isfinite(report["loss"]) and int(report["skipped"]) == 0
    return figures(case, taken, tiny) | {"peak_gib": timing.gib(timing.card_bytes("peak_bytes_in_use"))}


def plain_torch(case: iteration_work.Case, tiny: bool) -> Figures:
    """transformers' model, one row for each prompt and completion, logits of the completions all at once."""
    device = needs_torch_beside_jax()
    needs("transformers")
    import torch

    model = shapes.torch_model(case, device, "float32").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device == "cuda")
    prompts, completions, advantages = (torch.tensor(array, device=device) for array in tokens_of(case))
    rows = torch.cat([prompts[:, None].expand(-1, case.group, -1), completions], -1).flatten(0, 1).long()
    wanted, weights = completions.flatten(0, 1).long(), advantages.flatten()[:, None]

    def update() -> None:
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=rows, use_cache=False, logits_to_keep=case.new_tokens + 1).logits[:, :-1]
        logs = torch.log_softmax(logits.float(), -1).gather(-1, wanted[..., None])[..., 0]
        loss = -(torch.exp(logs - logs.detach()) * weights).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found = figures(case, timing.seconds(update, rounds=ROUNDS, wait=timing.wait_for_torch), tiny)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return found | {"peak_gib": timing.gib(peak)}


def logprobs(way: str, tiny: bool) -> Figures:
    """Loss and gradients of states and head from hidden states in bfloat16, with the seconds and temporary bytes."""
    length, vocabulary, width = (
        (64, 2048, 32) if tiny else (4096, shapes.SIZES["0.5B"]["vocabulary"], shapes.SIZES["0.5B"]["hidden"])
    )
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(1, length, width)).astype(np.float32)
    head = rng.normal(size=(vocabulary, width)).astype(np.float32) / width**0.5
    tokens = rng.integers(0, vocabulary, (1, length)).astype(np.int32)
    if way == "PyTorch":
        return _logprobs_of_torch(hidden, head, tokens)
    chosen = token_logprobs if way == "in chunks" else _all_logits

    def loss(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
        logs, entropy = chosen(hidden, head, tokens)
        return jnp.mean(logs) + 0.01 * jnp.mean(entropy)

    given = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16), jnp.asarray(tokens)
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*given).compile()
    taken, memory_of_it = timing.seconds(compiled, *given), compiled.memory_analysis()
    return {
        "tokens_per_second": length / taken,
        "seconds": taken,
        "temporary_gib": timing.gib(getattr(memory_of_it, "temp_size_in_bytes", None)),
        "value": float(compiled(*given)[0]),
    }


def _all_logits(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As they are usually written, for automatic differentiation: products in bfloat16, all else in float32."""
    logs = jax.nn.log_softmax(jnp.einsum("ptd,vd->ptv", hidden, head, preferred_element_type=jnp.float32))
    chosen = jnp.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logs) * logs, axis=-1)


def _logprobs_of_torch(hidden: np.ndarray, head: np.ndarray, tokens: np.ndarray) -> Figures:
    device = needs_torch_beside_jax()
    import torch

    states, weights = (torch.tensor(x, device=device, dtype=torch.bfloat16, requires_grad=True) for x in (hidden, head))
    wanted = torch.tensor(tokens, device=device).long()[..., None]
    held = torch.cuda.memory_allocated() if device == "cuda" else 0

    def step() -> Any:
        states.grad = weights.grad = None
        logs = torch.log_softmax((states @ weights.T).float(), -1)
        entropy = -(logs.exp() * logs).sum(-1)
        value = logs.gather(-1, wanted).mean() + 0.01 * entropy.mean()
        value.backward()
        return value.detach()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = timing.seconds(step, wait=timing.wait_for_torch)
    peak = torch.cuda.max_memory_allocated() - held if device == "cuda" else None
    return {
        "tokens_per_second": tokens.size / taken,
        "seconds": taken,
        "temporary_gib": timing.gib(peak),
        "value": float(step()),
    }
