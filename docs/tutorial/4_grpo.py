# %% [markdown]
# # 4. GRPO: groups instead of a critic
#
# In GRPO the policy answers the same question G times, and the mean reward is the baseline. This page computes a
# group's advantages, gives them to tokens, and trains CartPole without a critic.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from grpo_jax.cartpole.environment import play_episodes, play_greedily, reset
from grpo_jax.cartpole.training import action_entropy, action_logprobs
from grpo_jax.core.advantages import group_advantages, groups_without_signal
from grpo_jax.core.kl import KLPenalty
from grpo_jax.core.losses import PRESETS, grpo_loss
from grpo_jax.core.returns import discounted_returns, normalised_returns
from grpo_jax.models.layers import make_mlp

np.set_printoptions(precision=4, floatmode="fixed", suppress=True)

# %% [markdown]
# ## A group by hand
#
# Three answers got the rewards 1, 2 and 6. Their mean is 3, and their sample standard deviation is √((4 + 1 + 9) / 2)
# = √7 = 2.6458. So
#
#     A[g] = (r[g] - mean) / std = -2 / 2.6458, -1 / 2.6458, 3 / 2.6458
#
# The library adds a small `eps` to the deviation; here it is 0.

# %%
rewards = jnp.array(
    [[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]]
)  # [P, G]: a second question, to which all answers are alike
advantages = group_advantages(rewards, eps=0.0)
print(advantages)

assert np.allclose(advantages[0], [-0.7559, -0.3780, 1.1339], atol=5e-5)
assert not advantages[1].any()

# %% [markdown]
# A group sums to 0, and units do not matter: 10, 20 and 60 give the same. The second group has zero variance and no
# gradient; [page 5](5_what_goes_wrong.md) counts such groups.
#
# ## From rows to tokens
#
# All tokens of an answer share its advantage. The loss is PPO's, per token:
#
#     loss = -aggregate(min(ρ A, clip(ρ, 0.8, 1.2) A)) + coef · KL(π ‖ reference)
#
# Rows of different lengths can be *aggregated* in different ways. Take rows of 1 and 3 tokens with advantages 1 and
# 0. On-policy ρ is 1, so the loss is minus the weight of the first row's token.

# %%
logprobs = jnp.full((2, 3), -1.0)
mask = jnp.array([[True, False, False], [True, True, True]])
weights = {}
for name in ("grpo", "dapo", "dr_grpo"):
    weights[name], _ = grpo_loss(logprobs, logprobs, jnp.array([1.0, 0.0]), mask, **PRESETS[name])
    print(f"{name:8} {float(weights[name]):.4f}")
assert np.allclose(list(weights.values()), [-1 / 2, -1 / 4, -1 / 6])

# %% [markdown]
# - `grpo` is the mean over rows of the mean over a row's tokens: 1/2.
# - `dapo` is the mean over all tokens: 1/4.
# - `dr_grpo` is the sum over all tokens, divided by rows · the longest possible row: 1 / (2 · 3).
#
# A group's advantages sum to 0, so the loss of the first pass is 0 and shows no progress. Its *gradient* is not 0:

# %%
rows = jnp.full((1, 3, 2), -1.0)
value, gradient = jax.value_and_grad(
    lambda x: grpo_loss(x, rows, advantages[:1], jnp.ones_like(x, bool))[0]
)(rows)
print(f"loss {abs(float(value)):.4f}, its gradient:")
print(gradient[0])
assert abs(value) < 1e-6 and jnp.allclose(gradient, -advantages[:1, :, None] / 6, atol=1e-6)

# %% [markdown]
# ## CartPole again
#
# Sixteen episodes from the same start form a group. `normalised_returns` compares each step's discounted return with
# those of all steps of its group (GRPO's "process supervision"). There is no critic and no λ, but GRPO must play
# whole episodes from one start.

# %%
policy = make_mlp(4, output_scale=0.01)
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))
GROUP = 16


def loss(params, episodes, advantages):
    log_odds = policy.apply(params, episodes.observations)
    old = action_logprobs(episodes.log_odds, episodes.actions)
    value, seen = grpo_loss(
        action_logprobs(log_odds, episodes.actions),
        old,
        advantages,
        episodes.mask,
        aggregation="token",
        kl=KLPenalty(0.01),
        ref_logprobs=old,
        entropy=action_entropy(log_odds),
        entropy_coef=0.01,
    )
    return value, seen.clip_high.value() + seen.clip_low.value()


def iterate(state, key):
    params, _ = state
    start, act, test = jax.random.split(key, 3)
    greedy = play_greedily(lambda x: policy.apply(params, x), reset(test, 32))
    same = jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), reset(start, 1))
    episodes = play_episodes(lambda x: policy.apply(params, x), same, act)  # [T, G], time first
    alive = episodes.mask.T[None]  # [P, G, T]
    returns = discounted_returns(alive.astype(jnp.float32), gamma=0.994, mask=alive)
    advantages = normalised_returns(returns, mask=alive)
    dead = groups_without_signal(
        alive.sum(axis=2, dtype=jnp.float32)
    )  # all episodes lasted equally long
    advantages = jnp.where(dead[:, None, None], 0, advantages)[0].T

    def update(state, _):
        params, opt_state = state
        gradient, clipped = jax.grad(loss, has_aux=True)(params, episodes, advantages)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, updates), opt_state), clipped

    state, clipped = jax.lax.scan(update, state, length=10)
    return state, (greedy["episode_return"].mean(), clipped[-1], episodes.mask.sum())


keys = jax.random.split(jax.random.key(0), 41)
params = policy.init(keys[0])
_, curves = jax.jit(lambda *x: jax.lax.scan(iterate, *x))(
    (params, optimizer.init(params)), keys[1:]
)
length, clipped, steps = map(np.asarray, curves)

# %% tags=["learned"]
print(f"steps upright: {length[0]:.0f} before, {length.max():.0f} at best, of 500")
assert length[0] < 150 and length.max() > 400

figure, axes = plt.subplots(
    1, 2, figsize=(8, 2.8), num="GRPO on CartPole: return and clipped share"
)
for axis, (title, curve) in zip(
    axes, {"steps upright, greedy": length, "share clipped": clipped}.items(), strict=True
):
    axis.plot((np.cumsum(steps) - steps) / 1000, curve)
    axis.set(title=title, xlabel="thousand steps played", ylim=(0, None))

# %% [markdown]
# With ten tuned seeds each, PPO and GRPO need as many steps on CartPole ([comparison.md](../comparison.md)). For a
# language policy a critic is expensive, and more answers are easy.
#
# ## Exercises
#
# 1. Compute by hand the advantages of the rewards 0, 0, 0, 1, and of 0, 0, 0, 100.
# 2. Make `GROUP` 2, and 64. Compare after the same number of steps.
#
# Paper: Shao and others, ["DeepSeekMath"](https://arxiv.org/abs/2402.03300), 2024. [Algorithms](../algorithms.md) has
# all choices of the loss.
