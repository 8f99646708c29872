"""Log-probabilities of texts of a catalogue, of each token among those that may follow there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.logprobs import capped, token_logprobs, wide
from grpo_jax.core.trie import NARROW, ROOT, Trie, children, narrow_children, walk


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
    """Log-probability of each token, and entropy of the distribution it was drawn from, over a tree of texts.

        p = softmax(hidden · headᵀ / temperature) over the children of the node that the tokens before lead to

    The values of `token_logprobs` with `trie` and its nodes, for less work where all nodes below the root are narrow:
    the whole vocabulary is then scored once for each prompt, at the first token, and only the children's rows of the
    head after it.

    Args:
        hidden: `[P, G, T, D]`, floating: the states that predict the tokens; of a prompt's G first ones, which all
            follow the prompt, the first stands for all.
        head: `[V, D]`, floating: the unembedding.
        tokens: int `[P, G, T]`, from the root; -inf and 0 from where they leave the tree, or are past a text's end.
        trie: The texts.
        below: At least as many children as any node below the root has (`trie.widest_below`).
        temperature: Divides the logits; 0 counts as 1.
        softcap: As of `token_logprobs`.

    Returns:
        (logprobs, entropy), both `[P, G, T]`, float32 (float64 if `hidden` is).

    Raises:
        TypeError, ValueError: As of `token_logprobs`.
    """
    hidden, head, tokens = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(tokens)
    nodes, options = walk(trie, tokens), {"temperature": temperature, "softcap": softcap}
    if below > NARROW:
        return token_logprobs(hidden, head, tokens, trie=trie, nodes=nodes, **options)
    first = _at_the_root(hidden[:, 0, 0], head, tokens[..., 0], trie, temperature, softcap)
    later = _among_few(hidden[..., 1:, :], head, tokens[..., 1:], trie, nodes[..., 1:], below, temperature, softcap)
    logprobs, entropy = (jnp.concatenate(parts, axis=-1) for parts in zip(first, later, strict=True))
    return logprobs, entropy


def _at_the_root(hidden, head, tokens, trie: Trie, temperature: float, softcap: float | None):
    """Log-probability and entropy of the first tokens [P, G] after states [P, D]: both [P, G, 1]."""
    logits = jnp.einsum("pd,vd->pv", hidden, head.astype(hidden.dtype), preferred_element_type=wide(hidden.dtype))
    exists = children(trie, jnp.int32(ROOT))
    logits = jnp.where(exists, capped(logits, softcap) / (temperature or 1.0), -jnp.inf)
    logs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    entropy = -jnp.sum(jnp.exp(logs) * jnp.where(exists, logs, 0), axis=-1)
    chosen = jnp.take_along_axis(logs, tokens, axis=-1)
    return chosen[..., None], jnp.broadcast_to(entropy[:, None, None], (*tokens.shape, 1))


def _among_few(hidden, head, tokens, trie: Trie, nodes, below: int, temperature: float, softcap: float | None):
    """The same at narrow nodes, over their first `below` children."""
    listed, exists = (x[..., :below] for x in narrow_children(trie, nodes))
    chosen = exists & (listed == tokens[..., None])
    if below == 1:  # an only child is certain: no state is looked at
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
