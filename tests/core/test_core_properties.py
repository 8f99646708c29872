"""One table of the core's public functions, and the properties that all of them must have.

Properties of a single function are tested beside its loop, in the file of its module.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.core import advantages, kl, losses, ppo, returns, selection
from grpo_jax.core.advantages import Condition
from grpo_jax.core.kl import KLPenalty
from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.core.losses import PRESETS, FixedLength, grpo_loss, loss_normaliser
from grpo_jax.core.surrogates import SoftGate

pytestmark = pytest.mark.usefixtures("strict")

P, G, N, T = 3, 4, 2, 5  # all different: the axes of a result are known by their lengths
seeds = st.integers(0, 10_000)
# One preset for each surrogate, ratio and aggregation; test_losses.py has them all. Dr. GRPO takes its token budget
# from the arrays unless it is told: padding would change it.
CHOICES = {name: PRESETS[name] for name in ("grpo", "gspo", "gmpo", "cispo", "sapo", "vespo")}
CHOICES["dr_grpo"] = PRESETS["dr_grpo"] | {"aggregation": FixedLength(7)}


def batch(seed, dtype=np.float32):
    """Everything that the functions of the table read, under one mask; each row has a token."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.normal(size=shape)  # noqa: E731
    logprobs = -random.exponential(size=(P, G, T)) - 0.05
    rewards = random.integers(-8, 9, (P, G, N)) / 4
    rewards[random.random(rewards.shape) < 0.1] = np.nan
    floats = {
        "rewards": rewards,
        "logprobs": logprobs,
        "old": logprobs + 0.4 * normal(P, G, T),
        "ref": logprobs + 0.4 * normal(P, G, T),
        "sampler": logprobs + 0.4 * normal(P, G, T),
        "entropy": random.exponential(size=(P, G, T)),
        "advantages": normal(P, G),
        "scores": normal(P, G),
        "steps": normal(P, G, T),
        "values": normal(P, G, T + 1),
        "old_values": normal(P, G, T),
        "returns": normal(P, G, T),
    }
    others = {
        "mask": np.arange(T) < random.integers(1, T + 1, (P, G, 1)),
        "truncated": random.random((P, G)) < 0.3,
        "lengths": random.integers(1, 40, (P, G)).astype(np.int32),
    }
    return {name: part.astype(dtype) for name, part in floats.items()} | others


def policy_loss(choices, p, normaliser=None):
    """With everything switched on."""
    return grpo_loss(
        p["logprobs"], p["old"], p["advantages"], p["mask"], **choices, normaliser=normaliser,
        kl=KLPenalty(0.3, corrected=True), ref_logprobs=p["ref"], entropy=p["entropy"], entropy_coef=0.2,
        token_weights=selection.importance_weights(p["old"], p["sampler"], p["mask"], cap=1.3),
    )  # fmt: skip


def actor_loss(p, normaliser=None):
    return ppo.ppo_loss(
        p["logprobs"], p["old"], p["returns"], p["mask"], entropy=p["entropy"], entropy_coef=0.1, normaliser=normaliser
    )


# Losses also take the whole update's normaliser, of which they then give a part.
LOSSES = {
    **{f"grpo_loss {name}": functools.partial(policy_loss, choices) for name, choices in CHOICES.items()},
    "ppo_loss": actor_loss,
    "value_loss": lambda p, n=None: ppo.value_loss(
        p["values"][..., :-1], p["old_values"], p["returns"], p["mask"], normaliser=n
    ),
    "sft_loss": lambda p, n=None: losses.sft_loss(p["logprobs"], p["mask"], normaliser=n),
}
AGGREGATIONS = {f"grpo_loss {name}": choices["aggregation"] for name, choices in CHOICES.items()}

