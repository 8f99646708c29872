"""Completions: prefill each prompt once, decode its G completions against that shared prefix.

The sampler knows a policy by its functions (`prefill`, `unstack`, `decode_step`, `init_cache`, `head`; `forward_group`
is the update's), so it works for anything that offers them. Axes: P prompts, G completions of a prompt, L
prompt tokens, T completion tokens, D model width, V vocabulary; R is a row, one (prompt, completion) pair.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from grpo_jax.core.trie import Trie
from grpo_jax.sampling.token_choice import SamplingParams
from grpo_jax.sampling.writing import Ends, Samples, generate, samples_of


def bucket_size(n: int, smallest: int = 1) -> int:
    """Round n up to one of few sizes: multiples of `smallest`, and never more than four sizes per doubling.

    A size depends on n alone, never on earlier calls, so that a resumed run computes in the same shapes.

    Args:
        n: At least 1.
        smallest: A power of two.

    >>> [bucket_size(n) for n in (3, 8, 9, 17)], bucket_size(70, smallest=8)
    ([3, 8, 10, 20], 80)
    """
    multiple = max(smallest, 1 << max((n - 1).bit_length() - 3, 0))
    return -(-n // multiple) * multiple


def check_prompts(tokens, mask, keys) -> None:
    """Refuses prompts that are empty or not padded on the left, and keys of another kind, with a ValueError."""
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"prompt_tokens must be a non-empty [P, L], got the shape {tokens.shape}")
    if mask.shape != tokens.shape:
        raise ValueError(f"prompt_mask must have the shape {tokens.shape} of prompt_tokens, got {mask.shape}")
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.shape != tokens.shape[:1]:
        raise ValueError(
            f"keys must be typed PRNG keys of shape ({tokens.shape[0]},), one per prompt, "
            f"got {keys.dtype} of shape {keys.shape}"
        )
    if "rbg" in str(keys.dtype):
        raise ValueError("keys must be of a generator that vmap treats row by row (threefry2x32), got rbg")
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("prompts must be padded on the left and hold at least one token each")


def check_room(limit: int | None, mask, length: int) -> None:
    """Learned positions end: refuses a prompt that leaves no room for `length` tokens behind it."""
    longest = int(mask.sum(axis=1).max())
    if limit is not None and longest + length > limit:
        raise ValueError(
            f"prompt and completion must have at most {limit} tokens together, the policy's max_positions; "
            f"got a prompt of {longest} tokens and max_new_tokens = {length}"
        )


def pad_to_bucket(tokens, mask, keys, pad_id):
    """Left-pad L and repeat the last prompt until both are bucket sizes; also tell which rows are real."""
    rows, length = tokens.shape
    more_rows = bucket_size(rows) - rows
    more_tokens = bucket_size(length, smallest=8) - length
    tokens = np.pad(tokens, ((0, 0), (more_tokens, 0)), constant_values=pad_id)
    mask = np.pad(mask, ((0, 0), (more_tokens, 0)))
    if more_rows:
        tokens, mask = (np.pad(x, ((0, more_rows), (0, 0)), mode="edge") for x in (tokens, mask))
        keys = keys[np.minimum(np.arange(rows + more_rows), rows - 1)]
    return tokens, mask, keys, np.arange(rows + more_rows) < rows


def pad_rows(tree, rows: int):
    """Arrays [P, ..] with the last row repeated until there are so many; None as it is."""
    return jax.tree.map(lambda x: jnp.take(x, np.minimum(np.arange(rows), len(x) - 1), axis=0), tree)


def checked_tokens(allowed_tokens):
    """The tokens that may be written, bool [V] on the host, or None.

    Raises:
        ValueError: It is something else, or allows nothing.
    """
    if allowed_tokens is None:
        return None
    allowed_tokens = np.asarray(allowed_tokens)
    if allowed_tokens.dtype != bool or allowed_tokens.ndim != 1 or not allowed_tokens.any():
        raise ValueError(
            "allowed_tokens must be bool [V] with at least one true entry, "
            f"got {allowed_tokens.dtype} of shape {allowed_tokens.shape}"
        )
    return allowed_tokens


def make_sampler(
    policy: Any,
    params: SamplingParams,
    *,
    eos_ids: tuple[int, ...],
    pad_id: int,
    allowed_tokens: ArrayLike | None = None,
    stops: np.ndarray | None = None,
    trie: Trie | None = None,
) -> Callable[..., Samples]:
    """Make the function that writes completions.

    It is compiled once per bucket of shapes (P and L are rounded up by `bucket_size`, T is fixed) and stops
    as soon as every completion has ended. Random numbers of completion g at step t come from
    fold_in(fold_in(keys[p], g), t): they do not depend on the other prompts of the batch.

    Args:
        policy: Has `prefill`, `unstack`, `decode_step`, `init_cache` and `head`; see `grpo_jax.models.policy.Policy`.
        params: Group size, length and distribution.
        eos_ids: Tokens that end a completion; may be empty.
        pad_id: Token that fills prompts on the left and completions after their end.
        allowed_tokens: bool [V], the tokens that may be written at all; None for every token.
        stops: Stop strings as int32 [S, V] of `stopping.stop_table`, which end a completion with the token that
            completes one of them; None for none.
        trie: The texts of which each completion is one, in place of `allowed_tokens` and `stops`: at every token the
            policy's distribution is that over the children of its node (`core.trie`). None for any text.

    Returns:
        `sample(variables, prompt_tokens, prompt_mask, keys, pictures=None) -> Samples` with int [P, L], bool [P, L]
        (left-padded; on the host, or they are fetched), typed PRNG keys [P], one per prompt, and what a tower made of
        the prompts' pictures (`models.vision.pictures.PictureStates`, [P, I, ..]). It raises
        ValueError for prompts that are empty, not left-padded or too long for the policy's positions, for keys
        of another kind, and for token ids outside the vocabulary.

    Raises:
        ValueError: `allowed_tokens` is not bool [V] or allows nothing.
    """
    ends = Ends(tuple(int(i) for i in eos_ids), int(pad_id), checked_tokens(allowed_tokens))
    table = None if stops is None else jnp.asarray(stops)  # an argument: as a constant it would be in every program

    @jax.jit
    def write(stops, trie, *arguments) -> Samples:
        return samples_of(generate(policy, params, ends._replace(stops=stops, trie=trie), *arguments))

    def sample(variables, prompt_tokens, prompt_mask, keys, pictures=None) -> Samples:
        tokens, mask = np.asarray(prompt_tokens, np.int32), np.asarray(prompt_mask, bool)
        check_prompts(tokens, mask, keys)
        check_room(getattr(policy, "max_positions", None), mask, params.max_new_tokens)
        padded = pad_to_bucket(tokens, mask, keys, ends.pad_id)
        samples = write(table, trie, variables, *padded, pad_rows(pictures, len(padded[0])))
        return jax.tree.map(lambda x: x[: tokens.shape[0]], samples)

    return sample
