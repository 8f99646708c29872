# %% [markdown]
# # 3. PPO and generalised advantages
#
# With several steps there are two questions. Which action was good? And can a batch be used more than once? PPO
# answers the first with a value function and GAE, the second with a clipped ratio. This page computes both on three
# numbers, then trains CartPole, where each step upright pays 1, up to 500.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from grpo_jax.cartpole.environment import play_greedily, play_steps, reset
from grpo_jax.cartpole.training import action_entropy, action_logprobs
from grpo_jax.core.masking import masked_whiten
from grpo_jax.core.ppo import explained_variance, ppo_loss, value_loss
from grpo_jax.core.returns import discounted_returns, gae_advantages
from grpo_jax.models.layers import make_mlp

np.set_printoptions(precision=4, floatmode="fixed", suppress=True)

# %% [markdown]
# ## Which action was good?
#
# An action gets credit for the rewards *after* it: the return R[t] = r[t] + γ R[t+1]. Its baseline is the value
# V(s[t]) of a second network, the critic. R - V is unbiased but noisy. The other extreme trusts the critic after one
# step:
#
#     δ[t] = r[t] + γ V(s[t+1]) - V(s[t])
#
# GAE interpolates between them: A[t] = δ[t] + γ λ A[t+1]. The code computes it by hand and by the library:

# %%
rewards, values = (
    jnp.array([1.0, 0.0, 2.0]),
    jnp.array([0.2, 0.5, 0.4, 0.0]),
)  # V after the end is 0
gamma, gae_lambda = 0.9, 0.8

following = 0.0
for t, expected in ((2, 1.6000), (1, 1.0120), (0, 1.9786)):
    delta = rewards[t] + gamma * values[t + 1] - values[t]
    following = delta + gamma * gae_lambda * following
    print(f"t = {t}:  δ = {delta:+.4f}  A = {following:+.4f}")
    assert abs(following - expected) < 5e-5
for gae_lambda in (0.0, 0.8, 1.0):
    print(f"λ = {gae_lambda}:", gae_advantages(rewards, values, gamma=gamma, gae_lambda=gae_lambda))
print("R - V:  ", discounted_returns(rewards, gamma=gamma) - values[:3])

# %% [markdown]
# ## Several updates per batch
#
# After the first update the policy is no longer the one that acted. The ratio ρ = π / π_old corrects for it, but only
# near the old policy. PPO stops the gain at a bound: min(ρ A, clip(ρ, 0.8, 1.2) A). The plot shows the objective.

# %%
ratios = jnp.linspace(0.5, 1.6, 111)


def objective(ratio, advantage):
    logprob = jnp.log(ratio)[None, None]
    return -ppo_loss(logprob, jnp.zeros((1, 1)), jnp.array([advantage]), jnp.ones((1, 1), bool))[0]


figure, axes = plt.subplots(
    1, 2, figsize=(8, 2.4), num="The clipped objective for a good and for a bad action"
)
for axis, advantage, colour in zip(axes, (1.0, -1.0), ("C2", "C1"), strict=True):
    axis.plot(
        ratios,
        advantage * ratios,
        ":",
        ratios,
        jax.vmap(objective, (0, None))(ratios, advantage),
        colour,
    )
    axis.set(title=f"A = {advantage:+.0f}", xlabel="ratio ρ")

slopes = jax.jit(jax.vmap(jax.grad(objective), (0, None)), static_argnums=1)
for advantage in (1.0, -1.0):
    print(
        f"A = {advantage:+.0f}: slopes at ρ = 0.7, 1.0 and 1.3 are",
        slopes(jnp.array([0.7, 1.0, 1.3]), advantage).round(),
    )
assert slopes(jnp.array([1.3]), 1.0) == 0 and slopes(jnp.array([1.3]), -1.0) == -1

# %% [markdown]
# A good action gets no gradient once it is 1.2 times as likely, a bad one once it is 0.8 times as likely. Because of
# the min, a bad action that became likelier (1.3) still gets one.
#
# ## CartPole
#
# Policy and critic are perceptrons with 64 hidden units. An iteration plays 128 steps of 32 carts, estimates
# advantages, and updates ten times on the same batch.

