"""The cases of oracle.py whose oracle is rlax or optax; rlax takes one unmasked trajectory at a time."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from oracles.oracle import Case, Compared

with warnings.catch_warnings():  # its dependencies use names that jax has deprecated
    warnings.simplefilter("ignore")
    import rlax

from grpo_jax.core.kl import KLPenalty
from grpo_jax.core.losses import grpo_loss, sft_loss
from grpo_jax.core.ppo import ppo_loss, value_loss
from grpo_jax.core.returns import discounted_returns, gae_advantages
from grpo_jax.core.surrogates import CappedWeight

STEPS, ACTIONS, ROWS = 7, 5, 4


def trajectory(random):
    """One trajectory, with terminations (gamma 0), boundaries, and the steps that exist of it."""
    return {
        "rewards": random.normal(size=STEPS),
        "values": random.normal(size=STEPS + 1),
        "gamma": random.uniform(0.5, 1, STEPS) * (random.random(STEPS) > 0.2),
        "gae_lambda": random.uniform(0, 1, STEPS),
        "boundary": random.random(STEPS) < 0.3,
        "exists": np.sort(random.permutation(STEPS)[: STEPS - 3]),
    }


def decisions(random):
    """Rows of steps: logits, the actions taken, and an advantage and a return for each step."""
    shape = (ROWS, STEPS)
    logits = random.normal(size=(*shape, ACTIONS))
    actions = random.integers(0, ACTIONS, shape)
    logprobs, _ = of_actions(logits, actions)
    return {
        "logits": logits,
        "actions": actions,
        "logprobs": np.asarray(logprobs),
        "old": logprobs + 0.4 * random.normal(size=shape),
        "advantages": random.normal(size=shape),
        "values": random.normal(size=shape),
        "old_values": random.normal(size=shape),
        "returns": random.normal(size=shape),
        "mask": random.random(shape) > 0.3,
    }


def policies(random):
    """A policy and its reference, over a few actions."""
    return {"logits": random.normal(size=ACTIONS), "reference": jax.nn.log_softmax(random.normal(size=ACTIONS))}


def of_actions(logits, actions):
    """Log-probabilities of the actions, and entropies."""
    logs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logs, actions[..., None], -1)[..., 0], -(jnp.exp(logs) * logs).sum(-1)


def rounded(parts, dtype):
    """The floating parts in another type."""
    arrays = {name: np.asarray(part) for name, part in parts.items()}
    return {name: part.astype(dtype) if part.dtype.kind == "f" else part for name, part in arrays.items()}


def with_slopes(function, names):
    """parts → (value, gradients of its weighted sum with respect to the named parts, one after the other)."""

    @jax.jit
    def evaluate(parts):
        def total(chosen):
            value = function(parts | chosen)
            return (value * jnp.linspace(0.5, 1.5, value.size, dtype=value.dtype).reshape(value.shape)).sum(), value

        slopes, value = jax.grad(total, has_aux=True)({name: parts[name] for name in names})
        return value, jnp.concatenate([slopes[name].ravel() for name in names])

    return evaluate


def case(function, setting, oracle, inputs, names, ours, theirs):
    """Both sides as functions of the same parts; the gradient is taken with respect to those named."""
    our_side, their_side = with_slopes(ours, names), with_slopes(theirs, names)

    def run(seed, dtype):
        parts = rounded(inputs(np.random.default_rng(seed)), dtype)
        value, gradient = our_side(parts)
        with warnings.catch_warnings():  # rlax calls what it has deprecated itself
            warnings.simplefilter("ignore", PendingDeprecationWarning)
            expected, slope = their_side(rounded(parts, np.float64))
        return Compared((value, expected), (gradient, slope))

    return Case(function, setting, oracle, run)


def gae_case(setting, ours, theirs):
    """`ours` are the options of gae_advantages, `theirs` (discounts, traces) of rlax; functions of the parts."""
    return case(
        "gae_advantages", setting, "rlax.truncated_generalized_advantage_estimation", trajectory,
        ("rewards", "values"),
        lambda p: gae_advantages(p["rewards"], p["values"], **ours(p)),
        lambda p: rlax.truncated_generalized_advantage_estimation(
            p["rewards"], *(jnp.broadcast_to(x, STEPS) for x in theirs(p)), p["values"]
        ),
    )  # fmt: skip


def gae_of_existing(parts):
    """Steps under the mask are passed over: rlax is given the others alone."""
    keep = parts["exists"]
    states = jnp.append(keep, STEPS)
    advantages = rlax.truncated_generalized_advantage_estimation(
        parts["rewards"][keep], parts["gamma"][keep], 0.9, parts["values"][states]
    )
    return jnp.zeros(STEPS, advantages.dtype).at[keep].set(advantages)


def returns_cases():
    """Cases along time."""
    name = "discounted_returns", "rlax.discounted_returns"
    yield case(
        name[0], "one gamma", name[1], trajectory, ("rewards",),
        lambda p: discounted_returns(p["rewards"], gamma=0.9),
        lambda p: rlax.discounted_returns(p["rewards"], jnp.full(STEPS, 0.9), 0.0),
    )  # fmt: skip
    yield case(
        name[0], "terminations", name[1], trajectory, ("rewards",),
        lambda p: discounted_returns(p["rewards"], gamma=p["gamma"]),
        lambda p: rlax.discounted_returns(p["rewards"], p["gamma"], 0.0),
    )  # fmt: skip
    yield gae_case("one gamma and lambda", lambda p: {"gamma": 0.9, "gae_lambda": 0.8}, lambda p: (0.9, 0.8))
    yield gae_case("terminations", lambda p: {"gamma": p["gamma"], "gae_lambda": 0.8}, lambda p: (p["gamma"], 0.8))
    yield gae_case(
        "lambda per step", lambda p: {"gamma": 0.9, "gae_lambda": p["gae_lambda"]}, lambda p: (0.9, p["gae_lambda"])
    )
    yield gae_case(  # to rlax a boundary is a gae_lambda of 0
        "boundaries",
        lambda p: {"gamma": 0.9, "gae_lambda": 0.8, "boundary": p["boundary"]},
        lambda p: (0.9, 0.8 * ~p["boundary"]),
    )
    yield case(
        "gae_advantages", "mask", "rlax.truncated_generalized_advantage_estimation", trajectory,
        ("rewards", "values"),
        lambda p: gae_advantages(
            p["rewards"], p["values"], gamma=p["gamma"], gae_lambda=0.9,
            mask=jnp.zeros(STEPS, bool).at[p["exists"]].set(True),
        ),
        gae_of_existing,
    )  # fmt: skip
    yield case(
        "gae_advantages + values", "targets", "rlax.lambda_returns", trajectory, ("rewards", "values"),
        lambda p: gae_advantages(p["rewards"], p["values"], gamma=p["gamma"], gae_lambda=p["gae_lambda"])
        + p["values"][:-1],
        lambda p: rlax.lambda_returns(p["rewards"], p["gamma"], p["values"][1:], p["gae_lambda"]),
    )  # fmt: skip


def over_mask(loss, parts):
    """rlax takes the mean over all places: of advantages that are 0 under the mask, made a mean over the rest."""
    mask = parts["mask"].ravel()
    return loss(jnp.where(mask, parts["advantages"].ravel(), 0)) * mask.size / mask.sum()


def flat_ratio(parts, logprobs):
    return jnp.exp(logprobs.ravel() - parts["old"].ravel())


def ppo_from_logits(parts):
    logprobs, entropy = of_actions(parts["logits"], parts["actions"])
    return ppo_loss(
        logprobs, parts["old"], parts["advantages"], parts["mask"], entropy=entropy, entropy_coef=0.1
    )[0]  # fmt: skip


def rlax_ppo_from_logits(parts):
    flat, mask = parts["logits"].reshape(-1, ACTIONS), parts["mask"].ravel()
    ratio = flat_ratio(parts, rlax.softmax().logprob(parts["actions"].ravel(), flat))
    loss = over_mask(lambda a: rlax.clipped_surrogate_pg_loss(ratio, a, 0.2), parts)
    return loss + 0.1 * rlax.entropy_loss(flat, mask.astype(flat.dtype)) * mask.size / mask.sum()


def cispo_from_logits(parts):
    logprobs, _ = of_actions(parts["logits"], parts["actions"])
    options = {"surrogate": CappedWeight(1.5), "aggregation": "token"}
    return grpo_loss(logprobs, parts["old"], parts["advantages"], parts["mask"], **options)[0]


def rlax_cispo_from_logits(parts):
    """CISPO is a policy gradient with given weights."""
    flat, actions = parts["logits"].reshape(-1, ACTIONS), parts["actions"].ravel()
    ratio = flat_ratio(parts, rlax.softmax().logprob(actions, flat))
    weights = jax.lax.stop_gradient(jnp.minimum(ratio, 1.5))
    return over_mask(lambda a: rlax.policy_gradient_loss(flat, actions, a, weights), parts)


def squared_errors(clip):
    """optax's half squared error; with a clip the larger of two."""

    def loss(parts):
        errors = optax.l2_loss(parts["values"], parts["returns"])
        if clip is not None:
            bounded = parts["old_values"] + jnp.clip(parts["values"] - parts["old_values"], -clip, clip)
            errors = jnp.maximum(errors, optax.l2_loss(bounded, parts["returns"]))
        return jnp.mean(errors, where=parts["mask"])

    return loss


