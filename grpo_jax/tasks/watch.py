"""A watch on reward hacking: what rewrites look like, beside what they score.

Rewards that are never trained on are called like the others (`grpo_jax.tasks.rewards.collect_rewards`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_WORDS = re.compile(r"\w+(?:['’-]\w+)*")


class RewriteStatistics(NamedTuple):
    """What one iteration's rewrites look like.

    Attributes:
        words: Mean number of words.
        growth: Mean number of words more than the prompt has.
        duplicates: Share of rewrites that repeat an earlier one of the same prompt.
        unchanged: Share that equal their prompt.
        unusable: Share of completions for which the user's prompt had to stand in.
        added: The words most often in a rewrite and not in its prompt, with the share of rewrites that add them.
    """

    words: float
    growth: float
    duplicates: float
    unchanged: float
    unusable: float
    added: tuple[tuple[str, float], ...]


def rewrite_statistics(
    prompts: Sequence[str],
    texts: Sequence[Sequence[str]],
    usable: Sequence[Sequence[bool]] | None = None,
    *,
    top: int = 10,
) -> RewriteStatistics:
    """Describes the rewrites of one iteration.

    Words are compared without case; ties among the added ones are in alphabetical order.

    Args:
        prompts: P texts.
        texts: [P][G], what was rendered.
        usable: [P][G], false where the prompt stands in for a completion.
        top: How many added words to keep.
    """
    pairs = [(prompt, text) for prompt, group in zip(prompts, texts, strict=True) for text in group]
    if not pairs:
        raise ValueError("texts must hold at least one rewrite")
    added: Counter[str] = Counter()
    words = growth = unchanged = 0
    for prompt, text in pairs:
        old, new = _WORDS.findall(prompt.casefold()), _WORDS.findall(text.casefold())
        added.update(set(new) - set(old))
        words += len(new)
        growth += len(new) - len(old)
        unchanged += text == prompt
    repeated = sum(len(group) - len(set(group)) for group in texts)
    unusable = 0 if usable is None else sum(not flag for group in usable for flag in group)
    n = len(pairs)
    ranked = sorted(added.items(), key=lambda item: (-item[1], item[0]))[:top]
    return RewriteStatistics(
        words / n,
        growth / n,
        repeated / n,
        unchanged / n,
        unusable / n,
        tuple((word, count / n) for word, count in ranked),
    )
