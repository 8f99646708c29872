"""Log-probabilities and entropies of tokens from hidden states, without all logits in memory.

Logits of a whole batch, `[.., T, V]`, are usually the largest array of a training step. Here a scan takes
`chunk_size` tokens at a time, and a custom gradient recomputes their logits. Memory is that of one chunk's logits,
however many tokens there are.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.masking import as_mask, check_shape
from grpo_jax.core.products import narrow_outer
from grpo_jax.core.trie import NARROW, ROOT, Trie, children, first_children, walk


def token_logprobs(
    hidden: ArrayLike,
    head: ArrayLike,
    tokens: ArrayLike,
    *,
    temperature: float = 1.0,
    allowed_tokens: ArrayLike | tuple[Trie | None, ArrayLike] | None = None,
    softcap: float | None = None,
    chunk_size: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Compute the log-probability of each token and the entropy of its distribution.

        p = softmax(hidden · headᵀ / temperature) over the allowed tokens
        logprobs = log p[token],  entropy = -Σ_v p[v] log p[v]

    With a softcap, each logit z becomes cap · tanh(z / cap) before the division.

    Both are differentiable with respect to `hidden` and `head`. Products have `hidden`'s dtype and accumulate in at
    least float32. A token that is not allowed has log-probability -inf. A position whose cotangents are 0 (masked in
    the loss) adds exactly 0 to the gradients, even if its hidden state is not finite.

    Args:
        hidden: `[.., T, D]`, floating: the states that predict the tokens.
        head: `[V, D]`, floating: the unembedding.
        tokens: int `[.., T]`.
        temperature: divides the logits; 0 (greedy sampling) counts as 1.
        allowed_tokens: bool `[V]`; all by default. Or a trie and the node before each token, int `[.., T]`
            (`trie.walk`), whose children are allowed. Or None and the tokens that the sampler kept, int `[.., T, K]`,
            padded with -1. If no token is allowed, the log-probability is -inf and the entropy 0.
        softcap: cap of the logits (Gemma 2, arXiv:2408.00118); None for none.
        chunk_size: number of tokens whose logits are held at once.

    Returns:
        (logprobs, entropy), both `[.., T]`, float32 (float64 if `hidden` is).

    Raises:
        ValueError: shapes that do not fit, a negative or infinite temperature.
    """
    hidden, head, tokens = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be of an integer type, got {tokens.dtype}")
    check_shape("hidden", hidden, (*tokens.shape, hidden.shape[-1]))
    check_shape("head", head, (head.shape[0], hidden.shape[-1]))
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    if allowed_tokens is not None and not isinstance(allowed_tokens, tuple):
        allowed_tokens = as_mask("allowed_tokens", allowed_tokens, head.shape[:1])
    tokens = tokens.astype(jnp.int32)
    number = tokens.size
    chunks = max(1, -(-number // chunk_size))
    chunk = -(-number // chunks)
    padding = chunks * chunk - number

    def split(x: jax.Array) -> jax.Array:
        # A chunk takes every chunks-th token: if prompts are sharded, each device has its share of every chunk.
        x = jnp.pad(x.reshape(number, *x.shape[tokens.ndim :]), [(0, padding), *[(0, 0)] * (x.ndim - tokens.ndim)])
        return x.reshape(chunk, chunks, *x.shape[1:])

    allowed: Any = allowed_tokens
    if isinstance(allowed_tokens, tuple):
        allowed = allowed_tokens[0], split(jnp.asarray(allowed_tokens[1]))
    # The gradient is traced later; it uses the matmul precision of this call's context.
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue] made at run time
    scaling = float(temperature) or 1.0, softcap, precision
    outputs: Any = _chunked(split(hidden), head, split(tokens), allowed, scaling)
    logprobs, entropy = (x.reshape(-1)[:number].reshape(tokens.shape) for x in outputs)
    return logprobs, entropy


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Apply the softcap, cap · tanh(logits / cap), if there is one."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def wide(dtype) -> type[jnp.floating]:
    """Return the accumulation dtype of products of hidden states: float64 for float64, else float32."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _allowed_at(allowed, index, vocabulary):
    """Return one chunk's allowed tokens: None, bool [V], or bool [C, V] of its nodes' children or the kept tokens."""
    if not isinstance(allowed, tuple):
        return allowed
    trie, nodes = allowed[0], allowed[1][:, index]
    if trie is not None:
        return children(trie, nodes)
    places = jnp.where(nodes < 0, vocabulary, nodes)
    nothing = jnp.zeros((len(nodes), vocabulary), jnp.bool_)
    return nothing.at[jnp.arange(len(nodes))[:, None], places].set(True, mode="drop")


def _logits(hidden, head, allowed, scaling):
    temperature, softcap, precision = scaling
    logits = jnp.einsum("cd,vd->cv", hidden, head, precision=precision, preferred_element_type=wide(hidden.dtype))
    logits = capped(logits, softcap) / temperature
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(hidden, head, tokens, allowed, scaling):
    """hidden [C, n, D], head [V, D], tokens [C, n] → logprobs, entropy [C, n].

    `allowed` is bool [V], (trie, nodes [C, n]), (None, tokens [C, n, K]) or None.
    """
    return _forward(hidden, head, tokens, allowed, scaling)[0]


def _forward(hidden, head, tokens, allowed, scaling):
    weights = head.astype(hidden.dtype)

    def one(_, index):
        states, ids, here = hidden[:, index], tokens[:, index], _allowed_at(allowed, index, len(head))
        logits = _logits(states, weights, here, scaling)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        if isinstance(allowed, tuple):  # avoid the NaN of -inf - -inf if nothing is allowed
            normaliser = jnp.where(here.any(-1), normaliser, 0)
        chosen = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
        probabilities = jnp.exp(logits - normaliser[:, None])
        finite = logits if here is None else jnp.where(here, logits, 0)  # 0 · -inf is NaN
        entropy = normaliser - jnp.sum(probabilities * finite, axis=-1)
        return None, (chosen - normaliser, entropy, normaliser)

    outputs = jax.lax.scan(one, None, jnp.arange(tokens.shape[1]))[1]
    logprobs, entropy, normaliser = (x.T for x in outputs)
    return (logprobs, entropy), (hidden, head, tokens, allowed, normaliser, entropy)


def _backward(scaling, residuals, cotangents):
    hidden, head, tokens, allowed, normaliser, entropy = residuals
    temperature, softcap, precision = scaling
    weights = head.astype(hidden.dtype)
    product = partial(jnp.einsum, precision=precision, preferred_element_type=wide(hidden.dtype))
    outer = partial(product, "cd,cv->dv")

    def one(head_gradient, index):
        per_token = (hidden, tokens, normaliser, entropy, *cotangents)
        states, ids, log_total, spread, for_logprob, for_entropy = (x[:, index] for x in per_token)
        alive = ((for_logprob != 0) | (for_entropy != 0))[:, None]
        states = jnp.where(alive, states, 0)
        here = _allowed_at(allowed, index, len(head))
        logits = _logits(states, weights, here, scaling)
        logs = logits - jnp.where(alive, log_total[:, None], 0)
        probabilities = jnp.where(alive, jnp.exp(logs), 0)
        logs = logs if here is None else jnp.where(here, logs, 0)
        # d log p[token] / dz = onehot - p,   d entropy / dz = -p (log p + entropy)
        onehot = ids[:, None] == jnp.arange(head.shape[0], dtype=ids.dtype)
        pull = for_logprob[:, None] + for_entropy[:, None] * (logs + jnp.where(alive, spread[:, None], 0))
        gradient = jnp.where(onehot, for_logprob[:, None], 0) - probabilities * pull
        gradient = jnp.where(alive, gradient, 0) / temperature
        if softcap is not None:  # d cap · tanh(z / cap) / dz = 1 - tanh²(z / cap)
            bent = (logits if here is None else jnp.where(here, logits, 0)) * (temperature / softcap)
            gradient *= 1 - bent * bent
        gradient = gradient.astype(hidden.dtype)
        state_gradient = product("cv,vd->cd", gradient, weights)
        # Sum the transpose: on CPU a product with a tall left side is half as fast.
        if states.dtype == jnp.bfloat16:
            head_gradient += jax.lax.platform_dependent(states, gradient, cpu=narrow_outer, default=outer)
        else:
            head_gradient += outer(states, gradient)
        return head_gradient, state_gradient.astype(hidden.dtype)

    start = jnp.zeros(head.shape[::-1], wide(hidden.dtype))
    head_gradient, hidden_gradient = jax.lax.scan(one, start, jnp.arange(tokens.shape[1]))
    return hidden_gradient.swapaxes(0, 1), head_gradient.T.astype(head.dtype), None, None


_chunked.defvjp(_forward, _backward)


def tree_logprobs(
    hidden: ArrayLike,
    head: ArrayLike,
    tokens: ArrayLike,
    trie: Trie,
    *,
    below: int = NARROW + 1,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the log-probability of each token and the entropy of its distribution under a trie.

        p = softmax(hidden · headᵀ / temperature) over the children of the node that the previous tokens lead to

    The values equal those of `token_logprobs` with the trie. The work is less if all nodes below the root are narrow.
    The first token of each prompt scores the whole vocabulary once; later tokens score only the head's rows of the
    children.

    Args:
        hidden: `[P, G, T, D]`, floating: the states that predict the tokens. The first states of a prompt's G
            completions are equal, and only the first of them is read.
        head: `[V, D]`, floating: the unembedding.
        tokens: int `[P, G, T]`, from the root; log-probability -inf and entropy 0 once they leave the trie.
        trie: The allowed completions.
        below: Upper bound of the number of children of any node below the root (`trie.widest_below`).
        temperature: Divides the logits; 0 counts as 1.
        softcap: As of `token_logprobs`.

    Returns:
        (logprobs, entropy), both `[P, G, T]`, float32 (float64 if `hidden` is).
    """
    hidden, head, tokens = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(tokens)
    nodes, options = walk(trie, tokens), {"temperature": temperature, "softcap": softcap}
    if below > NARROW:
        return token_logprobs(hidden, head, tokens, allowed_tokens=(trie, nodes), **options)
    first = _at_the_root(hidden[:, 0, 0], head, tokens[..., 0], trie, temperature, softcap)
    later = _among_few(hidden[..., 1:, :], head, tokens[..., 1:], trie, nodes[..., 1:], below, temperature, softcap)
    logprobs, entropy = (jnp.concatenate(parts, axis=-1) for parts in zip(first, later, strict=True))
    return logprobs, entropy


def _at_the_root(hidden, head, tokens, trie: Trie, temperature: float, softcap: float | None):
    """Return log-probability and entropy of the first tokens [P, G] after states [P, D], both [P, G, 1]."""
    logits = jnp.einsum("pd,vd->pv", hidden, head.astype(hidden.dtype), preferred_element_type=wide(hidden.dtype))
    exists = children(trie, jnp.int32(ROOT))
    logits = jnp.where(exists, capped(logits, softcap) / (temperature or 1.0), -jnp.inf)
    logs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    entropy = -jnp.sum(jnp.exp(logs) * jnp.where(exists, logs, 0), axis=-1)
    chosen = jnp.take_along_axis(logs, tokens, axis=-1)
    return chosen[..., None], jnp.broadcast_to(entropy[:, None, None], (*tokens.shape, 1))


def _among_few(hidden, head, tokens, trie: Trie, nodes, below: int, temperature: float, softcap: float | None):
    """Return the same at narrow nodes, over their first `below` children."""
    listed, exists = first_children(trie, nodes, below)
    chosen = exists & (listed == tokens[..., None])
    if below == 1:  # an only child has probability 1, whatever the state
        certain = jnp.where(chosen[..., 0], 0.0, -jnp.inf).astype(wide(hidden.dtype))
        return certain, jnp.zeros_like(certain)
    rows = head.astype(hidden.dtype)[jnp.where(exists, listed, 0)]
    logits = jnp.einsum("...d,...cd->...c", hidden, rows, preferred_element_type=wide(hidden.dtype))
    logits = jnp.where(exists, capped(logits, softcap) / (temperature or 1.0), -jnp.inf)
    some = exists.any(-1)
    logs = jnp.where(exists, logits - jax.nn.logsumexp(jnp.where(some[..., None], logits, 0.0), axis=-1)[..., None], 0)
    entropy = -jnp.sum(jnp.where(exists, jnp.exp(logs) * logs, 0), axis=-1)
    logprobs = jnp.where(chosen.any(-1), jnp.sum(jnp.where(chosen, logs, 0), axis=-1), -jnp.inf)
    return logprobs, entropy