def loss_cases():
    """Losses of actions and values."""
    yield case(
        "ppo_loss", "clip 0.3", "rlax.clipped_surrogate_pg_loss", decisions, ("logprobs",),
        lambda p: ppo_loss(p["logprobs"], p["old"], p["advantages"], p["mask"], clip_low=0.3, clip_high=0.3)[0],
        lambda p: over_mask(
            lambda a: rlax.clipped_surrogate_pg_loss(flat_ratio(p, p["logprobs"]), a, 0.3), p
        ),
    )  # fmt: skip
    yield case(
        "ppo_loss", "entropy bonus, from logits", "rlax.clipped_surrogate_pg_loss, entropy_loss", decisions,
        ("logits",), ppo_from_logits, rlax_ppo_from_logits,
    )  # fmt: skip
    yield case(
        "grpo_loss, cispo", "from logits", "rlax.policy_gradient_loss", decisions, ("logits",),
        cispo_from_logits, rlax_cispo_from_logits,
    )  # fmt: skip
    for clip in (None, 0.2):
        yield case(
            "value_loss", f"clip {clip}", "optax.l2_loss", decisions, ("values",),
            lambda p, c=clip: value_loss(p["values"], p["old_values"], p["returns"], p["mask"], clip=c)[0],
            squared_errors(clip),
        )  # fmt: skip
    yield case(
        "sft_loss", "from logits", "optax.softmax_cross_entropy_with_integer_labels", decisions, ("logits",),
        lambda p: sft_loss(of_actions(p["logits"], p["actions"])[0], p["mask"])[0],
        lambda p: jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(p["logits"], p["actions"]), where=p["mask"]
        ),
    )  # fmt: skip


def expected_penalty(**choices):
    """The penalty of every action, weighed by its probability: the expectation over what is drawn, exactly.

    The probabilities are constants to the gradient, as they are where actions were drawn: the estimator itself has
    to carry the slope.
    """

    def ours(parts):
        logs = jax.nn.log_softmax(parts["logits"])
        still = jax.lax.stop_gradient(logs)
        return jnp.sum(jnp.exp(still) * KLPenalty(1.0, **choices).per_token(logs, still, parts["reference"]))

    name = " ".join([choices["estimator"], *(key.replace("_", " ") for key in choices if key != "estimator")])
    return case(
        "KLPenalty", f"{name}, expectation", "rlax.softmax().kl", policies, ("logits",), ours,
        lambda p: rlax.softmax().kl(p["logits"], p["reference"]),
    )  # fmt: skip


CASES = [
    *returns_cases(),
    *loss_cases(),
    expected_penalty(estimator="k1", corrected=True),
    expected_penalty(estimator="k3", corrected=True),
    expected_penalty(estimator="k1", straight_through=True),
    expected_penalty(estimator="k3", straight_through=True),
]
