"""Prompt enhancement: what the policy is asked, and how its answer becomes a prompt.

Three forms. *rewrite* asks a chat policy for a better prompt and reads its answer. *append* lets the policy continue
the user's prompt token by token; the prompt with its continuation is what is rendered. *text* judges the completion
as it is written (the `text` task). An answer that cannot be used never reaches the renderer: the user's prompt does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from grpo_jax.errors import UserError

Form = Literal["rewrite", "append", "text"]

INSTRUCTION = (
    "Rewrite this prompt for a text-to-image model so that the picture shows exactly what it asks for. Keep every "
    "object, colour, number and relation; add only what helps to see them. Answer with the new prompt alone, on one "
    "line.\n\nPrompt: {prompt}"
)
"""What a chat policy is told in the rewrite form."""

_ADJECTIVES = "the|an?|my|your|new|final|better|improved|enhanced|rewritten|revised|refined|optimi[sz]ed|updated|image"
_LABEL = re.compile(rf"^(?:(?:{_ADJECTIVES})\s+)*(?:prompt|rewrite|output|answer|result)\s*:\s*", re.IGNORECASE)
_PREAMBLE = re.compile(
    r"^(?:sure|certainly|of course|okay|ok|here\b|here's|here’s|absolutely|great)\b.*:$", re.IGNORECASE
)
_REFUSAL = re.compile(
    r"^(?:i[’']?m sorry|i am sorry|sorry[,.]|i can(?:no|[’'])t\b|i can not\b|as an ai\b|i am unable|i[’']?m unable)",
    re.IGNORECASE,
)
_BULLET = re.compile(r"^(?:[-*•]\s+|\d{1,2}[.)]\s+|#+\s+|>\s+)")
_WORDS = re.compile(r"\w+(?:['’-]\w+)*")
_QUOTES = {'"': '"', "“": "”", "«": "»", "'": "'", "‘": "’", "`": "`"}


class Rewrite(NamedTuple):
    """A prompt to render, and whether the policy wrote it (or the user's stands in, unchanged)."""

    text: str
    usable: bool


# ---------------------------------------------------------------------------------------------------- asking


def format_prompt(tokenizer: Any, prompt: str, *, form: Form = "rewrite", instruction: str = "") -> list[int]:
    """The tokens a completion of this prompt starts from.

    Args:
        tokenizer: A Hugging Face tokenizer.
        prompt: What the user wrote.
        form: In "append" the prompt itself is continued. Otherwise the user's turn of the tokenizer's chat template,
            with the answer left open; a tokenizer without a chat template gets the instruction as plain text.
        instruction: What the user's turn says; "{prompt}" stands for the prompt (other braces mean nothing).
            Empty: the prompt alone.

    Raises:
        UserError: If a non-empty instruction does not say where the prompt goes.
    """
    if form == "append":
        return list(tokenizer(prompt)["input_ids"])
    if instruction and "{prompt}" not in instruction:
        raise UserError("data.instruction must contain {prompt}, the place of the user's prompt")
    content = instruction.replace("{prompt}", prompt) if instruction else prompt
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(content)["input_ids"])
    # Templates that know no thinking ignore the switch; a thinking block would eat the tokens of the answer.
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


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
    special = set(tokenizer.all_special_ids)
    known = min(len(tokenizer), vocab_size)
    texts = tokenizer.batch_decode([[i] for i in range(known)], clean_up_tokenization_spaces=False)
    allowed = np.zeros(vocab_size, bool)
    allowed[:known] = [i not in special and bool(pattern.fullmatch(text)) for i, text in enumerate(texts)]
    if not allowed.any():
        raise UserError(f"data.allowed_tokens = {rule}: no token of this tokenizer is allowed by it")
    allowed[list(eos_ids)] = True
    return allowed


# --------------------------------------------------------------------------------------------------- reading


