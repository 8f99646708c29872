"""GRPO iterations in grpo_jax, composed as in `training.update.make_update`; a worker of grpo_iteration.py.

Words of a variant: "layer" (`policy.remat`), "bfloat16" (`policy.matmul_precision`), "mixed" (`policy.compute_dtype`
bfloat16 over float32 weights).
"""

from __future__ import annotations

import iteration_work as work
import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from grpo_jax.config.sections import AlgorithmSection, OptimizerSection, PolicySection, PPOSection, TrainingSection
from grpo_jax.models.hf.folder import read_folder
from grpo_jax.models.policy import Policy, load_policy
from grpo_jax.models.variables import VISUAL
from grpo_jax.models.vision.pictures import Picture, pack_rows
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.sampling.sampler import SamplingParams, make_sampler
from grpo_jax.training.batch import make_batch
from grpo_jax.training.estimators import Objectives
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import init_state, make_optimizer, make_schedule
from grpo_jax.training.update import make_configured_step, make_preparation

ALGORITHM = AlgorithmSection(advantage="grpo", kl_coef=work.KL_COEF)


def make_phases(case: work.Case, loaded, variant: str):
    """The compiled parts of an iteration, and the state it starts from."""
    section, training = OptimizerSection(learning_rate=case.learning_rate), TrainingSection(prompts_per_batch=1)
    policy = Policy(
        loaded.config,
        compute_dtype="bfloat16" if "mixed" in variant.split() else "float32",
        remat="layer" if "layer" in variant.split() else PolicySection().remat,
        matmul_precision="bfloat16" if "bfloat16" in variant.split() else None,
    )
    # Without an end of sequence every library writes the same number of tokens.
    params, ends = SamplingParams(case.group, case.new_tokens), () if case.end is None else (case.end,)
    sample = make_sampler(policy, params, eos_ids=ends, pad_id=0)
    optimizer = make_optimizer(section, make_schedule(section, 1))
    forward, ppo = make_forward(policy, temperature=1.0), PPOSection()
    prepare = make_preparation(forward, ALGORITHM, ppo, training)
    step = make_configured_step(forward, optimizer, ALGORITHM, training, ppo, max_new_tokens=case.new_tokens)
    variables = {"params": loaded.params} | ({VISUAL: loaded.variables[VISUAL]} if case.picture else {})
    # On its device from the start, as in a run: the first update would put it there, and all compile again.
    state = jax.device_put(init_state(variables, optimizer, keep_reference=True), jax.devices()[0])
    return sample, jax.jit(policy.encode_images) if case.picture else None, prepare, step, state


def encode(case: work.Case, loaded, processor, iteration: int):
    """The prompts of an iteration: tokens, mask, and `Pictures` or None."""
    texts = work.prompt_texts(case, iteration)
    if not case.picture:
        encoded = processor(texts, return_tensors="np")
        return encoded["input_ids"], encoded["attention_mask"].astype(bool), None
    marked = [f"<|vision_start|><|image_pad|><|vision_end|> {text}" for text in texts]
    encoded = processor(images=work.pictures(case, iteration), text=marked, return_tensors="np")
    grids = [(int(height), int(width)) for _, height, width in encoded["image_grid_thw"]]
    patches = np.split(encoded["pixel_values"], np.cumsum([height * width for height, width in grids])[:-1])
    pictures = pack_rows([[Picture(*one)] for one in zip(patches, grids, strict=True)], loaded.config.vision)
    return encoded["input_ids"], encoded["attention_mask"].astype(bool), pictures


def read(given: work.Assignment):
    """The model of the folder, and what encodes its prompts."""
    # AutoTokenizer would make a Qwen2 tokenizer of this folder, in every library: the words are whole tokens here.
    reader = PreTrainedTokenizerFast
    if given.case.picture:
        from transformers import AutoProcessor as reader  # brings torch with it, which counts as memory
    loaded = load_policy(read_folder(given.folder, tokenizer=False), vision=bool(given.case.picture))
    return loaded, reader.from_pretrained(str(given.folder))


def iterate(given: work.Assignment, loaded, processor) -> list[dict[str, float]]:
    """Seconds of each iteration; where lengths differ, of a second time, when all their shapes are compiled."""
    case, now = given.case, given.now
    tokenizer = processor.tokenizer if case.picture else processor
    sample, see, prepare, step, state = make_phases(case, loaded, given.variant)
    rows = []
    for iteration in [*range(given.iterations)] * (2 if case.ends else 1):
        start = now()
        tokens, mask, pictures = encode(case, loaded, processor, iteration)
        seen = None if see is None else see(state.variables, pictures)  # frozen: once for sampler, reference, update
        keys = jax.random.split(jax.random.key(iteration), case.prompts)
        samples = jax.device_get(sample(state.variables, tokens, mask, keys, seen))
        shown = {} if seen is None else {"pictures": seen}
        sampled = now()
        texts = tokenizer.batch_decode(samples.tokens.reshape(-1, case.new_tokens))
        rewards = jnp.asarray([work.reward(case, text) for text in texts]).reshape(case.prompts, case.group, 1)
        objectives, values = Objectives(rewards, ("share",), (1.0,), np.ones(case.prompts, bool)), np.asarray(rewards)
        rollout = Rollout([], [], values, values, samples, tokens.astype("int32"), mask, shown)
        batch = make_batch(rollout, objectives, ALGORITHM)
        before = now()
        batch, _ = jax.block_until_ready(prepare(state, batch))
        referred = now()
        state, report = jax.block_until_ready(step(state, batch))
        written = int(samples.mask.sum())
        if (case.end is None and written < samples.mask.size) or not jnp.isfinite(report["loss"]):
            raise RuntimeError("a completion ended early, or the loss is not finite")
        total = now() - start
        rows.append({"sampling": sampled - start, "logprobs": referred - before, "total": total, "tokens": written})
    return [rows[0], *rows[len(rows) - given.iterations + 1 :]]


if __name__ == "__main__":
    given = work.assignment()
    rows = iterate(given, *read(given))
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    work.write_report(given, rows, ("grpo_jax", "jax", "jaxlib", "flax", "optax"), gpu_bytes=peak)
