# %% [markdown]
# # 5. What goes wrong
#
# A wrong policy gradient does not crash; the policy learns something else. This page shows five problems in small
# worlds: length bias, zero-variance groups, clipping, KL estimators and entropy collapse.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from grpo_jax import (
    PRESETS,
    CappedWeight,
    Clip,
    SoftGate,
    group_advantages,
    grpo_loss,
    kl_divergence,
)
from grpo_jax.core.losses import PRESET_SCALES
from grpo_jax.core.selection import groups_with_signal


def on_policy(logprobs, advantages, mask, **choices):
    return grpo_loss(logprobs, jax.lax.stop_gradient(logprobs), advantages, mask, **choices)[0]


def descend(loss, start, key, steps, rate):  # loss(x, key) → (value, what to watch)
    def step(x, key):
        slope, seen = jax.grad(loss, has_aux=True)(x, key)
        return x - rate * slope, (seen, jnp.abs(slope).max())

    return jax.jit(lambda x, keys: jax.lax.scan(step, x, keys)[1])(
        start, jax.random.split(key, steps)
    )


def lines(axis, curves, title, xlabel, x=None):
    for (name, curve), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=False):
        axis.plot(range(len(curve)) if x is None else x, curve, style, label=name)
    axis.set(title=title, xlabel=xlabel)
    axis.legend(fontsize=8)


# %% [markdown]
# ## Length bias
#
# Half of the answers are right, at random. The policy only decides when to stop. Length earns nothing, but in a mean
# over each row (`grpo`) a token of a long row weighs little. Long wrong answers are therefore punished less. Dr. GRPO
# found this, and divides by a constant instead of the length.

# %%
figure, axes = plt.subplots(
    1, 3, figsize=(9, 2.4), sharey=True, num="Lengths of answers under three means"
)
for axis, name in zip(axes, ("grpo", "dapo", "dr_grpo"), strict=True):

    def loss(odds, key, limit=24, name=name):  # log-odds of stopping after a token, [2]
        right = jax.random.bernoulli(key, 0.5, (8, 16)).astype(int)  # [P, G]
        z = odds[right][..., None]
        stop = jax.random.bernoulli(jax.random.fold_in(key, 1), jax.nn.sigmoid(z), (8, 16, limit))
        mask = jnp.cumsum(stop, axis=-1) - stop == 0  # up to the first stop
        logprobs = jax.nn.log_sigmoid(jnp.where(stop, z, -z))
        advantages = group_advantages(right * 1.0, scale=PRESET_SCALES[name])
        chance = jax.nn.sigmoid(odds)
        return on_policy(logprobs, advantages, mask, **PRESETS[name]), (
            1 - (1 - chance) ** limit
        ) / chance

    wrong, right = descend(loss, jnp.full(2, -1.8), jax.random.key(0), steps=200, rate=0.3)[0].T
    lines(axis, {"wrong": wrong, "right": right}, f"{name}: tokens", "step")
    assert (wrong[-1] > right[-1] + 4) == (name == "grpo")

# %% [markdown]
# ## Zero-variance groups
#
# With a share p of right answers, all G rewards of a group are equal with probability p^G + (1 - p)^G, and the group
# has no gradient. Resampling (`algorithm.zero_variance_groups: resample`), larger groups and questions of medium
# difficulty help.

# %%
share = jnp.linspace(0.0, 1.0, 21)
alive = {}
for group in (4, 16):
    rewards = 1.0 * jax.random.bernoulli(jax.random.key(1), share[:, None, None], (21, 1000, group))
    alive[f"G = {group}"] = jax.vmap(groups_with_signal)(rewards).mean(axis=1)
    assert jnp.abs(alive[f"G = {group}"] - (1 - share**group - (1 - share) ** group)).max() < 0.06
figure, axis = plt.subplots(
    figsize=(5, 2.4), num="Share of groups with a signal, by share of right answers"
)
lines(axis, alive, "share of groups that teach", "share of right answers", share)

# %% [markdown]
# ## Clipping
#
# The policy sampled the right answer, whose probability is 0.01, and now makes many passes over this batch. A clip at
# 1.2 stops at 0.012. Surrogates that bound a token's *weight* instead continue, and can go too far.

# %%
old, chances = jnp.log(jnp.full((2, 1), 0.01)), {}  # action 0 was right, action 1 was not
for surrogate in (Clip(high=0.2), Clip(high=0.28), SoftGate(), CappedWeight(5.0)):

    def loss(logits, _, surrogate=surrogate):
        logs = jax.nn.log_softmax(logits)[:2, None]
        value, _ = grpo_loss(
            logs, old, jnp.array([0.7, -0.7]), jnp.ones((2, 1), bool), surrogate=surrogate
        )
        return value, jnp.exp(logs[0, 0])

    name = type(surrogate).__name__ + (f" {surrogate.high}" if isinstance(surrogate, Clip) else "")
    chances[name], slopes = descend(loss, jnp.zeros(100), jax.random.key(0), steps=80, rate=0.05)
    print(f"{name:12} chance 0.010 -> {chances[name][-1]:.3f}, slope at the end {slopes[-1]:.3f}")
    assert (slopes[-1] == 0) == isinstance(surrogate, Clip)
