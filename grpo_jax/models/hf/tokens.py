"""Texts to tokens, so that marks such as ``<|im_end|>`` come from a folder's template and never from what a user wrote.

A tokenizer reads its marks wherever they stand in a text. A prompt whose marks are those of its template is encoded as
a whole, as transformers does. Any other holds text that looks like a mark: its own text is then encoded apart, with the
marks switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_jax.errors import UserError, shown

_PLACEHOLDER = "7316940582"
"""Stands for a prompt when its frame is looked for: templates that trim, capitalise or escape leave digits alone."""


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of all marks: those that it has a name for, and reserved ones, chat marks and the like."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {token for token, what in added if what.special}


def chat_renderer(tokenizer: Any, **switches: Any) -> Callable[[str], str]:
    """render(content) → the chat template's text for a user's turn, with the answer left open.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template; it is rendered in jinja's sandbox.
        **switches: What the template is told beside the messages.

    Raises:
        UserError: (``render``) the template fails, does what the sandbox forbids, or writes nothing.
    """

    def render(content: str) -> str:
        turn = [{"role": "user", "content": content}]
        try:
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **switches)
        except Exception as error:  # a template is a program: it raises what it likes
            reason = f"{type(error).__name__}: {_line(error)}"
            raise UserError(f"{_template(tokenizer)} failed ({reason}): mend or replace it") from error
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{_template(tokenizer)} writes nothing for a user's turn: mend or replace it")
        return text

    return render


def prompt_encoder(
    tokenizer: Any, render: Callable[[str], str], *, add_special_tokens: bool, vocab_size: int | None = None
) -> Callable[[str], list[int]]:
    """encode(prompt) → the tokens of ``render(prompt)``, with the marks of the frame around the prompt and no others.

    Args:
        tokenizer: A Hugging Face tokenizer, fast or slow.
        render: Puts a prompt into its frame: a chat template, an instruction.
        add_special_tokens: Whether the tokenizer adds its own, such as a begin token.
        vocab_size: V, the model's; a token beyond it is refused.

    Raises:
        UserError: The tokenizer fails; or (``encode``) a prompt has no tokens, one that the model lacks, or text like a
            mark inside a template that does not keep it apart.
    """
    marks = _marks(tokenizer)

    def tokens_of(text: str, **choices: Any) -> list[int]:
        with failures_named(tokenizer):
            return list(tokenizer(text, **choices)["input_ids"])

    def marks_in(ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in marks]

    def whole(text: str) -> list[int]:
        return tokens_of(text, add_special_tokens=add_special_tokens)

    frame = render(_PLACEHOLDER)
    expected = marks_in(whole(frame))

    def apart(text: str) -> list[int] | None:
        """The prompt's part of a rendered text encoded by itself; None where the template does not show it."""
        head, found, rest = frame.partition(_PLACEHOLDER)
        tail = rest.rpartition(_PLACEHOLDER)[2]
        if not (found and len(text) >= len(head + tail) and text.startswith(head) and text.endswith(tail)):
            return None
        inner = plain_tokens(tokenizer, text[len(head) : len(text) - len(tail)])
        outer = [tokens_of(part, add_special_tokens=False) if part else [] for part in (head, tail)]
        before, after = _added(whole(frame), tokens_of(frame, add_special_tokens=False))
        ids = [*before, *outer[0], *inner, *outer[1], *after]
        return ids if marks_in(ids) == expected else None

    def encode(prompt: str) -> list[int]:
        text = render(prompt)
        ids = whole(text)
        if marks_in(ids) != expected:
            ids = apart(text)
        if ids is None:
            raise UserError(
                f"prompt {shown(prompt)} holds text that the tokenizer of {_folder(tokenizer)} reads as a mark, and "
                "its template does not keep them apart: take it out"
            )
        if not ids:
            raise UserError(f"prompt {shown(prompt)} has no tokens in the tokenizer of {_folder(tokenizer)}")
        if vocab_size is not None and max(ids) >= vocab_size:
            raise UserError(
                f"the tokenizer of {_folder(tokenizer)} gives token {max(ids)}, and the model has {vocab_size} "
                "(config.json, vocab_size): it is another model's tokenizer"
            )
        return ids

    return encode


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text by itself, without marks: what looks like one is text."""
    marks = _marks(tokenizer)
    with failures_named(tokenizer):
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if marks.isdisjoint(ids):
            return ids
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    # A tokenizer of whole words finds marks among its words: they are unknown ones then.
    unknown = [] if tokenizer.unk_token_id in (None, *marks) else [tokenizer.unk_token_id]
    return [piece for token in ids for piece in (unknown if token in marks else [token])]


@contextmanager
def failures_named(tokenizer: Any) -> Iterator[None]:
    """Makes a tokenizer's failure a user's mistake; in Rust it is a panic, which is no ``Exception``.

    Raises:
        UserError: It failed.
    """
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        reason = f"{type(error).__name__}: {_line(error)}"
        raise UserError(f"the tokenizer of {_folder(tokenizer)} failed ({reason}); copy its files again") from error


def is_failure(error: BaseException) -> bool:
    """Whether it tells of something broken, a panic among them, rather than of an end that is asked for."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _marks(tokenizer: Any) -> frozenset[int]:
    """Special ids, but for one that stands for unknown words and nothing else."""
    others = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    return special_ids(tokenizer) - ({tokenizer.unk_token_id} - others)


def _added(whole: list[int], bare: list[int]) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind a text."""
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _folder(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or "the policy"


def _template(tokenizer: Any) -> str:
    return f"the chat template of {_folder(tokenizer)} (chat_template.jinja, or in tokenizer_config.json)"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return text if len(text) <= 100 else f"{text[:99]}…"
