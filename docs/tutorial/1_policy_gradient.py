# %% [markdown]
# # 1. The policy gradient
#
# A policy samples an action and gets a reward. The reward has no gradient, because it may come from a person, a game
# or another program. This page estimates the gradient of the *expected* reward, checks the estimate, and measures its
# variance.
#
# The world is a **bandit** with four arms. Pulling arm `a` pays `PAYS[a]` on average, with noise. The policy is a
# softmax over four logits, and at first prefers the worst arm.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from grpo_jax.core.losses import grpo_loss

np.set_printoptions(precision=3, floatmode="fixed", suppress=True)
PAYS = jnp.array([1.0, 2.0, 3.0, 4.0])
NOISE = 0.5
start = jnp.array([1.5, 0.5, 0.0, 0.0])


def pull(logits, key, number):
    """Actions drawn from the policy, and their rewards."""
    draw, noise = jax.random.split(key)
    actions = jax.random.categorical(draw, logits, shape=(number,))
    return actions, PAYS[actions] + NOISE * jax.random.normal(noise, (number,))


def expected_reward(logits):
    return jax.nn.softmax(logits) @ PAYS


print("probabilities ", jax.nn.softmax(start))
print(f"expected reward {expected_reward(start):.3f}")

# %% [markdown]
# ## The log-derivative trick
#
# A learner knows only its own pulls, not `PAYS`. But the derivative of a probability is the probability times the
# derivative of its logarithm:
#
#     ∇ E[r] = Σ_a r(a) ∇π(a) = Σ_a π(a) · r(a) ∇log π(a) = E[r ∇log π]
#
# REINFORCE pulls, weighs `∇log π` of each action by its reward, and averages ([Williams,
# 1992](https://doi.org/10.1007/BF00992696)).

# %%
score = jax.vmap(
    jax.grad(lambda logits, action: jax.nn.log_softmax(logits)[action]), (None, 0)
)  # ∇log π(a)
truth = jax.grad(expected_reward)(start)
print(f"{'the true gradient':>22}", truth)

for number in (10, 1_000, 100_000):
    actions, rewards = pull(start, jax.random.key(0), number)
    estimate = jnp.mean(rewards[:, None] * score(start, actions), axis=0)
    print(f"{f'from {number:,} pulls':>22}", estimate)

assert jnp.allclose(estimate, truth, atol=0.03)

# %% [markdown]
# ## The same as a loss
#
# `grpo_loss` has exactly this gradient, with the opposite sign, if the trained policy chose the actions. A completion
# is a row of one token, and its advantage is the reward.

# %%


def loss(logits, actions, rewards):
    logprobs = jax.nn.log_softmax(logits)[actions][:, None]  # [rows, tokens]
    return grpo_loss(
        logprobs, jax.lax.stop_gradient(logprobs), rewards, jnp.ones_like(logprobs, bool)
    )[0]


from_loss = -jax.grad(loss)(start, actions, rewards)
print("from grpo_loss", from_loss)
assert jnp.allclose(from_loss, estimate, atol=1e-5)

# %% [markdown]
# ## Its variance
#
# The estimate is right on average: it has no *bias*. But a single pull has a large variance. Now let every pull pay
# 10 more. The true gradient stays the same, because E[∇log π] = 0, but the single estimates vary much more.

# %%
actions, rewards = pull(start, jax.random.key(1), 20_000)
scores = score(start, actions)
variances = {}
for bonus in (0.0, 10.0):
    single = (rewards + bonus)[:, None] * scores
    variances[bonus] = float(single.var(axis=0).sum())
    print(
        f"bonus {bonus:4.0f}:  mean {single.mean(axis=0)}  "
        f"variance of one pull {variances[bonus]:6.2f}"
    )
print(f"squared length of the true gradient {float(truth @ truth):.3f}")

assert variances[10.0] > 20 * variances[0.0]

# %% [markdown]
# The mean over n pulls has 1/n of that variance, so four times the pulls halve the error. Twenty learners follow the
# gradient of 8 pulls per step, with and without the bonus.

# %%


def learn(key, bonus, rate=0.05, steps=150, pulls=8):
    """The expected reward before each step."""

    def step(logits, key):
        actions, rewards = pull(logits, key, pulls)
        return logits - rate * jax.grad(loss)(logits, actions, rewards + bonus), expected_reward(
            logits
        )

    return jax.lax.scan(step, start, jax.random.split(key, steps))[1]


keys = jax.random.split(jax.random.key(2), 20)
curves = {
    bonus: np.asarray(jax.jit(jax.vmap(learn, (0, None)))(keys, bonus)) for bonus in (0.0, 10.0)
}

figure, (left, right) = plt.subplots(
    1, 2, figsize=(8, 3), num="Error of the estimate; learning with a bonus and without"
)
sizes = np.array([2**k for k in range(2, 13)])
for bonus, style in ((0.0, "-"), (10.0, "--")):
    single = np.asarray((rewards + bonus)[:, None] * scores)
    means = [single[: 20_000 // n * n].reshape(-1, n, 4).mean(axis=1) for n in sizes]
    left.loglog(sizes, [np.sqrt(np.mean(np.sum((m - truth) ** 2, axis=-1))) for m in means], style)
    low, middle, high = np.quantile(curves[bonus], [0.1, 0.5, 0.9], axis=0)
    right.fill_between(range(len(middle)), low, high, alpha=0.2, linewidth=0)
    right.plot(middle, style, label=f"bonus {bonus:.0f}")
left.axhline(np.sqrt(truth @ truth), color="grey", linewidth=1, linestyle=":")
left.annotate("dotted: length of the true gradient", (4, 0.03), color="grey", fontsize=9)
left.set(title="error of the gradient", xlabel="pulls")
right.set(title="expected reward: median, 80 % of seeds", xlabel="step")
right.legend(loc="lower right")

ends = {bonus: curve[:, -1] for bonus, curve in curves.items()}
for bonus, end in ends.items():
    print(
        f"bonus {bonus:4.0f}:  after 150 steps the worst of 20 has {end.min():.1f}, "
        f"the best {end.max():.1f}"
    )
assert np.std(ends[10.0]) > 2 * np.std(ends[0.0])

# %% [markdown]
# With the bonus, any arm becomes likelier once it is pulled, so some learners stay with a poor arm. [Page
# 2](2_advantages.md) therefore *subtracts* a constant from the reward.
#
# ## Exercises
#
# 1. Which bonus gives the least variance at the start? Try -4 to 4. Why is it near minus the expected reward, and why
#    not exactly?
# 2. Take `pulls=64` and an eighth of the steps. Which run ends better, with and without the bonus?
