"""What may be written, where that is a list of texts: their tokens as a tree, and samplers over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.core.trie import Trie, make_trie
from grpo_jax.errors import UserError, one_line
from grpo_jax.models.hf.tokens import plain_tokens


def completion_tokens(tokenizer: Any, text: str, eos_ids: Sequence[int], *, gap: bool) -> list[int]:
    """A text as a completion, up to the token that ends it.

    It ends with the tokenizer's own end token, which closes a turn of its chat template, or with the first of the
    folder's end tokens where that is none of them. Marks in the text are text (`plain_tokens`); an end token that is no
    mark, such as a line's end, ends it, for the sampler would stop there.

    Args:
        tokenizer: The policy's.
        text: What is written.
        eos_ids: At least one.
        gap: Whether a space comes before it: behind plain text a word starts with its space, behind a chat template's
            mark it does not.
    """
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in eos_ids else eos_ids[0]
    ids = [*plain_tokens(tokenizer, f" {text}" if gap else text), end]
    stop = next(place for place, token in enumerate(ids) if token in eos_ids)
    return ids[: stop + 1]


def choices_trie(texts: Sequence[str], loaded: Any, *, gap: bool, most: int) -> Trie:
    """The tree of a task's texts (`tasks.task.Choices`); those that are the same tokens are the first of them.

    Args:
        texts: What may be written.
        loaded: The policy's folder: tokenizer, end tokens, vocabulary.
        gap: As `completion_tokens` says.
        most: sampling.max_new_tokens.

    Raises:
        UserError: A text is longer than `most`, or has no token of its own.
    """
    unknown = loaded.tokenizer.unk_token_id
    numbers: dict[tuple[int, ...], int] = {}
    for number, text in enumerate(texts):
        ids = completion_tokens(loaded.tokenizer, text, loaded.eos_ids, gap=gap)
        if len(ids) > most:
            raise UserError(
                f"sampling.max_new_tokens: expected at least {len(ids)}, the tokens of {one_line(repr(text), 60)}, "
                f"which may be written; got {most}"
            )
        if not {*ids[:-1]} - {unknown}:
            raise UserError(f"{one_line(repr(text), 60)} may be written, and the policy's tokenizer has no word of it")
        numbers.setdefault(tuple(ids), number)
    trie = make_trie(list(numbers), vocab_size=loaded.config.vocab_size)
    first = np.array(list(numbers.values()))
    text = np.asarray(trie.text)
    return trie._replace(text=jnp.asarray(np.where(text >= 0, first[text], -1), jnp.int32))
