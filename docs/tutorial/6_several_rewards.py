# %% [markdown]
# # 6. Several rewards
#
# An answer should be right and brief. GRPO compares the sums of rewards; GDPO normalises each reward in the group and
# adds the *advantages*. This page compares both, also with a noisy and with an easy second reward.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from grpo_jax import (
    Condition,
    condition_rewards,
    gdpo_advantages,
    group_advantages,
    raft_advantages,
    sum_rewards,
)
from grpo_jax.core.selection import groups_with_signal

np.set_printoptions(precision=4, floatmode="fixed", suppress=True)


def of_sum(rewards, **words):
    return group_advantages(sum_rewards(rewards), **words)


# %% [markdown]
# ## One reward or both
#
# Two answers have two rewards. In one question the second answer gets one reward, in the other both. The sums 0 and 1
# give A = ∓0.5 / 0.7071 = ∓0.7071; the sums 0 and 2 give ∓1 / 1.4142, the same. Separately normalised, both rewards
# give twice as much.

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
# ## Equal sums
#
# (1, 0) and (0, 1) have the same sum and the same advantage. Separately normalised, the rarer reward counts more. If
# *all* sums are equal, the sum has no gradient.

# %%
rewards = jnp.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]])
summed, apart = of_sum(rewards, eps=0.0), gdpo_advantages(rewards, whiten=None, eps=0.0)
print("sum  ", summed[0])
print("apart", apart[0])
assert np.allclose(apart, [[0.3660, 0.3660, -1.3660, 0.6340]], atol=5e-5)

equal = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
print(
    "equal sums teach:",
    groups_with_signal(sum_rewards(equal))[0],
    " apart:",
    groups_with_signal(equal)[0],
)

# %% [markdown]
# ## Conditions
#
# With a *condition*, brevity counts only if the answer is right. It changes the rewards before they are compared.

# %%
rewards = jnp.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]])  # brief, right
brief_if_right = [Condition(easy=0, hard=1, threshold=1.0)]
conditioned = condition_rewards(rewards, brief_if_right)
advantages = gdpo_advantages(conditioned, whiten=None, eps=0.0)
print("brief", rewards[0, :, 0], "becomes", conditioned[0, :, 0], "\nadvantages", advantages[0])
assert np.allclose(advantages, [[-1.3660, 0.3660, 2.3660, -1.3660]], atol=5e-5)

# %% [markdown]
# ## A rare answer beside a noisy reward
#
# One answer of 32 is right, and a second reward is noise of spread 1. The policy starts uniform and takes 400 steps,
# each with four groups of 8, on eight seeds. RAFT trains on each group's best alone; times G, its step is as large as
# the others'. On-policy, `grpo_loss` has the gradient of the loss below.

# %% tags=["learned"]
WAYS = {
    "GRPO": of_sum,
    "RAFT": lambda r: 8 * raft_advantages(sum_rewards(r)),
    "GDPO": gdpo_advantages,
}


@partial(jax.jit, static_argnums=0)
def learn(way, pays, noise):
    """Probabilities [seeds, K] after training on rewards pays [K, N] and noise of spread [N]."""

    def step(logits, key):
        drawing, disturbing = jax.random.split(key)
        answers = jax.random.categorical(drawing, logits, shape=(4, 8))  # [P, G]
        advantages = way(pays[answers] + noise * jax.random.normal(disturbing, (4, 8, 2)))

        def loss(logits):
            return -jnp.mean(advantages * jax.nn.log_softmax(logits)[answers])

        return logits - 0.25 * jax.grad(loss)(logits), None

    def one(key):
        logits, _ = jax.lax.scan(step, jnp.zeros(len(pays)), jax.random.split(key, 400))
        return jax.nn.softmax(logits)

    return jax.vmap(one)(jax.random.split(jax.random.key(0), 8))


is_right, spread = jnp.zeros((32, 2)).at[0, 0].set(1.0), jnp.array([0.0, 1.0])
scales = np.array([10.0, 1.0, 0.1, 0.01])
figure, axis = plt.subplots(figsize=(5, 2.6), num="The right answer beside noise, by its pay")
print("right pays", *(f"{scale:5g}" for scale in scales))
right = {}
for (name, way), style in zip(WAYS.items(), ("C1s--", "C3^:", "C2o-"), strict=True):
    right[name] = np.array([learn(way, scale * is_right, spread)[:, 0].mean() for scale in scales])
    print(f"{name:10}", *(f"{share:5.2f}" for share in right[name]))
    axis.semilogx(scales, right[name], style, label=name)
axis.set(title="probability of the right answer", xlabel="the right answer pays", ylim=(0, 1.05))
axis.legend()
assert right["GDPO"].min() > 0.9 and right["GRPO"][1] > 0.9
assert max(right["GRPO"][3], right["RAFT"][3]) < 0.2

# %% [markdown]
# The sum follows the reward that varies most. GDPO weighs both equally in any unit. GRPO needs a search for the right
# weight (100 at .01 is 1 again).
#
# ## An easy reward that excludes the hard one
#
# Of the 32 answers, 27 are brief and wrong, one is right and long, and four are neither. None is both.

# %% tags=["learned"]
pays = jnp.zeros((32, 2)).at[:27, 0].set(1.0).at[27, 1].set(1.0)  # brief, right
for name, way in WAYS.items():
    plain, waits = (
        learn(way, rewards, jnp.zeros(2))[:, 27].mean()
        for rewards in (pays, condition_rewards(pays[None], brief_if_right)[0])
    )
    print(f"{name}: right {plain:.2f}, conditioned {waits:.2f}")
    assert plain < 0.3 and waits > 0.9

# %% [markdown]
# Every estimator needs the condition here, because none knows which reward matters more ([when to take
# which](../comparison.md)).
#
# ## Exercises
#
# 1. Three answers have the rewards (1, 0), (1, 0), (0, 1). Compute the advantages by the sum, and by GDPO without
#    whitening.
# 2. Give wrong answers a third, unwanted reward (such as length) with ten times the spread. How do the sum and GDPO
#    change?
#
# Paper: NVIDIA, ["GDPO"](https://arxiv.org/abs/2601.05242), 2026.
