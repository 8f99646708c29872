# %% [markdown]
# # 7. A language policy
#
# Now the policy is a transformer, and actions are words. The loop takes forty lines with the trainer's functions. A
# tiny new model hacks its reward; a second reward fixes that.
#
# ## A policy and a reward
#
# `write_policy` makes a Hugging Face folder with random weights in which every word is a token. A prompt asks for a
# word. *said* is this word's share of the answer; *brief* is 1 for one word, 1/2 for two, and so on.

# %%
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from grpo_jax import (
    Condition,
    SamplingParams,
    condition_rewards,
    gdpo_advantages,
    group_advantages,
    grpo_loss,
    load_policy,
    make_sampler,
)
from grpo_jax.config.sections import NewPolicySection
from grpo_jax.models.random_init import write_policy

WORDS = ["red", "green", "blue", "black", "ball", "cup", "door", "lamp"]

with tempfile.TemporaryDirectory() as folder:
    write_policy(folder, ["say", *WORDS], NewPolicySection(width=32, layers=1, heads=2))
    policy = load_policy(folder)
prompts, prompt_mask = policy.encode([f"say {word}" for word in WORDS])


def judge(text, word):
    """Two rewards of one answer: said, brief."""
    answer = text.split()
    return [answer.count(word) / len(answer), 1 / len(answer)] if answer else [0.0, 0.0]


print("parameters:", sum(x.size for x in jax.tree.leaves(policy.params)))
print("first prompt:", policy.tokenizer.convert_ids_to_tokens(prompts[0]))
for text in ("red", "red cup", "cup", ""):
    print(f"{text!r:10} said, brief =", judge(text, "red"))

# %% [markdown]
# ## The loop
#
# 1. `make_sampler` samples G answers to each prompt, at most 6 tokens long.
# 2. The rewards of the texts are `[P, G, N]`; an estimator turns them into advantages `[P, G]`.
# 3. `forward_group` and `token_logprobs` give the tokens' log-probabilities, `grpo_loss` the loss.
# 4. Any optimizer follows the gradient.
#
# With one update per batch the ratio is 1, and the old log-probabilities are `stop_gradient` of the new ones.

# %%
sample = make_sampler(
    policy,
    SamplingParams(group_size=16, max_new_tokens=6),
    eos_ids=policy.eos_ids,
    pad_id=policy.pad_id,
)
optimizer = optax.adam(1e-2)


def loss(params, samples, advantages):
    variables = {"params": params}
    hidden = policy.forward_group(variables, prompts, prompt_mask, samples.tokens, samples.mask)
    logprobs, entropy = policy.token_logprobs(variables, hidden, samples.tokens)
    return grpo_loss(
        logprobs, jax.lax.stop_gradient(logprobs), advantages, samples.mask, entropy=entropy
    )


@jax.jit
def update(params, opt_state, samples, advantages):
    gradient, metrics = jax.grad(loss, has_aux=True)(params, samples, advantages)
    step, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, step), opt_state, metrics.entropy.value()


def train(estimate, steps=50):
    """The last batch's first answer to each prompt, and four figures of each step."""
    params, opt_state, rows = policy.params, optimizer.init(policy.params), []
    for number in range(steps):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), len(WORDS))
        samples = sample({"params": params}, prompts, prompt_mask, keys)
        texts = policy.decode(samples)
        rewards = jnp.array(
            [
                [judge(text, word) for text in group]
                for group, word in zip(texts, WORDS, strict=True)
            ]
        )
        advantages = estimate(rewards)
        params, opt_state, entropy = update(params, opt_state, samples, advantages)
        silent = 1 - jnp.abs(advantages).any(axis=1).mean()
        rows.append([rewards[..., 0].mean(), samples.mask.sum(-1).mean(), entropy, silent])
    return [group[0] for group in texts], np.array(rows, float)


WAYS = {
    "said": lambda rewards: group_advantages(rewards[..., 0]),
    "said, then brief": lambda rewards: gdpo_advantages(
        condition_rewards(rewards, [Condition(1, 0, threshold=0.99)])
    ),
}
runs = {name: train(jax.jit(estimate)) for name, estimate in WAYS.items()}

# %% tags=["learned"]
figure, axes = plt.subplots(
    1, 4, figsize=(10, 2.8), num="Said, tokens, entropy and silent groups of the tiny policy"
)
for (name, (answers, rows)), style in zip(runs.items(), ("C1-", "C0--"), strict=True):
    alone = sum(answer == word for answer, word in zip(answers, WORDS, strict=True))
    print(f"{name}: {rows[-1, 0]:.2f} at last; the word alone for {alone} of {len(WORDS)} prompts,")
    print(f"  such as {answers[3:5]}")
    for axis, curve, title in zip(
        axes, rows.T, ("said", "tokens", "entropy per token", "silent groups"), strict=True
    ):
        axis.plot(curve, style, label=name)
        axis.set(title=title, xlabel="step", ylim=(0, None))
axes[2].legend(fontsize=8)

hacked, meant = runs["said"][1][-5:].mean(axis=0), runs["said, then brief"][1][-5:].mean(axis=0)
assert hacked[0] > 0.8 and meant[0] > 0.8  # both do what they are paid for
assert hacked[1] > 5 and meant[1] < 4.5  # and only one of them tends to stop

# %% [markdown]
# ## Reading the curves
#
# - *Said* reaches 1 in both runs, but the first run repeats the word six times. Read the completions.
# - *Tokens*: with the condition, brevity counts once the word is right, and most answers become the single word. A
#   word or two reached six repetitions before that, and stay there.
# - *Entropy* falls and *silent groups*, those with zero variance, rise. The first run is then stuck, because all
#   answers of a group are equal.
#
# ## At full size
#
# `python -m grpo_jax.train --task text` is this loop with several updates per batch, a reference, checkpoints and a
# report; [`examples/own_loop.py`](../../examples/own_loop.py) is a one-file version. In the default run a policy
# rewrites prompts for a renderer, and CLIP scores the picture ([figures](../tasks.md#prompt-enhancement)):
#
# ![Pixel accuracy and reward of a recorded default run](../images/curves.png)
#
# ## Exercises
#
# 1. Change the reward instead of adding one: `answer == [word]`. Why does the run learn more slowly, or not at all?
# 2. Train on six of the words and measure the other two. What would a policy need to answer them?
#
# Papers: Shao and others, ["DeepSeekMath"](https://arxiv.org/abs/2402.03300), 2024; NVIDIA,
# ["GDPO"](https://arxiv.org/abs/2601.05242), 2026.
