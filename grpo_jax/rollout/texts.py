"""Texts as a policy reads and writes them: prompts to tokens, completions to text, and what they look like."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError, shown
from grpo_jax.models.hf.tokens import chat_renderer, prompt_encoder, special_ids
from grpo_jax.sampling.sampler import bucket_size

_WORDS = re.compile(r"\w+(?:['’-]\w+)*")


class Reading(NamedTuple):
    """What a completion comes to: the text that is judged, and whether the policy wrote it or another stands in."""

    text: str
    usable: bool


def as_written(written: str, prompt: str) -> Reading:
    """A completion is judged as it is."""
    return Reading(written, True)


def continued(written: str, prompt: str) -> Reading:
    """The prompt with the first line of its continuation; the prompt alone, not usable, where that says nothing."""
    line = written.partition("\n")[0]
    if not any(character.isalnum() for character in line):
        return Reading(prompt, False)
    return Reading(" ".join(f"{prompt}{line}".split()), True)


# ----------------------------------------------------------------------------------------------------------- prompts


def format_prompt(tokenizer: Any, prompt: str, *, form: str = "rewrite", instruction: str = "") -> list[int]:
    """The tokens a completion of this prompt starts from (`prompt_format`)."""
    return prompt_format(tokenizer, form=form, instruction=instruction)(prompt)


def prompt_format(
    tokenizer: Any, *, form: str = "rewrite", instruction: str = "", vocab_size: int | None = None
) -> Callable[[str], list[int]]:
    """encode(prompt) → the tokens that a completion of it starts from.

    What the user wrote is text, whatever it says: the tokenizer's marks come from template and instruction alone.

    Args:
        tokenizer: A Hugging Face tokenizer.
        form: In "append" the prompt itself is continued. Otherwise the user's turn of the tokenizer's chat template,
            with the answer left open; a tokenizer without a chat template gets the instruction as plain text.
        instruction: What the user's turn says; "{prompt}" stands for the prompt (other braces mean nothing).
            Empty: the prompt alone.
        vocab_size: V, the model's; a token beyond it is refused.

    Raises:
        UserError: A non-empty instruction does not say where the prompt goes, the chat template fails, or as
            `prompt_encoder`.
    """
    if form == "append":
        return prompt_encoder(tokenizer, str, add_special_tokens=True, vocab_size=vocab_size)
    if instruction and "{prompt}" not in instruction:
        raise UserError("data.instruction must contain {prompt}, the place of the user's prompt")

    def instructed(prompt: str) -> str:
        return instruction.replace("{prompt}", prompt) if instruction else prompt

    if not getattr(tokenizer, "chat_template", None):
        return prompt_encoder(tokenizer, instructed, add_special_tokens=True, vocab_size=vocab_size)
    # Templates that know no thinking ignore the switch; a thinking block would eat the tokens of the answer.
    chat = chat_renderer(tokenizer, enable_thinking=False)
    return prompt_encoder(
        tokenizer, lambda prompt: chat(instructed(prompt)), add_special_tokens=False, vocab_size=vocab_size
    )


def pad_left(encoded: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Token lists of different lengths as one array: i32[P, width] and its mask bool[P, width].

    Raises:
        ValueError: If a list is longer than `width`.
    """
    array = np.full((len(encoded), width), pad_id, np.int32)
    mask = np.zeros((len(encoded), width), bool)
    for i, tokens in enumerate(encoded):
        if len(tokens) > width:
            raise ValueError(f"width must be at least the longest prompt's {len(tokens)} tokens, got {width}")
        array[i, width - len(tokens) :] = tokens
        mask[i, width - len(tokens) :] = True
    return array, mask


