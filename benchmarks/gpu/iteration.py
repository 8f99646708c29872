"""An iteration of the shapes of configs/prompt_enhancement_sd3.yaml: seconds by stage, and peak memory beside --plan's.

Qwen2.5-7B with random bfloat16 weights and LoRA samples sixteen prompts of 256 tokens in chunks of four, the
miniature's Stable Diffusion 3 draws a picture for each completion on the same card (where `diffusers` is installed; its
memory is torch's and not counted), and the policy learns from their brightness. The prediction is `plan_policy`'s,
what --plan prints for the policy, without its allowance for a context, which JAX's allocator does not see either.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import shapes
import timing
from outcome import Figures, Measurements, Skip, needs, needs_torch_beside_jax

from grpo_jax.config.command_line import load_config
from grpo_jax.models.hf.peft import lora_config
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import keeps_layers_apart, weight_dtype
from grpo_jax.planning.memory import plan_policy, read_shape
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.samplers import sampling_params
from grpo_jax.training.batch import make_batch
from grpo_jax.training.estimators import make_objectives
from grpo_jax.training.state import commit_to_device, init_state, make_optimizer, make_schedule, needs_reference
from grpo_jax.training.update import make_update

CONFIG = Path(__file__).parents[2] / "configs" / "prompt_enhancement_sd3.yaml"
WITHIN = 0.1  # of what was measured


def measurements(tiny: bool) -> Measurements:
    """Return the iterations, then the plan, whose compilation must not count in the peak."""
    return {
        "7 B with LoRA, an iteration": functools.partial(iterate, tiny),
        "its peak memory beside --plan's": functools.partial(beside_the_plan, tiny),
    }


def shipped(tiny: bool) -> tuple[Any, Any]:
    """The config and the decoder's shape; tiny ones of the same kind."""
    config = load_config(CONFIG)
    model = read_shape(config.policy.path)
    if not tiny:
        return config, model
    small = dict(vocab_size=272, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1)
    small |= dict(windows=(), layer_ropes=())
    data = config.data.replace(max_prompt_tokens=16)
    sampling = config.sampling.replace(group_size=2, max_new_tokens=4)
    training = config.training.replace(prompts_per_batch=2, chunk_prompts=1, grad_accumulation_steps=1)
    config = config.replace(data=data, sampling=sampling, training=training)
    return config, dataclasses.replace(model, **small)


def make_parts(config: Any, model: Any) -> tuple[Any, Any, Any]:
    """The sampler, the update and the state, by the constructors that a run calls."""
    policy, section = Policy.from_section(config.policy, model, None), config.sampling
    params = sampling_params(section, section.group_size, section.temperature)
    sample = make_sampler(policy, params, eos_ids=(), pad_id=0)
    rate = config.optimizer.replace(learning_rate=config.learning_rate)
    optimizer = make_optimizer(rate, make_schedule(rate, config.training.max_steps))
    update = make_update(
        policy,
        optimizer,
        config.resolved_algorithm,
        config.training,
        temperature=section.temperature,
        max_new_tokens=section.max_policy_tokens,
        ppo=config.ppo,
    )
    lora, apart = lora_config(config.policy.lora, model), keeps_layers_apart(config.policy)
    variables = shapes.variables(model, weight_dtype(config.policy), lora, apart=apart)
    reference = needs_reference(config.algorithm, config.ppo)
    return sample, update, commit_to_device(init_state(variables, optimizer, keep_reference=reference, take_over=True))


def load_renderer() -> tuple[Any, str]:
    """The miniature's Stable Diffusion 3 on JAX's GPU; None and the reason without its packages."""
    try:
        needs("diffusers")
        device = needs_torch_beside_jax()
    except (Skip, ModuleNotFoundError) as reason:
        return None, str(reason)
    from bridges.judges.stable_diffusion_3 import StableDiffusion3

    return StableDiffusion3(steps=1).load("cpu" if device == "cpu" else "gpu:0"), ""


