"""Prompt enhancement as text: what the policy is asked, how its answer is read, and what it may say.

Two forms. *rewrite*: the policy is asked, through its chat template, for a better prompt and answers with it.
*append*: the policy continues the user's prompt token by token, and the reward comes at the end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError

FORMS = ("rewrite", "append")
_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_LABEL = re.compile(r"^(?:here(?:'s| is)[^:\n]{0,60}|(?:rewritten |enhanced |improved |new )?prompt)\s*:\s*", re.I)
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "`": "`"}


class Rewrite(NamedTuple):
    """What is rendered: the rewrite, or the user's prompt where it is unusable."""

    text: str
    usable: bool


def format_prompt(tokenizer: Any, prompt: str, *, form: str = "rewrite", instruction: str = "") -> list[int]:
    """Token ids of what the policy is asked.

    Args:
        tokenizer: The policy's; its chat template is used in the rewrite form where it has one.
        prompt: The user's.
        form: "rewrite" or "append".
        instruction: Template of the user's turn with {prompt}; empty for the prompt alone.

    Raises:
        UserError: The instruction does not contain {prompt}.
    """
    if form == "append":
        return _special_start(tokenizer) + tokenizer.encode(prompt, add_special_tokens=False)
    if instruction and "{prompt}" not in instruction:
        raise UserError(f"data.instruction: expected {{prompt}} to stand somewhere in it, got {instruction!r}")
    # str.replace, since an instruction may hold other braces.
    turn = instruction.replace("{prompt}", prompt) if instruction else prompt
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], tokenize=False, add_generation_prompt=True
        )
        return tokenizer.encode(text, add_special_tokens=False)
    return _special_start(tokenizer) + tokenizer.encode(turn + "\n", add_special_tokens=False)


def _special_start(tokenizer: Any) -> list[int]:
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []


def pad_left(encoded: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of unequal length as i32 [P, width], padded on the left, and the mask bool [P, width]."""
    tokens = np.full((len(encoded), width), pad_id, np.int32)
    mask = np.zeros((len(encoded), width), bool)
    for row, ids in enumerate(encoded):
        if not 0 < len(ids) <= width:
            raise ValueError(f"encoded[{row}]: expected 1 to {width} tokens, got {len(ids)}")
        tokens[row, width - len(ids) :] = ids
        mask[row, width - len(ids) :] = True
    return tokens, mask


def parse_rewrite(written: str, form: str, prompt: str) -> Rewrite:
    """Reads what the policy wrote.

    In the rewrite form, thinking blocks, a label such as "Prompt:" and quotes around the whole are taken off, and the
    first line that holds a letter or digit is the rewrite. In the append form the text is the prompt with the
    continuation. What holds no letter or digit is unusable, and the user's prompt stands in.
    """
    if form not in FORMS:
        raise ValueError(f"form: expected one of {FORMS}, got {form!r}")
    if form == "append":
        continuation = " ".join(written.split())
        if not continuation:
            return Rewrite(prompt, False)
        # Many tokenizers lose the space before a completion's first word; punctuation needs none.
        joint = "" if continuation[0] in ",.;:!?" else " "
        return Rewrite(prompt + joint + continuation, True)
    text = _THINKING.sub("", written).strip()
    for line in text.splitlines():
        candidate = _unquote(_LABEL.sub("", line.strip()))
        if any(character.isalnum() for character in candidate):
            return Rewrite(" ".join(candidate.split()), True)
    return Rewrite(prompt, False)


def _unquote(text: str) -> str:
    text = text.strip().strip("*").strip()
    if len(text) >= 2 and _QUOTES.get(text[0]) == text[-1]:
        return text[1:-1].strip()
    return text


def allowed_tokens(tokenizer: Any, rule: str, *, vocab_size: int, eos_ids: Sequence[int] = ()) -> np.ndarray:
    """Which tokens may be sampled: bool [V].

    Args:
        tokenizer: The policy's.
        rule: "english": tokens whose text is printable ASCII.
        vocab_size: V of the model, which may be more than the tokenizer has.
        eos_ids: Always allowed.
    """
    if rule != "english":
        raise ValueError(f"rule: expected 'english', got {rule!r}")
    allowed = np.zeros(vocab_size, bool)
    special = set(tokenizer.all_special_ids)
    known = min(vocab_size, len(tokenizer))
    for token, text in enumerate(tokenizer.batch_decode([[token] for token in range(known)])):
        allowed[token] = token not in special and text != "" and text.isascii() and text.isprintable()
    allowed[list(eos_ids)] = True
    return allowed


def most_added_words(prompts: Sequence[str], rewrites: Sequence[str], count: int = 10) -> list[tuple[str, float]]:
    """Words that rewrites add to their prompts, with the share of rewrites that add them: a watch on reward hacking."""
    added: Counter[str] = Counter()
    for prompt, rewrite in zip(prompts, rewrites, strict=True):
        added.update(_words(rewrite) - _words(prompt))
    return [(word, number / max(len(rewrites), 1)) for word, number in added.most_common(count)]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[\w'-]+", text.lower()))