def decode_completion(
    tokenizer: Any, tokens: Sequence[int] | np.ndarray, prompt: str, *, form: Form
) -> tuple[str, Rewrite]:
    """What a completion's tokens say (special tokens apart), and the prompt it makes."""
    ids = [int(token) for token in tokens]
    if form == "append":
        # Decoded behind the prompt: a tokenizer drops the space before a text's first word, and here it is needed.
        start = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        head, whole = _decode(tokenizer, start), _decode(tokenizer, start + ids)
        written = whole[len(head) :] if whole.startswith(head) else _decode(tokenizer, ids)
    else:
        written = _decode(tokenizer, ids)
    return written, parse_rewrite(written, form, prompt)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def parse_rewrite(text: str, form: Form, prompt: str) -> Rewrite:
    """Reads a completion.

    In "rewrite": thinking blocks, code fences, opening remarks ("Sure, here is …:"), labels ("Prompt:"), list marks,
    bold marks and enclosing quotes go; the first line that is left is the prompt. In "append": the prompt and the
    first line of its continuation. In "text": the completion as it is.

    Args:
        text: The completion, decoded.
        form: How it was asked for.
        prompt: What the user wrote.

    Returns:
        The prompt to render. Without a letter or digit, or with a refusal, it is the user's, and not `usable`.
    """
    if form == "text":
        return Rewrite(text, True)
    if form == "append":
        line = text.partition("\n")[0]
        if not _has_words(line):
            return Rewrite(prompt, False)
        return Rewrite(_one_line(f"{prompt}{line}"), True)
    answer = _clean(_answer_line(_without_thinking(text)))
    if not _has_words(answer) or _REFUSAL.match(answer):
        return Rewrite(prompt, False)
    return Rewrite(answer, True)


def _without_thinking(text: str) -> str:
    """The text behind thinking; a block that never closes leaves nothing behind it."""
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _answer_line(text: str) -> str:
    """The first line that says something; opening remarks, bare labels and code fences do not."""
    for line in text.splitlines():
        bare = line.replace("**", "").strip()
        if bare.startswith("```") or _PREAMBLE.match(bare) or not _has_words(_LABEL.sub("", bare)):
            continue
        return bare
    return ""


def _clean(line: str) -> str:
    """Takes off list marks, labels and quotes, as often as there are any."""
    while True:
        cleaned = _unquote(_LABEL.sub("", _BULLET.sub("", _one_line(line))))
        if cleaned == line:
            return cleaned
        line = cleaned


def _unquote(line: str) -> str:
    """Without quotes that enclose all of it, or an opening one that was never closed (a truncated answer)."""
    if not line or line[0] not in _QUOTES:
        return line
    opening, closing = line[0], _QUOTES[line[0]]
    inner = line[1:]
    if closing not in inner:
        return inner
    end = inner.index(closing)
    # An apostrophe is no closing quote: 'a dog's life'.
    if closing in "'’" and end < len(inner) - 1:
        end = inner.rindex(closing) if opening not in inner[:end] and inner[end + 1].isalpha() else end
    rest = inner[end + 1 :].strip()
    return inner[:end] + rest if not rest.strip(".,;") else line


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _has_words(text: str) -> bool:
    return any(character.isalnum() for character in text)


# -------------------------------------------------------------------------------------------------- watching


class RewriteStatistics(NamedTuple):
    """What one iteration's rewrites look like.

    Attributes:
        words: Mean number of words.
        growth: Mean number of words more than the prompt has.
        duplicates: Share of rewrites that repeat an earlier one of the same prompt.
        unchanged: Share that equal their prompt.
        unusable: Share of completions for which the user's prompt had to stand in.
    """

    words: float
    growth: float
    duplicates: float
    unchanged: float
    unusable: float


def rewrite_statistics(
    prompts: Sequence[str],
    texts: Sequence[Sequence[str]],
    usable: Sequence[Sequence[bool]] | None = None,
) -> RewriteStatistics:
    """Describes the rewrites of one iteration.

    A watch on reward hacking: what rewrites look like, beside what they score. Words are compared without case.

    Args:
        prompts: P texts.
        texts: [P][G], what was rendered.
        usable: [P][G], false where the prompt stands in for a completion.
    """
    pairs = [(prompt, text) for prompt, group in zip(prompts, texts, strict=True) for text in group]
    if not pairs:
        raise ValueError("texts must hold at least one rewrite")
    words = growth = unchanged = 0
    for prompt, text in pairs:
        old, new = _WORDS.findall(prompt.casefold()), _WORDS.findall(text.casefold())
        words += len(new)
        growth += len(new) - len(old)
        unchanged += text == prompt
    repeated = sum(len(group) - len(set(group)) for group in texts)
    unusable = 0 if usable is None else sum(not flag for group in usable for flag in group)
    n = len(pairs)
    return RewriteStatistics(words / n, growth / n, repeated / n, unchanged / n, unusable / n)


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
