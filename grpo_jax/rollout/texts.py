"""Completions as texts: allowed tokens, decoding, and statistics of the texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.core.trie import Trie
from grpo_jax.errors import UserError, one_line
from grpo_jax.models.hf.chat import picture_tokens, special_ids
from grpo_jax.models.hf.folder import PolicyFolder
from grpo_jax.sampling.samplers import choices_trie

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ParsedCompletion(NamedTuple):
    """A parsed completion, which is judged.

    Attributes:
        text: The completion, as the task reads it.
        valid: Whether the policy wrote it; false where another text stands in.
    """

    text: str
    valid: bool


def as_is(written: str, prompt: str) -> ParsedCompletion:
    """Judge a completion as it is."""
    return ParsedCompletion(written, True)


def continued(written: str, prompt: str) -> ParsedCompletion:
    """Judge the prompt with the first line of its continuation; the prompt alone, not valid, if that is empty."""
    line = written.partition("\n")[0]
    if not any(character.isalnum() for character in line):
        return ParsedCompletion(prompt, False)
    return ParsedCompletion(" ".join(f"{prompt}{line}".split()), True)


_ALLOWED = {"ascii": r"[ -~]+", "english": r"[A-Za-z0-9 .,;:!?'\"()-]+"}
"""Rules of data.allowed_tokens: printable ASCII; ASCII letters, digits, spaces and the marks of plain sentences."""


def policy_tokens(config: Config, folder: PolicyFolder) -> np.ndarray | None:
    """Return the mask bool [V] of data.allowed_tokens less data.forbidden_tokens; None for every token.

    A rule of data.allowed_tokens allows no special tokens but those that end a completion, which are always allowed,
    and none beyond the tokenizer's vocabulary. A policy with a vision tower never writes a picture's placeholder:
    there would be no picture in its place.
    """
    rule, forbidden = config.data.allowed_tokens, config.data.forbidden_tokens
    tokenizer, size, ends = folder.tokenizer, folder.config.vocab_size, list(folder.eos_ids)
    vision = getattr(folder.config, "vision", None)
    if rule == "all" and not forbidden and vision is None:
        return None
    allowed = np.ones(size, bool)
    if rule != "all":
        special = special_ids(tokenizer)
        count = min(len(tokenizer), size)
        texts = tokenizer.batch_decode([[i] for i in range(count)], clean_up_tokenization_spaces=False)
        readable = [i not in special and bool(re.fullmatch(_ALLOWED[rule], text)) for i, text in enumerate(texts)]
        allowed[:] = False
        allowed[:count] = readable
        allowed[ends] = True
    for entry in forbidden:
        ids = [entry] if isinstance(entry, int) else tokenizer(entry, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or not 0 <= ids[0] < size or ids[0] in ends:
            raise UserError(
                f"data.forbidden_tokens: {one_line(repr(entry), 60)} is {list(ids)}: name one token by text or "
                f"by id, in [0, {size}), that ends no completion"
            )
        allowed[ids[0]] = False
    if not np.delete(allowed, ends).any():
        raise UserError("data.allowed_tokens and data.forbidden_tokens: no token is left to write")
    if vision is not None:
        allowed[list(picture_tokens(vision))] = False
    return allowed


def listed_trie(config: Config, texts: Sequence[str] | None, folder: PolicyFolder) -> Trie | None:
    """Return the trie of the texts that a task lists, of which a completion is one; None for any text."""
    if texts is None:
        return None
    why = "the task lists what may be written"
    for name, changed in (
        ("data.allowed_tokens", config.data.allowed_tokens != "all"),
        ("data.forbidden_tokens", bool(config.data.forbidden_tokens)),
        ("sampling.stop", bool(config.sampling.stop)),
    ):
        require(not changed, name, f"its default: {why}", "another")
    gap = follows_text(config, folder.tokenizer)
    return choices_trie(texts, folder, gap=gap, most=config.sampling.max_new_tokens)


def follows_text(config: Config, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether completions follow plain text, not a chat template's mark."""
    return not getattr(tokenizer, "chat_template", None) or config.data.form != "rewrite"


def make_decode(
    tokenizer: PreTrainedTokenizerBase, *, form: str, read: Callable[[str, str], ParsedCompletion]
) -> Callable[[Sequence[int] | np.ndarray, str], tuple[str, ParsedCompletion]]:
    """Return decode(token ids, user's prompt) → (as written, what is judged of it), without special tokens.

    In the form "append" a completion goes on with its prompt.
    """

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode(tokens: Sequence[int] | np.ndarray, prompt: str) -> tuple[str, ParsedCompletion]:
        ids = [int(token) for token in tokens]
        written = text_of(ids)
        if form == "append":  # a tokenizer drops the space before a text's first word, and here it is needed
            start = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            head, whole = text_of(start), text_of(start + ids)
            written = whole[len(head) :] if whole.startswith(head) else written
        return written, read(written, prompt)

    return decode


def completion_statistics(
    prompts: Sequence[str], texts: Sequence[Sequence[str]], valid: Sequence[Sequence[bool]]
) -> dict[str, float]:
    """Measure the texts `[P][G]` of one batch, beside what they score: a watch on reward hacking.

    Returns:
        "words": mean number; "growth": words more than the prompt has; "duplicates": share that repeat an earlier
        text of the same prompt; "unchanged": share that equal their prompt; "invalid": share that another text
        stands in for.
    """
    pairs = [(prompt, text) for prompt, group in zip(prompts, texts, strict=True) for text in group]
    words = sum(len(_words(text)) for _, text in pairs)
    counts = {
        "words": words,
        "growth": words - sum(len(_words(prompt)) for prompt, _ in pairs),
        "duplicates": sum(len(group) - len(set(group)) for group in texts),
        "unchanged": sum(text == prompt for prompt, text in pairs),
        "invalid": sum(not flag for group in valid for flag in group),
    }
    return {name: count / len(pairs) for name, count in counts.items()}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text.casefold())
