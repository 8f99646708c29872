# %% [markdown]
# # 6. Several rewards
#
# An answer should be right and brief. GRPO compares the sums of rewards; GDPO normalises each reward in the group and
# adds the *advantages*. This page shows what the sum forgets, and trains a policy that finds brief answers easy and
# right ones hard.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from grpo_jax import (
    Condition,
    condition_rewards,
    gdpo_advantages,
    group_advantages,
    grpo_loss,
    sum_rewards,
)
from grpo_jax.core.selection import groups_with_signal

np.set_printoptions(precision=4, floatmode="fixed", suppress=True)


def of_sum(rewards, **words):
    return group_advantages(sum_rewards(rewards), **words)


# %% [markdown]
# ## One reason or two
#
# Two answers, two rewards. In one question the second answer gained one reward, in the other both. The sums 0 and 1
# give A = ∓0.5 / 0.7071 = ∓0.7071; the sums 0 and 2 give ∓1 / 1.4142, the same. Apart, two rewards that differ give
# twice as much.

# %%
one_good = jnp.array([[[0.0, 0.0], [1.0, 0.0]]])  # [P, G, N]
both_good = jnp.array([[[0.0, 0.0], [1.0, 1.0]]])
for rewards in (one_good, both_good):
    apart = gdpo_advantages(rewards, whiten=None, eps=0.0)
    print("sum", of_sum(rewards, eps=0.0)[0], " apart", apart[0])
assert np.allclose(apart, [[-1.4142, 1.4142]], atol=5e-5)

both = gdpo_advantages(jnp.concatenate([one_good, both_good]), eps=0.0)
print("whitened over the batch:", both[0], both[1])
assert np.allclose(both, [[-0.5477, 0.5477], [-1.0954, 1.0954]], atol=5e-5)

# %% [markdown]
# ## Reasons with one sum
#
# (1, 0) and (0, 1) have the same sum and the same advantage. Apart, the rarer reward counts more. If *all* sums are
# equal, the sum sees nothing to learn.

# %%
rewards = jnp.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]])
summed, apart = of_sum(rewards, eps=0.0), gdpo_advantages(rewards, whiten=None, eps=0.0)
print("sum  ", summed[0])
print("apart", apart[0])
assert np.allclose(apart, [[0.3660, 0.3660, -1.3660, 0.6340]], atol=5e-5)


def different(advantages: jax.Array) -> float:
    """Number of different advantages in a group, mean over groups."""
    return float(np.mean([len(np.unique(np.round(group, 3))) for group in advantages]))


assert different(summed) == 2 and different(apart) == 3

equal = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
print(
    "equal sums teach:",
    groups_with_signal(sum_rewards(equal))[0],
    " apart:",
    groups_with_signal(equal)[0],
)

# %% [markdown]
# N yes-or-no rewards have 2^N combinations but only N + 1 sums. How many different advantages does a group of 16 have
# on average?

# %%
counts = {"sum": [], "apart": []}
for number in range(1, 7):
    easy = jnp.linspace(0.3, 0.7, number)
    drawn = jax.random.bernoulli(jax.random.key(0), easy, (400, 16, number)).astype(jnp.float32)
    counts["sum"].append(different(of_sum(drawn)))
    counts["apart"].append(different(gdpo_advantages(drawn)))
print("sum  ", np.array(counts["sum"]))
print("apart", np.array(counts["apart"]))
assert (
    all(a <= b for a, b in zip(counts["sum"], counts["apart"], strict=True))
    and counts["apart"][-1] > 2 * counts["sum"][-1]
)

figure, axis = plt.subplots(
    figsize=(5, 2.6), num="Different advantages of a group, by number of yes-or-no rewards"
)
axis.plot(range(1, 7), counts["sum"], "C1s--", range(1, 7), counts["apart"], "C2o-")
axis.set(title="different advantages in a group of 16", xlabel="yes-or-no rewards", ylim=(0, 16))
axis.legend(counts)

# %% [markdown]
# ## Conditions
#
# A *condition* says when a reward counts: brevity only if the answer is right. It changes the rewards before anything
# is compared.

# %%
rewards = jnp.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]])  # brief, right
brief_if_right = [Condition(easy=0, hard=1, threshold=1.0)]
conditioned = condition_rewards(rewards, brief_if_right)
advantages = gdpo_advantages(conditioned, whiten=None, eps=0.0)
print("brief", rewards[0, :, 0], "becomes", conditioned[0, :, 0], "\nadvantages", advantages[0])
assert np.allclose(advantages, [[-1.3660, 0.3660, 2.3660, -1.3660]], atol=5e-5)

# %% [markdown]
# ## The order of learning
#
# A policy with four kinds of answers: at first 85 % are brief and wrong, 4 % right but long, 1 % both, 10 % neither.
# Groups of 8, four questions per step, forty seeds for each way.

# %%
KINDS = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])  # brief, right
WAYS = {
    "sum": of_sum,
    "GDPO": gdpo_advantages,
    "GDPO, right twice": lambda r: gdpo_advantages(r, weights=(1.0, 2.0)),
    "GDPO, conditioned": lambda r: gdpo_advantages(condition_rewards(r, brief_if_right)),
}


def learn(way, key):
    def step(logits, key):
        kinds = jax.random.categorical(key, logits, shape=(4, 8))  # [P, G]
        advantages = way(KINDS[kinds])

        def loss(logits):
            logprobs = jax.nn.log_softmax(logits)[kinds][..., None]
            return grpo_loss(
                logprobs, jax.lax.stop_gradient(logprobs), advantages, jnp.ones_like(logprobs, bool)
            )[0]

        return logits - 0.5 * jax.grad(loss)(logits), jax.nn.softmax(logits) @ KINDS

    return jax.lax.scan(
        step, jnp.log(jnp.array([0.85, 0.04, 0.01, 0.10])), jax.random.split(key, 150)
    )[1]


keys, ends = jax.random.split(jax.random.key(1), 40), []
figure, axes = plt.subplots(
    1, 2, figsize=(9, 3), sharey=True, num="Shares of right and of brief answers"
)
for (name, way), style in zip(WAYS.items(), ("C1--", "C2-", "C3:", "k-."), strict=True):
    curves = jax.jit(jax.vmap(lambda key, way=way: learn(way, key)))(keys).mean(axis=0)
    for axis, which, title in ((axes[0], 1, "right"), (axes[1], 0, "brief")):
        axis.plot(curves[:, which], style, label=name)
        axis.set(title=title, xlabel="step")
    ends.append(curves[-1, 1])
    print(
        f"{name:18} right after 75 steps {curves[75, 1]:.2f}, in the end {curves[-1, 1]:.2f}; "
        f"brief {curves[-1, 0]:.2f}"
    )
axes[1].legend(fontsize=8, loc="lower right")
assert ends[0] < ends[1] < ends[3]

# %% [markdown]
# By the sum, brief and wrong is as good as long and right, and the policy already does it. GDPO weighs the rare right
# answer more. With the condition, answers are right first and brief afterwards. But rewards that agree need no GDPO,
# and it amplifies a reward that hardly varies ([measured](../comparison.md)).
#
# ## Exercises
#
# 1. By hand: three answers with the rewards (1, 0), (1, 0), (0, 1). The advantages by the sum, and apart without
#    whitening?
# 2. Give wrong answers a third, unwanted reward (length, say) with ten times the spread. What do the sum and GDPO
#    make of it?
#
# Paper: NVIDIA, ["GDPO"](https://arxiv.org/abs/2601.05242), 2026.