TABLE = {
    **{
        f"group_advantages {scale}": lambda p, s=scale: advantages.group_advantages(p["rewards"][..., 0], scale=s)
        for scale in ("group", "batch", "none")
    },
    **{
        f"batch_whitened_advantages {c}": lambda p, c=c: advantages.batch_whitened_advantages(
            p["rewards"][..., 0], centre=c
        )
        for c in ("batch", "group")
    },
    **{
        f"gdpo_advantages {whiten}": lambda p, w=whiten: advantages.gdpo_advantages(
            p["rewards"], weights=(0.5, 2.0), whiten=w, mask=p["mask"]
        )
        for whiten in ("sequence", "token", None)
    },
    "leave_one_out_advantages": lambda p: advantages.leave_one_out_advantages(p["rewards"][..., 0]),
    "raft_advantages": lambda p: advantages.raft_advantages(p["rewards"][..., 0]),
    "maxrl_advantages": lambda p: advantages.maxrl_advantages(abs(p["rewards"][..., 0])),
    "max_at_k_advantages": lambda p: advantages.max_at_k_advantages(p["rewards"][..., 0], k=2),
    "sum_rewards": lambda p: advantages.sum_rewards(p["rewards"], weights=(0.5, 2.0)),
    "condition_rewards": lambda p: advantages.condition_rewards(p["rewards"], [Condition(0, 1, 0.5)]),
    "groups_without_signal": lambda p: advantages.groups_without_signal(p["rewards"]),
    "groups_with_signal": lambda p: selection.groups_with_signal(p["rewards"]),
    "high_entropy_mask": lambda p: selection.high_entropy_mask(p["entropy"], p["mask"], share=0.37),
    "off_policy_mask": lambda p: selection.off_policy_mask(
        p["logprobs"], p["sampler"], p["advantages"], p["mask"], threshold=0.1
    ),
    "distillation_advantages": lambda p: advantages.distillation_advantages(p["ref"], p["logprobs"], p["mask"]),
    "optimal_token_advantages": lambda p: advantages.optimal_token_advantages(
        p["rewards"][..., 0], p["logprobs"], abs(p["entropy"]), p["mask"]
    ),
    "without_truncated": lambda p: selection.without_truncated(p["mask"], p["truncated"]),
    **{
        f"importance_weights {mode}": lambda p, mode=mode: selection.importance_weights(
            p["old"], p["sampler"], p["mask"], cap=1.3, mode=mode
        )
        for mode in selection.IMPORTANCE_MODES
    },
    "discounted_returns": lambda p: returns.discounted_returns(p["steps"], gamma=0.9, mask=p["mask"]),
    "gae_advantages": lambda p: returns.gae_advantages(
        p["steps"], p["values"], gamma=0.9, gae_lambda=0.8, mask=p["mask"]
    ),
    "normalised_returns": lambda p: returns.normalised_returns(p["steps"], mask=p["mask"]),
    "kl_penalised_rewards": lambda p: returns.kl_penalised_rewards(
        p["scores"], p["logprobs"], p["ref"], p["mask"], kl_coef=0.3
    ),
    "explained_variance": lambda p: ppo.explained_variance(p["old_values"], p["returns"], p["mask"]),
    "overlong_penalty": lambda p: returns.overlong_penalty(p["lengths"], limit=30, buffer=16),
    **{f"kl_divergence {e}": lambda p, e=e: kl.kl_divergence(p["logprobs"], p["ref"], estimator=e)
       for e in kl.ESTIMATORS},
    **LOSSES,
}  # fmt: skip
# Statistics of the whole batch: taking a prompt out changes what the others get.
COUPLED = ("batch", "high_entropy", "explained", "gdpo_advantages sequence", "gdpo_advantages token")
COUPLED += ("group_advantages batch",)
APART = [name for name in TABLE if not name.startswith(COUPLED) and name not in LOSSES]


def everything(parts):
    """The whole table at once: one compilation for each shape and type."""
    return {name: function(parts) for name, function in TABLE.items()}


QUICK = {"xla_backend_optimization_level": 0}  # these run a few times each: compiling is what takes long
RUN = jax.jit(everything, compiler_options=QUICK)


def assert_same(got, expected, rtol=1e-5, atol=1e-5):
    """Every number of two results of the table, the function named where they differ."""
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, wanted), found in zip(paths, jax.tree.leaves(got), strict=True):
        wanted, found = np.asarray(wanted), np.asarray(found)
        assert found.shape == wanted.shape, jax.tree_util.keystr(path)
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def test_the_table_holds_every_public_function():
    """A new function of the core comes with these properties, or says here why not."""
    # Checks of arguments, a step of several functions, and those of tests/turns/test_turn_advantages.py.
    not_arrays = {"check_choice", "check_shape", "as_objective_weights", "group_mean"}
    not_arrays |= {"last_turn", "turn_returns", "turn_advantages", "adapt_entropy_coef", "regularisers"}
    for module in (advantages, kl, losses, ppo, returns, selection):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_") and name not in not_arrays:
                assert any(key.split()[0] == name for key in TABLE), f"{module.__name__}.{name}"


