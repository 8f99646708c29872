"""The necessary work of an iteration, which bounds its time on any machine.

Counted is each prompt once for its whole group, causal attention without the masked half, float32; not recomputation,
padding, norms and softmax. Bytes are those that must come from memory at least once if nothing but the step's own
results stays in the caches: weights, keys and values, logits of the sampler, the optimizer's state.
"""

from __future__ import annotations

from typing import NamedTuple

import iteration_work as work

FLOAT = 4  # bytes


class Work(NamedTuple):
    """Necessary work of a phase: floating-point operations (a multiply-add is two) and bytes of memory traffic."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def layer_weights(case: work.Case) -> int:
    """Entries of one layer's matrices: W = 2·D·H·E + 2·D·K·E + 3·D·M."""
    heads = case.heads * case.head_size
    return case.hidden * (2 * heads + 2 * case.kv_heads * case.head_size + 3 * case.mlp)


def parameters(case: work.Case) -> int:
    """All trained entries; norms and biases left out."""
    return case.layers * layer_weights(case) + case.vocabulary * case.hidden


def attention_flops(case: work.Case, pairs: float) -> float:
    """Scores and weighted values of `pairs` (query, key) pairs in every layer and head."""
    return case.layers * case.heads * 4 * case.head_size * pairs


def cache_bytes(case: work.Case, tokens: float) -> float:
    """Keys and values of `tokens` tokens in every layer."""
    return case.layers * 2 * case.kv_heads * case.head_size * FLOAT * tokens


def triangle(n: int) -> float:
    """1 + 2 + … + n: the pairs of causal attention."""
    return n * (n + 1) / 2


def sampling_work(case: work.Case) -> Work:
    """Prefill of P·L tokens with P rows of logits, then T - 1 steps of P·G rows with logits each."""
    rows, steps = case.prompts * case.group, case.new_tokens - 1
    weights, head = case.layers * layer_weights(case), case.vocabulary * case.hidden
    logits = case.vocabulary * FLOAT * 2  # of one row, written and read
    prompt = case.prompts * case.prompt_tokens
    prefill = Work(
        2 * weights * prompt
        + attention_flops(case, case.prompts * triangle(case.prompt_tokens))
        + 2 * head * case.prompts,
        FLOAT * (weights + head) + cache_bytes(case, prompt) + logits * case.prompts,
    )
    decode = Work(
        steps * rows * 2 * (weights + head)
        + attention_flops(case, rows * (steps * case.prompt_tokens + triangle(steps))),
        steps * (FLOAT * (weights + head) + logits * rows)
        # The prompt's keys and values once per group, the completion's own once per row.
        + cache_bytes(case, steps * prompt + rows * (triangle(steps) + steps)),
    )
    return prefill + decode


def forward_work(case: work.Case) -> Work:
    """Log-probabilities of the completions: L tokens per prompt, T - 1 per completion, logits never in memory."""
    rows, length = case.prompts * case.group, case.new_tokens - 1
    tokens = case.prompts * case.prompt_tokens + rows * length
    pairs = case.prompts * triangle(case.prompt_tokens) + rows * (length * case.prompt_tokens + triangle(length))
    weights, head = case.layers * layer_weights(case), case.vocabulary * case.hidden
    # The state that predicts the first token is the prompt's last one: one row of logits per prompt.
    flops = 2 * weights * tokens + attention_flops(case, pairs) + 2 * head * (case.prompts + rows * length)
    return Work(flops, FLOAT * (weights + head))


def update_work(case: work.Case) -> Work:
    """Forward, and a backward pass of twice its work; AdamW reads four numbers of each parameter and writes three."""
    forward = forward_work(case)
    return Work(3 * forward.flops, 3 * forward.bytes + 7 * FLOAT * parameters(case))
