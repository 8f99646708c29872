"""The best texts of a catalogue for each prompt, in order: so many by beams, or all of them by their exact scores.

Axes: P prompts, K texts that are listed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core.trie import NARROW, Trie, depth_of, text_count, widest_below
from grpo_jax.models.policy import Policy
from grpo_jax.sampling.beams import check_group, make_search
from grpo_jax.sampling.sampler import check_prompts, check_room, pad_rows, pad_to_bucket
from grpo_jax.sampling.text_scores import levels_of, make_scores, numbers_of
from grpo_jax.sampling.token_choice import SamplingParams
from grpo_jax.sampling.writing import Array

_MOST_NUMBERS, _MOST_PROMPTS = 2**25, 256
"""What a ranking of many prompts holds at once: so many numbers of all of them, or so many prompts where few do."""


class Ranking(NamedTuple):
    """The best texts of each prompt, best first.

    Attributes:
        texts: int32 [P, K], which texts of the tree.
        scores: float32 [P, K], their log-probabilities.
    """

    texts: Array
    scores: Array


def make_ranker(
    policy: Policy, listed: int, *, pad_id: int, trie: Trie, temperature: float = 1.0
) -> Callable[..., Ranking]:
    """Make the function that lists the best texts of a tree for each prompt.

    Args:
        policy: As of `beams.make_beam_sampler`.
        listed: K, by as many beams; 0 for all texts, scored exactly (`text_scores`).
        pad_id: Token that fills up.
        trie: The texts.
        temperature: Divides the logits; 0 counts as 1.

    Returns:
        `rank(variables, prompt_tokens, prompt_mask, pictures=None) -> Ranking`. It takes as many prompts at once as
        fit into a bounded memory.

    Raises:
        ValueError: The tree has fewer texts than K.
    """
    check_group(trie, listed)
    if listed:
        numbers = listed * trie.vocab_size if widest_below(trie) > NARROW else 1
        found = _by_beams(policy, SamplingParams(listed, depth_of(trie), temperature), pad_id=pad_id, trie=trie)
    else:
        levels = levels_of(trie)
        numbers = numbers_of(policy, levels)
        found = _by_scores(make_scores(policy, levels, temperature=temperature), text_count(trie))
    most = max(1, min(_MOST_PROMPTS, _MOST_NUMBERS // numbers))

    def rank(variables, prompt_tokens, prompt_mask, pictures=None) -> Ranking:
        tokens, mask = np.asarray(prompt_tokens, np.int32), np.asarray(prompt_mask, bool)
        keys = jax.random.split(jax.random.key(0), len(tokens))  # nothing is drawn
        check_prompts(tokens, mask, keys)
        check_room(getattr(policy, "max_positions", None), mask, depth_of(trie))
        parts = []
        for start in range(0, len(tokens), most):
            part = slice(start, start + most)
            padded, shown, _, real = pad_to_bucket(tokens[part], mask[part], keys[part], pad_id)
            seen = pad_rows(jax.tree.map(lambda x, part=part: x[part], pictures), len(real))
            ranking = found(variables, padded, shown, seen)
            parts.append(jax.tree.map(lambda x, part=part: x[: len(tokens[part])], ranking))
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    return rank


def _by_beams(policy, params: SamplingParams, *, pad_id: int, trie: Trie) -> Callable[..., Ranking]:
    search = make_search(policy, params, pad_id=pad_id, trie=trie)

    @jax.jit
    def found(trie: Trie, variables, prompts, mask, pictures) -> Ranking:
        beams = search(trie, variables, prompts, mask, None, pictures)
        return Ranking(trie.text[beams.node], beams.total)

    return functools.partial(found, trie)  # an argument: as a constant it would be in every program


def _by_scores(score: Callable[..., jax.Array], count: int) -> Callable[..., Ranking]:
    @jax.jit
    def found(variables, prompts, mask, pictures) -> Ranking:
        scores = score(variables, prompts, mask, pictures)
        order = jnp.argsort(-scores, axis=1, stable=True)[:, :count]  # numbers that are no text come last
        return Ranking(order.astype(jnp.int32), jnp.take_along_axis(scores, order, axis=1))

    return found