def test_arrays_of_other_types_are_named():
    """Integers where numbers are read, and numbers where a mask is."""
    parts = batch(0) | {"rewards": np.zeros((P, G, N), np.float32)}
    whole = {name: part.astype(np.int32) if part.dtype == np.float32 else part for name, part in parts.items()}
    weighed = parts | {"mask": parts["mask"].astype(np.float32)}
    maskless = {"group_advantages", "batch_whitened_advantages", "leave_one_out_advantages", "sum_rewards"}
    maskless |= {"condition_rewards", "groups_without_signal", "groups_with_signal"}
    maskless |= {"raft_advantages", "maxrl_advantages", "max_at_k_advantages", "kl_divergence", "overlong_penalty"}
    for name, function in TABLE.items():
        if name not in ("overlong_penalty", "without_truncated"):
            with pytest.raises(TypeError, match="must be of a floating type, got int32"):
                jax.eval_shape(function, whole)
        if name.split()[0] not in maskless:
            with pytest.raises(TypeError, match="mask must be of type bool, got float32"):
                jax.eval_shape(function, weighed)


@settings(max_examples=10)
@given(seeds, st.permutations(range(P)), st.permutations(range(G)))
def test_order_of_prompts_and_completions(seed, prompts, group):
    parts = batch(seed)

    def moved(array):
        array = np.asarray(array)
        array = array[prompts] if array.shape[:1] == (P,) else array
        return array[:, group] if array.shape[:2] == (P, G) else array

    expected = jax.tree.map(moved, RUN(parts))
    assert_same(RUN({name: moved(part) for name, part in parts.items()}), expected)


@settings(max_examples=10)
@given(seeds)
def test_padding_with_undefined_numbers(seed):
    """One more prompt, completion and two more steps of NaN, under a mask that is False."""
    parts = batch(seed)
    wide = {}
    for name, part in parts.items():
        # The value after the last step stays the last; what is padded lies before it.
        last, body = (part[..., -1:], part[..., :-1]) if name == "values" else (part[..., :0], part)
        widths = [(0, 1), (0, 1), (0, 2 * (body.shape[-1] == T))][: part.ndim]
        filler = np.nan if part.dtype.kind == "f" else 0
        body = np.pad(body, widths, constant_values=filler)
        if name == "values":
            body = np.concatenate([body, np.pad(last, [(0, 1), (0, 1), (0, 0)], constant_values=np.nan)], axis=-1)
        wide[name] = body

    def cut(padded, plain):
        return np.asarray(padded)[tuple(slice(0, length) for length in plain.shape)]

    expected = RUN(parts)
    assert_same(jax.tree.map(cut, RUN(wide), expected), expected)


@settings(max_examples=5)
@given(seeds)
def test_low_precision_is_computed_in_float32(seed):
    low = {n: p.astype(jnp.bfloat16) if p.dtype == np.float32 else p for n, p in batch(seed).items()}
    high = {name: p.astype(np.float32) if p.dtype == jnp.bfloat16 else p for name, p in low.items()}
    got = RUN(low)
    assert all(leaf.dtype in (jnp.float32, jnp.bool_, jnp.int32) for leaf in jax.tree.leaves(got))
    assert_same(got, RUN(high), rtol=1e-6, atol=1e-6)


def test_double_precision_stays(x64):
    """Its numbers are those of the oracles."""
    got = jax.eval_shape(everything, batch(0, np.float64))
    narrow = {name for name in TABLE for leaf in jax.tree.leaves(got[name]) if leaf.dtype == jnp.float32}
    assert narrow == {"overlong_penalty"}  # of integers


def test_prompts_do_not_see_each_other():
    """Each has the same results among other prompts."""
    parts, others = batch(1), batch(3)
    whole = RUN(parts)
    for i in range(P):
        among = {key: np.copy(part) for key, part in others.items()}
        for key, part in parts.items():
            among[key][i] = part[i]
        got = RUN(among)
        assert_same({name: got[name][i] for name in APART}, {name: whole[name][i] for name in APART})
        assert not all(np.allclose(got[name], whole[name], equal_nan=True) for name in APART)


@functools.partial(jax.jit, compiler_options=QUICK)
def loss_slopes(parts, normalisers):
    """((loss, metrics), gradient of every floating part) of each loss of the table."""

    def value(function, normaliser, floats):
        return function(parts | floats, normaliser)

    floats = {name: part for name, part in parts.items() if part.dtype == jnp.float32}
    return {
        name: jax.value_and_grad(functools.partial(value, function, normalisers[name]), has_aux=True)(floats)
        for name, function in LOSSES.items()
    }