# %%
policy, critic = make_mlp(4, output_scale=0.01), make_mlp(4, output_scale=1.0)
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def judge(params, steps, gae_lambda=0.95, gamma=0.99):
    """Advantages and the critic's targets, [T, B]."""
    values, following = (
        critic.apply(params["value"], x) for x in (steps.observations, steps.next_observations)
    )
    discounts = jnp.where(steps.terminated, 0.0, gamma)  # nothing comes after a fall
    ends = steps.terminated | steps.truncated  # the next step is of another episode
    how = {
        "gamma": discounts.T,
        "gae_lambda": gae_lambda,
        "boundary": ends.T,
        "next_values": following.T,
    }
    advantages = gae_advantages(
        jnp.ones_like(values).T, values.T, **how
    ).T  # time is the last axis there
    return advantages, advantages + values


def loss(params, steps, advantages, targets):
    log_odds = policy.apply(params["policy"], steps.observations)
    everything = jnp.ones_like(steps.actions)
    new, old = (action_logprobs(odds, steps.actions) for odds in (log_odds, steps.log_odds))
    advantages, entropy = masked_whiten(advantages, everything), action_entropy(log_odds)
    policy_loss, seen = ppo_loss(
        new, old, advantages, everything, entropy=entropy, entropy_coef=0.01
    )
    values = critic.apply(params["value"], steps.observations)
    error, _ = value_loss(values, None, targets, everything, clip=None)
    return policy_loss + 0.5 * error, (
        seen.clip_high.value() + seen.clip_low.value(),
        explained_variance(values, targets, everything),
    )


def iterate(state, key):
    params, opt_state, carts = state
    act, test = jax.random.split(key)
    greedy = play_greedily(lambda x: policy.apply(params["policy"], x), reset(test, 32))
    carts, steps = play_steps(lambda x: policy.apply(params["policy"], x), carts, act, steps=128)
    advantages, targets = judge(params, steps)

    def update(state, _):
        params, opt_state = state
        gradient, seen = jax.grad(loss, has_aux=True)(params, steps, advantages, targets)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, updates), opt_state), seen

    (params, opt_state), (clipped, explained) = jax.lax.scan(update, (params, opt_state), length=10)
    return (params, opt_state, carts), (greedy["episode_return"].mean(), clipped[-1], explained[0])


keys = jax.random.split(jax.random.key(0), 33)
params = {"policy": policy.init(keys[0]), "value": critic.init(keys[1])}
state = (params, optimizer.init(params), jax.tree.map(jnp.asarray, reset(keys[2], 32)))
(params, _, carts), (length, clipped, explained) = jax.jit(lambda *x: jax.lax.scan(iterate, *x))(
    state, keys[3:]
)

# %% tags=["learned"]
print(f"steps upright: {length[0]:.0f} before, {length.max():.0f} at best, of 500")
assert length[0] < 150 and length.max() > 400

figure, axes = plt.subplots(
    1, 3, figsize=(9, 2.6), num="PPO on CartPole: return, clipped share, explained variance"
)
panels = {
    "steps upright, greedy": length,
    "share clipped, last pass": clipped,
    "explained variance of V": explained,
}
for axis, (title, curve) in zip(axes, panels.items(), strict=True):
    axis.plot(np.arange(len(curve)) * 128 * 32 / 1000, curve)
    axis.set(title=title, xlabel="thousand steps played", ylim=(min(0, float(curve.min())), None))

# %% [markdown]
# At first the critic explains nothing, so PPO's advantages are mostly noise. For a language policy the critic is a
# second large network, or a head. This is the effect of λ on one batch of the trained policy:

# %% tags=["learned"]
_, steps = play_steps(lambda x: policy.apply(params["policy"], x), carts, keys[0], steps=128)
spread = {
    gae_lambda: float(judge(params, steps, gae_lambda)[0].std())
    for gae_lambda in (0.0, 0.5, 0.95, 1.0)
}
print(
    "deviation of the advantages:",
    "  ".join(f"λ {gae_lambda}: {std:.2f}" for gae_lambda, std in spread.items()),
)
assert spread[0.0] < spread[0.95] < spread[1.0]

# %% [markdown]
# The whole algorithm is `python -m grpo_jax.cartpole --algorithm ppo`. [Page 4](4_grpo.md) removes the critic.
#
# ## Exercises
#
# 1. Do 40 passes instead of 10. What happens to the clipped share and the return? And without a clip
#    (`clip_high=1e9`)?
# 2. Set λ to 0 and to 1 in `judge`. Which one learns in 30 iterations, and why?
#
# Papers: Schulman and others, ["GAE"](https://arxiv.org/abs/1506.02438), 2016, and
# ["PPO"](https://arxiv.org/abs/1707.06347), 2017.
