"""Plain-text prompts as rows and as tokens."""

import numpy as np

from grpo_jax.config.sections import DataSection
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.encoding import make_encode


def plain_rows(prompts):
    return [Row(place, prompt) for place, prompt in enumerate(prompts)]


def format_prompt(tokenizer, prompt, *, form="rewrite", instruction="", vocab_size=None):
    section = DataSection(form=form, instruction=instruction, max_prompt_tokens=4096)
    encode = make_encode(tokenizer, section, pad_id=0, vocab_size=vocab_size)
    tokens, mask, _ = encode(plain_rows([prompt]))
    return tokens[mask].tolist()


def left_padded(rows, pad_id):
    """Token ids of several lengths as int32 [P, L] and bool [P, L]."""
    longest = max(map(len, rows))
    tokens = np.array([[pad_id] * (longest - len(row)) + list(row) for row in rows], np.int32)
    return tokens, np.arange(longest) >= longest - np.array([[len(row)] for row in rows])
