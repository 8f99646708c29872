"""Prompt enhancement: what the policy is asked, and how its answer becomes a prompt.

Two forms. *rewrite* asks a chat policy for a better prompt and reads its answer. *append* lets the policy continue the
user's prompt token by token; the prompt with its continuation is what is rendered. An answer that cannot be used never
reaches the renderer: the user's prompt does.
"""

from __future__ import annotations

import re
from typing import Literal

from grpo_jax.rollout.texts import Reading, continued

Form = Literal["rewrite", "append"]

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
_QUOTES = {'"': '"', "“": "”", "«": "»", "'": "'", "‘": "’", "`": "`"}


def parse_rewrite(text: str, form: Form, prompt: str) -> Reading:
    """Reads a completion.

    In "rewrite": thinking blocks, code fences, opening remarks ("Sure, here is …:"), labels ("Prompt:"), list marks,
    bold marks and enclosing quotes go; the first line that is left is the prompt. In "append": the prompt and the
    first line of its continuation.

    Args:
        text: The completion, decoded.
        form: How it was asked for.
        prompt: What the user wrote.

    Returns:
        The prompt to render. Without a letter or digit, or with a refusal, it is the user's, and not `usable`.
    """
    if form == "append":
        return continued(text, prompt)
    answer = _clean(_answer_line(_without_thinking(text)))
    if not _has_words(answer) or _REFUSAL.match(answer):
        return Reading(prompt, False)
    return Reading(answer, True)


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
