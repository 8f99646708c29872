"""Texts from texts: a loaded policy asked in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax

from grpo_jax.models.policy import Policy
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams


def generate(
    policy: Policy,
    prompts: Sequence[str],
    *,
    completions: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    **params: Any,
) -> list[list[str]]:
    """What a policy writes to prompts, by its chat template if there is one.

    A second call with the same settings and numbers of prompts and tokens compiles nothing.

    Args:
        policy: Of `load_policy`.
        prompts: P texts.
        completions: G of each.
        max_new_tokens: Tokens after which a completion is cut.
        temperature: Divides the logits; 0 takes the most likely token.
        seed: Of the random numbers; a completion's hang on it and on its prompt's place alone.
        **params: Other fields of `SamplingParams`, such as top_p.

    Returns:
        Texts `[P][G]`, special tokens left out.

    Raises:
        TypeError: `prompts` is one text, or there is no such field.
        ValueError: There are no prompts, or a field is out of range.
        UserError: A prompt cannot be encoded.
    """
    if isinstance(prompts, str):
        raise TypeError(f"prompts: expected a list of texts, got one: [{prompts[:40]!r}]")
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    settings = SamplingParams(completions, max_new_tokens, temperature, **params)
    sample = _sampler(policy, settings, tuple(policy.eos_ids), policy.pad_id)
    tokens, mask = policy.encode(prompts)
    return policy.decode(sample(policy.variables, tokens, mask, jax.random.split(jax.random.key(seed), len(prompts))))


@lru_cache(maxsize=8)
def _sampler(policy: Policy, settings: SamplingParams, eos_ids: tuple[int, ...], pad_id: int) -> Any:
    """Kept, for a sampler that is made again is compiled again."""
    return make_sampler(policy, settings, eos_ids=eos_ids, pad_id=pad_id)
