"""The cases of oracle.py whose oracle is TRL: every preset, in every setting that both support."""

import jax
import numpy as np
import torch
from oracles.oracle import Case, Compared, policy_batch
from oracles.oracle_trl import double, tensor, trl_loss, trl_scored
from support.compiled import compiled
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

from grpo_jax.core.advantages import gdpo_advantages, group_advantages, leave_one_out_advantages, sum_rewards
from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.core.losses import PRESETS, KLPenalty, grpo_loss, loss_normaliser
from grpo_jax.core.surrogates import CappedWeight, Clip, SoftGate

# How TRL is told to do what our presets do.
TRL_PRESETS = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "gspo": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4,
    },
    "luspo": {
        "loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3,
    },
    "gmpo": {"kind": GMPOTrainer, "epsilon_low": 0.4, "epsilon_high": 0.4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
}  # fmt: skip
RARE = ("luspo", "gmpo", "vespo")  # in fewer settings
CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo")
BONUS = {"entropy_coef": 0.2, "_entropy_bonus_enabled": True}
LOSS, SCORES = "GRPOTrainer._compute_loss", "GRPOTrainer._generate_and_score_completions"


@compiled
def slopes(logprobs, entropy, *batch, entropy_mask, **options):
    """((value, metrics), gradients of log-probabilities and entropies)."""

    def loss(logprobs, entropy):
        return grpo_loss(logprobs, *batch, entropy=entropy * entropy_mask, **options)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(logprobs, entropy)


def our_loss(parts, choices, *, entropy_mask=1, **options):
    """(value, gradients of log-probabilities and entropies, metrics)."""
    arguments = (parts[name] for name in ("logprobs", "entropy", "old", "advantages", "mask"))
    options = {"ref_logprobs": parts["ref"]} | choices | options
    (value, metrics), gradients = slopes(*arguments, entropy_mask=entropy_mask, **options)
    return value, np.stack([np.asarray(g, np.float64) for g in gradients]), metrics


def loss_case(preset, setting, ours=None, theirs=None, change=lambda parts: parts):
    """`ours` and `theirs` are added to the preset's choices; `change` is applied to the batch."""

    def run(seed, dtype):
        parts = change(policy_batch(seed, dtype))
        value, gradient, _ = our_loss(parts, PRESETS[preset] | (ours or {}))
        expected, slope, _ = trl_loss(parts, **TRL_PRESETS[preset] | (theirs or {}))
        return Compared((value, expected), (gradient, slope))

    return Case(f"grpo_loss, {preset}", setting, LOSS, run)


def per_token_advantages(parts):
    """One advantage for each token, as PPO has them."""
    slope = np.linspace(0.5, 2, parts["mask"].shape[1]).astype(parts["advantages"].dtype)
    return parts | {"advantages": parts["advantages"][:, None] * slope}


def on_policy(parts):
    """The policy that drew the tokens is the one that is trained."""
    return parts | {"old": parts["logprobs"]}


def micro_batches(preset):
    """Two micro-batches of unequal numbers of tokens, each with the whole update's denominator."""

    def run(seed, dtype):
        parts = policy_batch(seed, dtype)
        whole = loss_normaliser(parts["mask"], PRESETS[preset]["aggregation"], dtype=dtype)
        halves = [{name: part[half] for name, part in parts.items()} for half in (slice(0, 3), slice(3, 6))]
        options = {"current_gradient_accumulation_steps": 2, "args": {"steps_per_generation": 2}}
        ours, theirs = [], []
        for half in halves:
            # TRL's BNPO divides by the tokens of a micro-batch; the others by what belongs to the update.
            own = loss_normaliser(half["mask"], "token", dtype=dtype)
            normaliser = own._replace(loss=2 * own.loss) if preset == "bnpo" else whole
            ours.append(our_loss(half, PRESETS[preset], normaliser=normaliser))
            theirs.append(trl_loss(half | {"tokens": parts["mask"].sum()}, **TRL_PRESETS[preset] | options))
        value, expected = (sum(part[0] for part in side) for side in (ours, theirs))
        gradient, slope = (np.concatenate([part[1] for part in side], axis=1) for side in (ours, theirs))
        return Compared((value, expected), (gradient, slope))

    setting = "its own micro-batches" if preset == "bnpo" else "two micro-batches"
    return Case(f"grpo_loss, {preset}", setting, LOSS, run)


def metrics_case(preset):
    """What is logged: KL, entropy, and the clipped shares where the ratio is the token's."""

    def run(seed, dtype):
        parts = policy_batch(seed, dtype)
        _, _, ours = our_loss(parts, PRESETS[preset], kl=KLPenalty(0.3), entropy_coef=0.2)
        _, _, theirs = trl_loss(parts, beta=0.3, **BONUS, **TRL_PRESETS[preset])
        names = {"kl": "kl", "entropy": "entropy"}
        if preset in (*CLIPPED, "gmpo") and preset != "gspo":
            names |= {"clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean"}
        return Compared(
            (np.array([getattr(ours, name).value() for name in names]), np.array([theirs[n] for n in names.values()]))
        )

    return Case(f"GRPOMetrics, {preset}", "KL, entropy, clipped shares", LOSS, run)


