"""Choice of one token per row from its logits: temperature, top-k, top-p, min-p, and a two-level draw.

There are two distributions. The *policy's* is softmax(logits / temperature) over the allowed tokens: training uses
it. The *sampler's* is the policy's restricted by top-k, top-p and min-p: tokens are drawn from it. Axes: V vocabulary,
R rows, one per active completion.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_BLOCK = 128  # tokens per block of the two-level draw: 64 to 256 is fastest for V from 4k to 152k


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. Hashable: each distinct value compiles its own sampler."""

    group_size: int  # G, completions per prompt
    max_new_tokens: int  # T, maximum tokens of a completion
    # divides the logits; 0 takes the most likely token (log-probabilities are then at temperature 1)
    temperature: float = 1.0
    top_k: int = 0  # draw among the k most likely tokens; 0 for all
    # draw among the fewest most likely tokens with this share of the probability mass after top-k, including ties with
    # the last one; 1 for all
    top_p: float = 1.0
    min_p: float = 0.0  # draw among tokens at least this fraction as likely as the most likely one; 0 for all
    keep_mask: bool = False  # also return the candidates of each draw; needs top_k, which bounds their number

    def __post_init__(self):
        """Raise a ValueError that names a field outside its range."""
        rules = {
            "group_size": (self.group_size >= 1, "at least 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "finite and at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "keep_mask": (not self.keep_mask or self.top_k > 0, "False without top_k"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")

    @property
    def restricted(self) -> bool:
        """Return whether top-k, top-p or min-p is in use; policy and sampler log-probabilities then differ."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Choice(NamedTuple):
    """A token per row, int32 [R], and its log-probabilities under policy and sampler, float32 [R].

    `kept`, int32 [R, top_k], are the candidates of the draw, -1 for excluded ones; None without keep_mask.
    """

    tokens: jax.Array
    logprobs: jax.Array
    sampler_logprobs: jax.Array
    kept: jax.Array | None = None


def choose_tokens(
    logits: jax.Array, keys: jax.Array, params: SamplingParams, allowed_tokens: jax.Array | np.ndarray | None = None
) -> Choice:
    """Draw one token per row.

    Args:
        logits: [V, R], any floating dtype. The vocabulary comes first as in the head's weights [V, D]: a product with
            few rows then needs no transposition, which takes a third less time on CPU.
        keys: Typed PRNG keys [R], one per row: a row's token depends only on its own logits and key.
        params: Temperature and restrictions; top-k applies first, then top-p on the rest, then min-p.
        allowed_tokens: bool [V], or bool [V, R] per row: the tokens that may be chosen; None for every token.
    """
    logits = logits.astype(jnp.float32)
    if allowed_tokens is not None:
        here = allowed_tokens[:, None] if allowed_tokens.ndim == 1 else allowed_tokens
        logits = jnp.where(here, logits, -jnp.inf)
    if params.temperature == 0:
        tokens = jnp.argmax(logits, axis=0).astype(jnp.int32)
        logprobs = _take(logits, tokens) - jax.nn.logsumexp(logits, axis=0)
        return Choice(tokens, logprobs, jnp.zeros_like(logprobs))
    logits, kept = logits / params.temperature, None
    if params.top_k:
        values, ids = (part.T for part in lax.top_k(logits.T, min(params.top_k, logits.shape[0])))
        survivors = _restrict_sorted(values, params)
        index, survivor_mass = _draw(survivors, keys)
        tokens = _take(ids, index)
        if params.keep_mask:
            kept = jnp.where(survivors > -jnp.inf, ids, -1).T
    else:
        tokens, survivor_mass = _draw(_restrict(logits, params), keys)
    chosen = _take(logits, tokens)
    policy_mass = jax.nn.logsumexp(logits, axis=0) if params.restricted else survivor_mass
    return Choice(tokens, chosen - policy_mass, chosen - survivor_mass, kept)


def _take(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[None], axis=0)[0]


def _restrict_sorted(values: jax.Array, params: SamplingParams) -> jax.Array:
    """Apply top-p and min-p to logits [k, R] in descending order; excluded logits become -inf."""
    if params.top_p < 1:
        probs = jax.nn.softmax(values, axis=0)
        values = jnp.where(jnp.cumsum(probs, axis=0) - probs < params.top_p, values, -jnp.inf)
    return _apply_min_p(values, params.min_p)


def _restrict(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Apply top-p and min-p to logits [V, R] in any order; excluded logits become -inf."""
    if params.top_p < 1:
        probs = jnp.exp(logits - jnp.max(logits, axis=0))
        logits = jnp.where(probs >= _nucleus_threshold(probs, params.top_p), logits, -jnp.inf)
    return _apply_min_p(logits, params.min_p)


def _apply_min_p(logits: jax.Array, min_p: float) -> jax.Array:
    if min_p == 0:
        return logits
    return jnp.where(logits >= jnp.max(logits, axis=0) + math.log(min_p), logits, -jnp.inf)


def _nucleus_threshold(probs: jax.Array, top_p: float) -> jax.Array:
    """Return the largest threshold [R] such that the entries of probs [V, R] at or above it hold top_p of the mass.

    The bit patterns of non-negative float32 numbers have the order of the numbers, so 30 bisection steps find the
    exact threshold. That costs a fiftieth of sorting a vocabulary. The comparison uses the excluded mass, which is
    the smaller and so the more exact sum near top_p = 1. Entries are at most 1.
    """
    spare = (1 - top_p) * jnp.sum(probs, axis=0)

    def halve(_, bounds):
        enough, too_few = bounds
        middle = enough + (too_few - enough) // 2
        threshold = lax.bitcast_convert_type(middle, jnp.float32)
        holds = jnp.sum(jnp.where(probs < threshold, probs, 0.0), axis=0) <= spare
        return jnp.where(holds, middle, enough), jnp.where(holds, too_few, middle)

    above_one = int(np.float32(1).view(np.int32)) + 1  # < 2**30, so 30 halvings leave one candidate
    bounds = (jnp.zeros_like(spare, jnp.int32), jnp.full_like(spare, above_one, jnp.int32))
    return lax.bitcast_convert_type(lax.fori_loop(0, 30, halve, bounds)[0], jnp.float32)


def _draw(logits: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw an index from softmax(logits) per row: [n, R], keys [R] → int32 [R] and the logsumexp [R].

    The draw has two levels: a block of tokens by its mass, then a token of the block. The distribution is that of one
    Gumbel variable per token, with n / 128 + 128 random numbers instead of n.
    """
    n, rows = logits.shape
    blocks = -(-n // _BLOCK)
    logits = jnp.pad(logits, ((0, blocks * _BLOCK - n), (0, 0)), constant_values=-jnp.inf)
    logits = logits.reshape(blocks, _BLOCK, rows)
    block_mass = jax.nn.logsumexp(logits, axis=1)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (blocks + _BLOCK,)), out_axes=1)(keys)
    block = jnp.argmax(block_mass + noise[:blocks], axis=0)
    logits = jnp.take_along_axis(logits, block[None, None], axis=0)[0]
    within = jnp.argmax(logits + noise[blocks:], axis=0)
    return (block * _BLOCK + within).astype(jnp.int32), jax.nn.logsumexp(block_mass, axis=0)