def judge(renderer: Any, count: int, iteration: int) -> jax.Array:
    """Rewards f32 [count] on JAX's device: the brightness of each picture, or numbers where none are drawn."""
    if renderer is None:
        return jax.random.normal(jax.random.key(iteration), (count,))
    from bridges.dlpack import to_jax

    texts = [f"a red circle and {number} squares" for number in range(count)]
    seeds = [count * iteration + number for number in range(count)]  # others: pictures are kept
    pictures = renderer.draw(texts, seeds, evaluation=False)
    return to_jax(pictures.mean((1, 2, 3)).float(), jax.devices()[0], copy=True)


def draw_samples(config: Any, sample: Any, variables: Any, vocabulary: int, iteration: int) -> tuple[Any, Any]:
    """Prompts [P, L] as long as they may be, and their completions on the host, sampled chunk by chunk."""
    training, rng = config.training, np.random.default_rng(iteration)
    shape = training.prompts_per_batch, config.data.max_prompt_tokens
    tokens, mask = rng.integers(1, vocabulary, shape).astype(np.int32), np.ones(shape, bool)
    keys = jax.random.split(jax.random.key(iteration), shape[0])
    size = training.chunk_prompts or shape[0]
    chunks = [slice(start, start + size) for start in range(0, shape[0], size)]
    drawn = [jax.device_get(sample(variables, tokens[one], mask[one], keys[one])) for one in chunks]
    return (tokens, mask), jax.tree.map(lambda *parts: np.concatenate(parts), *drawn)


def learn_from(config: Any, prompts: Any, samples: Any, rewards: jax.Array) -> Any:
    """The batch of an update."""
    rows = samples.tokens.shape[:2]
    objectives = make_objectives(
        rewards.reshape(*rows, 1),
        jnp.asarray(samples.mask.sum(-1)),
        config.algorithm,
        weights={"brightness": 1.0},
        max_new_tokens=config.sampling.max_new_tokens,
    )
    rollout = Rollout([], [], np.asarray(rewards), np.asarray(rewards), samples, *prompts)
    return make_batch(rollout, objectives, config.resolved_algorithm)


@functools.cache
def iterate(tiny: bool) -> Figures:
    """Median seconds of each stage behind the first iteration, and the peak after sampling and after updating."""
    config, model = shipped(tiny)
    sample, update, state = make_parts(config, model)
    renderer, reason = load_renderer()
    rows, peaks = [], {}
    for iteration in range(2 if tiny else 4):  # the first one compiles
        times = [time.perf_counter()]
        prompts, samples = draw_samples(config, sample, state.variables, model.vocab_size, iteration)
        times.append(time.perf_counter())
        peaks.setdefault("peak_gib_sampling", timing.gib(timing.card_bytes("peak_bytes_in_use")))
        rewards = jax.block_until_ready(judge(renderer, samples.tokens[..., 0].size, iteration))
        times.append(time.perf_counter())
        batch = learn_from(config, prompts, samples, rewards)
        state, report = update(state, batch, jax.random.key(iteration))
        jax.block_until_ready(state.step)
        times.append(time.perf_counter())
        rows.append(np.diff(times))
    assert np.isfinite(report["loss"]) and report["skipped"] == 0
    medians = np.median(rows[1:], axis=0)
    seconds = {
        f"{name}_seconds": float(value) for name, value in zip(("sample", "draw", "update"), medians, strict=True)
    }
    first = {"first_iteration_seconds": float(sum(rows[0]))}
    peaks["peak_bytes"] = timing.card_bytes("peak_bytes_in_use")
    return seconds | first | peaks | ({"drawn_by": "nobody: " + reason} if renderer is None else {})


def beside_the_plan(tiny: bool) -> Figures:
    """Return the plan's memory of the policy, and its difference from the measured peak."""
    measured = iterate(tiny)["peak_bytes"]
    memory, _ = plan_policy(*shipped(tiny))
    parts = {
        "predicted_held_gib": timing.gib(memory.held),
        "predicted_sampling_gib": timing.gib(memory.held + memory.sampling),
        "predicted_update_gib": timing.gib(memory.held + memory.update),
    }
    peak = memory.held + max(memory.sampling, memory.update)  # they alternate
    found = parts | {"predicted_gib": timing.gib(peak), "measured_gib": timing.gib(measured)}
    if measured is None:
        return found | {"note": "a CPU counts no peak"}
    apart = peak / measured - 1
    return found | {"apart": apart, "allowed": WITHIN, "agrees": abs(apart) <= WITHIN}
