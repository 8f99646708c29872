"""What an environment answers as tokens: the next user's turn of the chat template, behind what the policy wrote."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.errors import UserError, said
from grpo_jax.models.hf import templates
from grpo_jax.models.hf.tokens import failures_named, prompt_encoder

_ASKED, _WRITTEN, _ANSWERED = "7316940582", "2850491637", "6081527394"
"""Stand for what was said when a template's frame is looked for: digits, which templates leave alone."""


def answer_encoder(
    tokenizer: Any,
    eos_ids: Sequence[int],
    *,
    vocab_size: int | None = None,
    picture: Sequence[int] = (),
    **switches: Any,
) -> Callable[[str, bool, Sequence[int]], list[int]]:
    """encode(answer, ended, pictures) → the tokens between a text of the policy's and its next one.

    All of an answer is text, whatever it says. The tokens follow the end token that the policy wrote; where it was cut
    off before one (not `ended`) they begin with it. A tokenizer without a chat template gets the answer as plain text.

    Args:
        tokenizer: A Hugging Face tokenizer.
        eos_ids: What ends a text of the policy's.
        vocab_size: V, the model's; a token beyond it is refused.
        picture: The tokens before, of and behind a picture; its own stands as often as `pictures` says of each, and
            they all come before the text. () for a model that sees none.
        **switches: What the template is told beside the messages.

    Raises:
        UserError: The template fails, or shows no second turn of a user; or (``encode``) as `prompt_encoder`.
    """
    own = tokenizer.eos_token_id
    end = [own] if own in eos_ids else list(eos_ids)[:1]
    names = tokenizer.convert_ids_to_tokens(list(picture))

    def tail_of(content: Any) -> str:
        """What the template writes behind the policy's text where the user then says this."""
        roles = zip(("user", "assistant", "user"), (_ASKED, _WRITTEN, content), strict=True)
        text = _rendered(tokenizer, [{"role": role, "content": content} for role, content in roles], switches)
        return text.partition(_WRITTEN)[2]

    def knows_pictures(count: int) -> bool:
        try:
            return tail_of(_parts(_ANSWERED, count)).count(names[1]) == count
        except UserError:  # it takes texts alone
            return False

    @functools.cache
    def framed(count: int) -> tuple[Callable[[str], list[int]], bool]:
        """The encoder of answers with so many pictures, and whether what it gives closes the policy's text first."""
        marks, encoder = (
            "".join(names) * count,
            functools.partial(prompt_encoder, tokenizer, add_special_tokens=False, vocab_size=vocab_size),
        )
        if not getattr(tokenizer, "chat_template", None):
            return encoder(lambda answer: marks + answer), False
        in_parts = count > 0 and knows_pictures(count)

        def render(answer: str) -> str:
            return tail_of(_parts(answer, count) if in_parts else marks + answer)

        head, found, _ = render(_ANSWERED).partition(_ANSWERED)
        if not found:
            raise UserError(
                f"the chat template of {said(tokenizer.name_or_path or 'the policy')} shows no second turn of a user: "
                "sampling.turns must be 1"
            )
        with failures_named(tokenizer):
            before = tokenizer(head, add_special_tokens=False)["input_ids"]
        return encoder(render), not set(eos_ids).isdisjoint(before)

    def encode(answer: str, ended: bool, pictures: Sequence[int] = ()) -> list[int]:
        encode_text, closes = framed(len(pictures))
        ids = encode_text(answer)
        opened = next(place for place, token in enumerate(ids) if token in eos_ids) + 1 if closes else 0
        closing = [] if ended else ids[:opened] or end
        sizes, shown = iter(pictures), picture[1] if picture else None
        repeated = ([token] * next(sizes) if token == shown else [token] for token in ids[opened:])
        return [*closing, *(token for tokens in repeated for token in tokens)]

    framed(0)  # a template that cannot do it is told before anything slow
    return encode


def _parts(answer: str, pictures: int) -> list[dict[str, str]]:
    return [*({"type": "image"} for _ in range(pictures)), {"type": "text", "text": answer}]


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], switches: Mapping[str, Any]) -> str:
    try:
        return templates.render(tokenizer, messages, **switches)
    except templates.TemplateFailed as error:
        raise UserError(
            f"the chat template of {said(tokenizer.name_or_path or 'the policy')} failed on a conversation ({error}): "
            "mend it, or leave sampling.turns at 1"
        ) from error
