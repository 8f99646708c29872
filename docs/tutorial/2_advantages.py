# %% [markdown]
# # 2. Advantages
#
# An **advantage** is a reward minus a *baseline*, its expectation. This page compares four baselines by bias and
# variance. The mean of a group of answers to one question is a good one.
#
# The world now has eight bandits, the *prompts*. Some pay well for every arm, as some questions are easy.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from grpo_jax.core.advantages import group_advantages, leave_one_out_advantages
from grpo_jax.core.losses import grpo_loss

np.set_printoptions(precision=3, floatmode="fixed", suppress=True)
EASE = jnp.linspace(0.0, 14.0, 8)[:, None]  # [P, 1]
PAYS = EASE + jnp.array([0.0, 1.0, 2.0])  # [P, A]
logits = jnp.zeros(3)  # one policy for all prompts


def pull(key, group):
    """Actions and rewards of a group for each prompt, both [P, G]."""
    draw, noise = jax.random.split(key)
    actions = jax.random.categorical(draw, logits, shape=(len(PAYS), group))
    return actions, jnp.take_along_axis(PAYS, actions, axis=1) + 0.5 * jax.random.normal(
        noise, actions.shape
    )


def gradient(actions, advantages):
    """What page 1 made of a loss, for groups."""

    def loss(logits):
        logprobs = jax.nn.log_softmax(logits)[actions][..., None]
        return grpo_loss(
            logprobs, jax.lax.stop_gradient(logprobs), advantages, jnp.ones_like(logprobs, bool)
        )[0]

    return -jax.grad(loss)(logits)


actions, rewards = pull(jax.random.key(0), 4)
print("rewards [P, G]:\n" + np.array2string(np.asarray(rewards), precision=1))

# %% [markdown]
# ## A baseline adds no bias
#
# Subtract any number b that does not depend on the action. Because Σ_a ∇π(a) = ∇1 = 0,
#
#     E[(r - b) ∇log π] = E[r ∇log π] - b · E[∇log π] = E[r ∇log π] - b · Σ_a ∇π(a) = E[r ∇log π]
#
# Only the variance changes. But the mean of a group depends a little on each of its actions.
#
# | baseline | taken from | in the library |
# |---|---|---|
# | none | | |
# | batch mean | all prompts' rewards | `batch_whitened_advantages` (also divided by the deviation) |
# | group mean | rewards of the same prompt, this one included | `group_advantages(rewards, scale="none")` |
# | leave one out | the *other* rewards of the same prompt | `leave_one_out_advantages` |
#
# Take the rewards 1, 2 and 6, whose mean is 3:

# %%
BASELINES = {
    "none": lambda r: r,
    "batch mean": lambda r: r - r.mean(),
    "group mean": lambda r: group_advantages(r, scale="none"),
    "leave one out": leave_one_out_advantages,
}
one_group = jnp.array([[1.0, 2.0, 6.0]])
for name, advantages in BASELINES.items():
    print(f"{name:14}", advantages(one_group)[0])

assert jnp.allclose(
    leave_one_out_advantages(one_group)[0], jnp.array([1 - 8 / 2, 2 - 7 / 2, 6 - 3 / 2])
)
assert jnp.allclose(
    leave_one_out_advantages(one_group), 3 / 2 * group_advantages(one_group, scale="none")
)

# %% [markdown]
# The leave-one-out advantage is always the group mean's advantage times G / (G - 1).
#
# ## Measured
#
# Now measure 4000 batches of 8 prompts with 4 pulls each. *Length* is the share of the true gradient in the mean
# estimate; 1 is unbiased. *Variance* is that of one batch, relative to the squared length of the true gradient; below
# 1 there is more signal than noise.

# %%
truth = jax.grad(lambda logits: jnp.mean(PAYS @ jax.nn.softmax(logits)))(logits)


def measure(advantages, group, batches=4000):
    """(share of the true gradient in the mean, variance over squared length)"""

    def one(key):
        actions, rewards = pull(key, group)
        return gradient(actions, advantages(rewards))

    estimates = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), batches))
    return float(estimates.mean(axis=0) @ truth / (truth @ truth)), float(
        estimates.var(axis=0).sum() / (truth @ truth)
    )


measured = {name: measure(advantages, 4) for name, advantages in BASELINES.items()}
for name, (length, variance) in measured.items():
    print(f"{name:14} length {length:.2f}  variance {variance:6.2f}")

variance = {name: both[1] for name, both in measured.items()}
assert (
    variance["none"] > variance["batch mean"] > variance["leave one out"] > variance["group mean"]
)
assert (
    abs(measured["leave one out"][0] - 1) < 0.03 and abs(measured["group mean"][0] - 3 / 4) < 0.03
)

# %% [markdown]
# Most of the variance came from easy and hard prompts, and only the prompt's own mean removes it. The group mean's
# gradient is a quarter too short, (G - 1) / G, because each reward is part of its own baseline. For a fixed G this
# only changes the learning rate.

# %%
groups = (2, 4, 8, 16)
lengths = {
    name: [measure(BASELINES[name], g, 2000)[0] for g in groups]
    for name in ("group mean", "leave one out")
}

figure, (left, right) = plt.subplots(
    1, 2, figsize=(8, 3), num="Variance by baseline, and bias by size of the group"
)
left.bar(list(variance), list(variance.values()), color=["C0", "C1", "C2", "C3"])
left.set(yscale="log", title="variance / squared length of the gradient")
left.tick_params(axis="x", labelrotation=15)
for (name, values), style in zip(lengths.items(), ("C2o-", "C3s--"), strict=True):
    right.plot(groups, values, style, label=name)
right.plot(groups, [(g - 1) / g for g in groups], "k:", linewidth=1, label="(G - 1) / G")
right.set(title="length of the mean gradient", xlabel="G", xticks=groups, ylim=(0, 1.1))
right.legend(loc="lower right")

# %% [markdown]
# ## The deviation
#
# GRPO also divides by the group's standard deviation. The following groups have 8 yes-or-no rewards. With the
# division, rarer successes count more.

# %%
print(" right   group mean only     divided by the deviation")
for right_ones in (1, 2, 4, 6, 7):
    rewards = (jnp.arange(8) < right_ones).astype(float)[None]
    plain, scaled = (
        group_advantages(rewards, scale="none")[0],
        group_advantages(rewards, eps=0.0)[0],
    )
    print(
        f"{right_ones} of 8   {plain[0]:+.2f} and {plain[-1]:+.2f}      "
        f"{scaled[0]:+.2f} and {scaled[-1]:+.2f}"
    )
    assert abs(scaled.std(ddof=1) - 1) < 1e-5

# %% [markdown]
# Dr. GRPO leaves out the division, because with it the gradient is not that of the expected reward. [Page
# 3](3_ppo_and_gae.md) has another baseline, a learned network; [page 4](4_grpo.md) is about GRPO.
#
# ## Exercises
#
# 1. Make all prompts alike (`EASE` of zeros). Which baselines still help?
# 2. With P · G = 32 pulls in each batch, which G has the least variance under leave one out?
#
# Papers: Williams 1992; Ahmadian and others 2024, ["Back to Basics"](https://arxiv.org/abs/2402.14740) (RLOO); Liu
# and others 2025, ["Dr. GRPO"](https://arxiv.org/abs/2503.20783).