def loss_cases():
    """Every preset in every setting."""
    for preset in TRL_PRESETS:
        yield loss_case(preset, "plain")
        yield loss_case(preset, "on policy", change=on_policy)
        yield loss_case(preset, "KL", {"kl": KLPenalty(0.3)}, {"beta": 0.3})
        yield micro_batches(preset)
        yield metrics_case(preset)
        if preset in RARE:
            continue
        if preset != "gspo":  # ours is GSPO-token there: each token's own gradient; TRL's pulls all of the row
            yield loss_case(preset, "advantages per token", change=per_token_advantages)
        yield loss_case(preset, "entropy bonus", {"entropy_coef": 0.2}, BONUS)
        if preset != "gspo":  # TRL corrects by the row's ratio there, we by the token's
            yield loss_case(
                preset,
                "KL corrected, entropy bonus",
                {"kl": KLPenalty(0.3, corrected=True), "entropy_coef": 0.2},
                {"beta": 0.3, "args": {"use_bias_correction_kl": True}} | BONUS,
            )
        if preset in CLIPPED:
            for low, high in ((0.1, 0.4), (0.4, 0.1), (0.0, 0.0)):
                bounds = {"epsilon_low": low, "epsilon_high": high}
                yield loss_case(preset, f"clip {low} {high}", {"surrogate": Clip(low, high)}, bounds)
            # Below 1 + high TRL's delta also bounds the other branch; from there on both mean the same.
            for dual in (1.3, 2.0):
                bounds = {"epsilon_high": 0.2, "epsilon_low": 0.2, "args": {"delta": dual}}
                yield loss_case(preset, f"dual clip {dual}", {"surrogate": Clip(dual=dual)}, bounds)
    for cap in (1.1, 1.5):
        yield loss_case("cispo", f"cap {cap}", {"surrogate": CappedWeight(cap)}, {"epsilon_high": cap})
    gates = {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0}
    yield loss_case("sapo", "gates 0.5 2.0", {"surrogate": SoftGate(0.5, 2.0)}, {"args": gates})
    row = {"importance_sampling_level": "sequence"}
    for preset in ("dr_grpo", "dapo", "cispo", "sapo"):
        yield loss_case(preset, "row ratio", {"ratio": "sequence"}, row)


def random_rewards(seed, dtype, objectives=1, missing=False, shape=(4, 6)):
    """Rewards in steps of 1/4, so that ties are common; the second group's are all equal."""
    random = np.random.default_rng(seed)
    rewards = random.integers(-8, 9, (*shape, objectives)) / 4
    rewards[1] = rewards[1, :1]
    if missing:
        rewards[random.random(rewards.shape) < 0.2] = np.nan
        rewards[2, 0] = np.nan  # judged by nobody
        rewards[3, 1:] = np.nan  # one left: nothing to compare it with
    return rewards.astype(dtype)


def advantage_case(function, setting, ours, theirs, *, objectives=1, missing=False, oracle=SCORES):
    """Advantages of random rewards."""

    def run(seed, dtype):
        rewards = random_rewards(seed, dtype, objectives, missing)
        return Compared((jax.jit(ours)(rewards), trl_scored(rewards, **theirs)["advantages"]))

    return Case(function, setting + (", missing rewards" if missing else ""), oracle, run)


def advantage_cases():
    """Group, GDPO and leave-one-out advantages."""
    uneven = (2.0, -0.5, 0.25)
    gdpo = {"multi_objective_aggregation": "normalize_then_sum"}
    yield advantage_case(
        "group_advantages of sum_rewards", "weights", lambda r: group_advantages(sum_rewards(r, weights=uneven)),
        {"weights": uneven}, objectives=3,
    )  # fmt: skip
    for missing in (False, True):
        for scale in ("group", "batch", "none"):
            yield advantage_case(
                "group_advantages", f"scale {scale}", lambda r, s=scale: group_advantages(r[..., 0], scale=s),
                {"scale_rewards": scale}, missing=missing,
            )  # fmt: skip
        for name, weights in (("equal weights", (1.0, 1.0, 1.0)), ("weights", uneven)):
            yield advantage_case(
                "gdpo_advantages", name, lambda r, w=weights: gdpo_advantages(r, weights=w),
                gdpo | {"weights": weights}, objectives=3, missing=missing,
            )  # fmt: skip
        yield advantage_case(
            "leave_one_out_advantages", "plain", lambda r: leave_one_out_advantages(r[..., 0]),
            {"kind": RLOOTrainer}, missing=missing, oracle="RLOOTrainer._generate_and_score_completions",
        )  # fmt: skip


def logprobs_case(temperature):
    """Log-probabilities and entropies of tokens, and their gradient with respect to states and head."""

    def run(seed, dtype):
        random = np.random.default_rng(seed)
        hidden, head = random.normal(size=(2, 5, 3)).astype(dtype), random.normal(size=(11, 3)).astype(dtype)
        tokens = random.integers(0, 11, (2, 5))
        pull = random.normal(size=(2, 2, 5)).astype(dtype)

        def total(hidden, head):
            outputs = token_logprobs(hidden, head, tokens, temperature=temperature, chunk_size=3)
            return sum((p * x).sum() for p, x in zip(pull, outputs, strict=True)), outputs

        (_, ours), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(hidden, head)
        with double():
            states, weights = tensor(hidden, requires_grad=True), tensor(head, requires_grad=True)
            logits = states @ weights.T
            theirs = selective_log_softmax_and_entropy(logits, tensor(tokens), temperature=temperature)
            sum((tensor(p) * x).sum() for p, x in zip(pull, theirs, strict=True)).backward()
        slopes = [states.grad.numpy().ravel(), weights.grad.numpy().ravel()]
        return Compared(
            (np.stack(ours), torch.stack(theirs).detach().numpy()),
            (np.concatenate([np.ravel(g) for g in gradients]), np.concatenate(slopes)),
        )

    return Case("token_logprobs", f"temperature {temperature}", "selective_log_softmax_and_entropy", run)


CASES = [*loss_cases(), *advantage_cases(), logprobs_case(1.0), logprobs_case(0.7)]
