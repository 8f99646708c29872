"""GRPO in one file: sample groups, judge them, compare within the group, follow the gradient.

    python examples/own_loop.py FOLDER        # any Hugging Face folder of a supported architecture

This is `python -m grpo_jax.train --task text` in one file: the same functions, with your own loop and
optimizer.
"""

import sys

import jax
import jax.numpy as jnp
import optax

from grpo_jax import SamplingParams, group_advantages, grpo_loss, load_policy, make_sampler

PROMPTS = ["What is rain?", "What is rust?", "What is fog?", "What is yeast?"]


def reward(text: str) -> float:
    """Return 1 for one to eight words, less for more, 0 for none."""
    words = len(text.split())
    return 0.0 if words == 0 else min(1.0, 8 / words)


def train(folder: str, *, steps: int = 20, group_size: int = 8, max_new_tokens: int = 32, rate: float = 1e-5):
    """Yield (loss, mean reward) of each step."""
    policy = load_policy(folder)
    sample = make_sampler(
        policy, SamplingParams(group_size, max_new_tokens), eos_ids=policy.eos_ids, pad_id=policy.pad_id
    )
    optimizer = optax.adamw(rate)
    params, opt_state = policy.params, optimizer.init(policy.params)
    prompts, mask = policy.encode(PROMPTS)

    def loss(params, samples, advantages):
        variables = {"params": params}
        hidden = policy.forward_group(variables, prompts, mask, samples.tokens, samples.mask)
        logprobs, _ = policy.token_logprobs(variables, hidden, samples.tokens)
        return grpo_loss(logprobs, jax.lax.stop_gradient(logprobs), advantages, samples.mask)

    @jax.jit
    def update(params, opt_state, samples, advantages):
        (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(params, samples, advantages)
        step, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, step), opt_state, value

    for number in range(steps):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), len(PROMPTS))
        samples = sample({"params": params}, prompts, mask, keys)
        rewards = jnp.array([[reward(text) for text in group] for group in policy.decode(samples)])
        params, opt_state, value = update(params, opt_state, samples, group_advantages(rewards))
        yield float(value), float(rewards.mean())


if __name__ == "__main__":
    for number, (value, mean) in enumerate(train(sys.argv[1]), 1):
        print(f"step {number}  loss {value:.4f}  reward {mean:.3f}")