figure, axis = plt.subplots(
    figsize=(5, 2.4), num="Chance of a rare find over passes under four surrogates"
)
lines(axis, chances, "chance of the right answer", "pass over one batch")
axis.set(yscale="log")

# %% [markdown]
# ## KL estimators
#
# With d = log π_ref - log π of sampled tokens, k1 = -d, k2 = d² / 2 and k3 = e^d - d - 1. The code computes their
# means and deviations exactly over ten tokens, and compares their gradients with that of the divergence.

# %%
policy, direction = jax.nn.log_softmax(jax.random.normal(jax.random.key(2), (2, 10)))
references = jax.nn.log_softmax(policy + jnp.linspace(0.05, 2.0, 40)[:, None] * direction)
truth = (policy - references) @ jnp.exp(policy)
pull = jax.grad(lambda x: jax.nn.softmax(x) @ (jax.nn.log_softmax(x) - references[-1]))(policy)
means, deviations = {}, {}
for name in ("k1", "k2", "k3"):
    values = kl_divergence(policy + 0 * references, references, estimator=name)
    means[name] = values @ jnp.exp(policy) / truth
    deviations[name] = jnp.sqrt(
        jnp.square(values) @ jnp.exp(policy) - jnp.square(means[name] * truth)
    )

    def loss(x, k=name):
        return jnp.exp(policy) @ kl_divergence(jax.nn.log_softmax(x), references[-1], estimator=k)

    right = jnp.abs(jax.grad(loss)(policy) - pull).max() < 1e-5
    print(f"{name}: mean / truth {means[name][-1]:.2f}; as a loss {'right' if right else 'wrong'}")
    assert right == (name == "k2") and (abs(means[name][-1] - 1) < 1e-4) == (name != "k2")
figure, axes = plt.subplots(
    1, 2, figsize=(8, 2.4), num="Mean and deviation of three estimators of the divergence"
)
lines(axes[0], means, "mean / true divergence", "true divergence", truth)
lines(axes[1], deviations, "deviation", "true divergence", truth)

# %% [markdown]
# As a loss k1 has no effect on average, and k3 follows the reverse divergence.
# [Algorithms](../algorithms.md#4-distance-from-a-reference) has corrections.
#
# ## Entropy collapse
#
# Nine arms pay nothing, and one pays 0.5. The best arm pays 1, but at first is pulled only once in 75. The policy
# soon finds the second best, whose probability goes to 1, and never tries the best again. An entropy bonus prevents
# that.

# %%
PAYS = jnp.zeros(11).at[0].set(1.0).at[1].set(0.5)


def look(bonus, key):
    def loss(logits, key):
        actions = jax.random.categorical(key, logits, shape=(1, 8))
        noise = jax.random.normal(jax.random.fold_in(key, 1), actions.shape)
        logs = jax.nn.log_softmax(logits)
        chosen, entropy = logs[actions][..., None], -jnp.exp(logs) @ logs
        spread = {"entropy": entropy + 0 * chosen, "entropy_coef": bonus}
        advantages = group_advantages(PAYS[actions] + 0.3 * noise)
        return on_policy(chosen, advantages, jnp.ones_like(chosen, bool), **spread), (
            entropy,
            jnp.exp(logs[0]),
        )

    return descend(loss, jnp.zeros(11).at[0].set(-2.0), key, steps=400, rate=1.0)[0]


keys, bonuses = (
    jax.random.split(jax.random.key(3), 40),
    {"no bonus": 0.0, "bonus 0.15": 0.15, "bonus 0.25": 0.25},
)
entropies, chances = jax.jit(jax.vmap(jax.vmap(look, (None, 0)), (0, None)))(
    jnp.array([*bonuses.values()]), keys
)
figure, axes = plt.subplots(
    1, 2, figsize=(8, 2.4), num="Entropy and the chance of the best arm under three bonuses"
)
lines(
    axes[0],
    dict(zip(bonuses, entropies.mean(axis=1), strict=True)),
    "entropy, mean of 40 seeds",
    "step",
)
lines(
    axes[1], dict(zip(bonuses, chances.mean(axis=1), strict=True)), "chance of the best arm", "step"
)
found = (chances[..., -1] > 0.5).mean(axis=1)
assert found[0] < 0.2 and found[2] > 0.8

# %% [markdown]
# ## Exercises
#
# 1. Give right answers 1 + 0.01 · length. From which coefficient on does `grpo` lengthen right answers?
# 2. Start the third world with a chance of 0.6 for the right answer. Does the clip matter now?
#
# Papers: ["Dr. GRPO"](https://arxiv.org/abs/2503.20783) and ["DAPO"](https://arxiv.org/abs/2503.14476), 2025; J.
# Schulman, ["Approximating KL divergence"](http://joschu.net/blog/kl-approx.html), 2020.