def make_encode(
    tokenizer: Any, section: DataSection, *, pad_id: int, vocab_size: int | None = None, prompts: Sequence[str] = ()
) -> Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]:
    """encode(prompts) → left-padded tokens i32 [P, L] and mask.

    Args:
        tokenizer: The policy's.
        section: Form, instruction and the most tokens of a prompt.
        pad_id: Fills up on the left.
        vocab_size: V, the model's; a token beyond it is refused.
        prompts: Prompts whose longest sets L, so that all batches have one shape.

    Raises:
        UserError: A prompt is longer than data.max_prompt_tokens, or as `prompt_format`.
    """
    limit = section.max_prompt_tokens
    format_one = prompt_format(tokenizer, form=section.form, instruction=section.instruction, vocab_size=vocab_size)

    def tokens_of(prompts: Sequence[str]) -> list[list[int]]:
        encoded = [format_one(prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, encoded, strict=True):
            if len(ids) > limit:
                raise UserError(
                    f"prompt {shown(prompt)} takes {len(ids)} tokens with its instruction; data.max_prompt_tokens is "
                    f"{limit}: shorten it or raise the limit"
                )
        return encoded

    longest = max(map(len, tokens_of(prompts)), default=1)

    def encode(prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = tokens_of(prompts)
        return pad_left(encoded, bucket_size(max(longest, *map(len, encoded)), smallest=8), pad_id)

    return encode


# ------------------------------------------------------------------------------------------------------- completions


def allowed_tokens(tokenizer: Any, rule: str, *, vocab_size: int, eos_ids: Sequence[int]) -> np.ndarray | None:
    """The tokens a policy may write.

    Args:
        tokenizer: A Hugging Face tokenizer.
        rule: "all"; "ascii": tokens whose text is printable ASCII; "english": ASCII letters, digits, spaces and the
            marks of plain sentences.
        vocab_size: V, the model's, which may exceed the tokenizer's; the excess is never allowed.
        eos_ids: Tokens that end a completion: always allowed. Other special tokens never are.

    Returns:
        bool[V], or None for "all".

    Raises:
        UserError: If the rule leaves nothing to write.
        ValueError: If the rule is unknown.
    """
    if rule == "all":
        return None
    patterns = {"ascii": r"[ -~]+", "english": r"[A-Za-z0-9 .,;:!?'\"()-]+"}
    if rule not in patterns:
        raise ValueError(f"rule must be all, {', '.join(patterns)}, got {rule!r}")
    pattern = re.compile(patterns[rule])
    special = special_ids(tokenizer)
    known = min(len(tokenizer), vocab_size)
    texts = tokenizer.batch_decode([[i] for i in range(known)], clean_up_tokenization_spaces=False)
    allowed = np.zeros(vocab_size, bool)
    allowed[:known] = [i not in special and bool(pattern.fullmatch(text)) for i, text in enumerate(texts)]
    if not allowed.any():
        raise UserError(f"data.allowed_tokens = {rule}: no token of this tokenizer is allowed by it")
    allowed[list(eos_ids)] = True
    return allowed


def make_decode(
    tokenizer: Any, *, form: str, read: Callable[[str, str], Reading]
) -> Callable[[Sequence[int] | np.ndarray, str], tuple[str, str, bool]]:
    """decode(token ids, user's prompt) → (as written, text to judge, usable); special tokens say nothing.

    Args:
        tokenizer: The policy's.
        form: "append" where a completion goes on with its prompt.
        read: (as written, prompt) → `Reading`.
    """

    def written_by(ids: list[int], prompt: str) -> str:
        if form != "append":
            return _decode(tokenizer, ids)
        # Decoded behind the prompt: a tokenizer drops the space before a text's first word, and here it is needed.
        start = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        head, whole = _decode(tokenizer, start), _decode(tokenizer, start + ids)
        return whole[len(head) :] if whole.startswith(head) else _decode(tokenizer, ids)

    def decode(tokens: Sequence[int] | np.ndarray, prompt: str) -> tuple[str, str, bool]:
        written = written_by([int(token) for token in tokens], prompt)
        reading = read(written, prompt)
        return written, reading.text, reading.usable

    return decode


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# ---------------------------------------------------------------------------------------------------------- watching


def completion_statistics(
    prompts: Sequence[str], texts: Sequence[Sequence[str]], usable: Sequence[Sequence[bool]]
) -> dict[str, float]:
    """What the texts of one batch look like, beside what they score: a watch on reward hacking.

    Args:
        prompts: P texts.
        texts: [P][G], what was judged.
        usable: [P][G], false where another text stands in for a completion.

    Returns:
        "words": mean number; "growth": words more than the prompt has; "duplicates": share that repeat an earlier text
        of the same prompt; "unchanged": share that equal their prompt; "unusable".
    """
    pairs = [(prompt, text) for prompt, group in zip(prompts, texts, strict=True) for text in group]
    if not pairs:
        raise ValueError("texts must hold at least one completion")
    words = growth = unchanged = 0
    for prompt, text in pairs:
        old, new = _WORDS.findall(prompt.casefold()), _WORDS.findall(text.casefold())
        words += len(new)
        growth += len(new) - len(old)
        unchanged += text == prompt
    repeated = sum(len(group) - len(set(group)) for group in texts)
    unusable = sum(not flag for group in usable for flag in group)
    counts = {"words": words, "growth": growth, "duplicates": repeated, "unchanged": unchanged, "unusable": unusable}
    return {name: count / len(pairs) for name, count in counts.items()}


def most_added_words(prompts: Sequence[str], texts: Sequence[str], *, top: int = 10) -> tuple[tuple[str, float], ...]:
    """The words that rewrites add to their prompts most often, each with the share of rewrites that add it.

    Args:
        prompts: One text for each rewrite.
        texts: The rewrites.
        top: How many words to keep; ties are in alphabetical order.
    """
    added: Counter[str] = Counter()
    for prompt, text in zip(prompts, texts, strict=True):
        added.update(set(_WORDS.findall(text.casefold())) - set(_WORDS.findall(prompt.casefold())))
    ranked = sorted(added.items(), key=lambda item: (-item[1], item[0]))[:top]
    return tuple((word, count / len(texts)) for word, count in ranked)