@settings(max_examples=10)
@given(seeds, st.permutations(range(P)))
def test_micro_batches_add_up(seed, order):
    """Losses and metrics are sums over parts, gradients those of the whole, whichever prompts go together."""
    parts = batch(seed)
    parts["rewards"] = np.nan_to_num(parts["rewards"])
    parts = {name: part[order] for name, part in parts.items()}
    whole = {name: loss_normaliser(parts["mask"], AGGREGATIONS.get(name, "token")) for name in LOSSES}
    expected = loss_slopes(parts, whole)
    pieces = [loss_slopes({key: part[i : i + 1] for key, part in parts.items()}, whole) for i in range(P)]
    joined = {
        name: (
            jax.tree.map(lambda *leaves: sum(leaves), *(piece[name][0] for piece in pieces)),
            jax.tree.map(lambda *leaves: np.concatenate(leaves), *(piece[name][1] for piece in pieces)),
        )
        for name in LOSSES
    }
    assert_same(joined, expected, rtol=1e-4, atol=1e-6)


def test_only_what_is_learned_gets_a_gradient():
    """Old and reference probabilities, advantages, targets and weights are constants to every loss."""
    parts = batch(2) | {"rewards": np.zeros((P, G, N), np.float32)}
    normalisers = {name: loss_normaliser(parts["mask"], AGGREGATIONS.get(name, "token")) for name in LOSSES}
    learned = {"value_loss": {"values"}, "sft_loss": {"logprobs"}}
    for name, (_, gradients) in loss_slopes(parts, normalisers).items():
        moving = {key for key, gradient in gradients.items() if (np.asarray(gradient) != 0).any()}
        assert moving == learned.get(name, {"logprobs", "entropy"}), name


R2, R3, M = np.zeros((2, 3), np.float32), np.zeros((2, 3, 2), np.float32), np.ones((2, 3), bool)
X = R2
LOSS = X, X, R2[:, 0], M


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advantages.group_advantages(R2[:, :1]), "at least 2 completions per prompt"),
        (lambda: advantages.gdpo_advantages(R3, weights=(1.0,)), r"weights must have shape \(2,\), got \(1,\)"),
        (lambda: advantages.gdpo_advantages(R3, whiten="token"), "mask must be given for whiten='token'"),
        (lambda: advantages.groups_without_signal(R2[0]), r"rewards must be \[P, G\] or \[P, G, N\]"),
        (lambda: advantages.condition_rewards(R3, [Condition(0, 0, 0.0)]), "cycle, got 0 -> 0"),
        (lambda: returns.discounted_returns(R2, gamma=1.1), r"gamma must be in \[0, 1\], got 1.1"),
        (lambda: returns.normalised_returns(R2[0], mask=M[0]), r"returns must be \[.., G, T\] .* got shape \(3,\)"),
        (lambda: KLPenalty(0.1, corrected=True, straight_through=True), "must not both be True"),
        (lambda: losses.CappedWeight(0.2), "cap is the largest weight itself and must be more than 1"),
        (lambda: grpo_loss(X, X[:1], R2[:, 0], M), r"old_logprobs must have .* \(2, 3\), got \(1, 3\)"),
        (lambda: grpo_loss(*LOSS, surrogate=SoftGate(), ratio="geometric"), "surrogate must be a Clip with ratio 'geo"),
        (lambda: grpo_loss(*LOSS, aggregation="mean"), "aggregation must be one of 'sequence'"),
        (lambda: grpo_loss(*LOSS, kl=KLPenalty(0.1)), "ref_logprobs must be given"),
        (lambda: grpo_loss(*LOSS, normaliser=2.0, entropy=X, entropy_coef=0.1), "normaliser must be a Normaliser when"),
        (lambda: returns.turn_returns(R3, M, gamma=1.0), "4 axes"),
        (lambda: ppo.value_loss(X, None, X, M), "old_values must be given with a clip, got None"),
        (lambda: token_logprobs(R3, R3[0], M.astype(int), temperature=-1.0), "temperature must be finite and at least"),
        (lambda: token_logprobs(R3, R3[0, :, :1], M.astype(int)), r"head must have shape \(3, 2\), got \(3, 1\)"),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
