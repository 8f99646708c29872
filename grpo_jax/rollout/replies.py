"""What an environment answers, checked and turned into the tokens that the policy reads next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from grpo_jax.errors import UserError, is_own_doing, one_line
from grpo_jax.models.hf.chat import answer_encoder
from grpo_jax.models.vision.pictures import placed
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.episodes import Answer, AnswerError, Episode, Respond, answers_of, checked
from grpo_jax.rollout.pipeline import at_work
from grpo_jax.rollout.rewards import reason_of

EncodeAnswer = Callable[[Answer, bool, Sequence[Any]], list[int]]
"""(answer, whether the text before it ended, rows and columns of each picture) → the tokens up to the next text."""


class ReplyTokens(NamedTuple):
    """Answers as the policy reads them, on the host.

    Attributes:
        tokens: i32 [P, G, A], padded on the right.
        mask: bool [P, G, A]; nothing where a completion does not go on.
        pictures: `Pictures` [P, G, I, ..] among it, or None.
    """

    tokens: np.ndarray
    mask: np.ndarray
    pictures: Any = None


class Answering(NamedTuple):
    """What a task of several turns answers with.

    Attributes:
        turns: How often the policy writes, at most.
        respond: The environment.
        encode_answer: Of `make_encode_answer`.
        stream_tokens: Most tokens of an episode.
        pad_id: Fills up.
        lenient: Whether a completion that cannot be answered goes without rewards; otherwise it ends the run.
        eos_ids: Tokens that end a text as the chat template does; a text that ended otherwise is ended for it.
    """

    turns: int
    respond: Respond
    encode_answer: EncodeAnswer
    stream_tokens: int
    pad_id: int
    lenient: bool = False
    eos_ids: tuple[int, ...] = ()


class Replies(NamedTuple):
    """Answers to some completions of a chunk.

    Attributes:
        answers: One each; None where the environment failed.
        going: Whether the policy writes again.
        failed: Whether the environment failed.
        tokens: To all of the chunk, [P, G, A].
    """

    answers: list[Answer | None]
    going: list[bool]
    failed: list[bool]
    tokens: ReplyTokens


def make_encode_answer(
    tokenizer: Any, *, eos_ids: Sequence[int], vocab_size: int, limit: int, vision: Any = None, **template_options: Any
) -> EncodeAnswer:
    """Make the function from an answer to the tokens between the policy's text and its next one.

    Args:
        tokenizer: The policy's.
        eos_ids: What ends the policy's texts.
        vocab_size: V, the model's.
        limit: Tokens that an answer may take (`sampling.max_answer_tokens`).
        vision: The tower's config, or None for a policy that reads text alone.
        **template_options: What the chat template is told beside the messages, as for its prompts.

    Raises:
        UserError: The chat template does not go on after an answer. The function raises `AnswerError` for an answer
            that is too long, or has no tokens.
    """
    picture = () if vision is None else (vision.vision_start_token, vision.image_token, vision.vision_end_token)
    encode = answer_encoder(tokenizer, eos_ids, vocab_size=vocab_size, picture=picture, **template_options)

    def encode_answer(answer: Answer, ended: bool, grids: Sequence[Any] = ()) -> list[int]:
        pictures = [int(rows) * int(columns) // vision.merged for rows, columns in grids] if vision else []
        try:
            ids = encode(answer.text, ended, pictures)
        except UserError as error:
            raise AnswerError(f"its answer: {error}") from error
        if len(ids) > limit:
            raise AnswerError(
                f"its answer {one_line(repr(answer.text[:40]), 50)} takes {len(ids)} tokens with the chat template's "
                f"marks{' and its pictures' if pictures else ''}; sampling.max_answer_tokens is {limit}"
            )
        return ids

    return encode_answer


def collect_answers(
    respond: Respond, rows: Sequence[Row], episodes: Sequence[Episode], *, on_error: Literal["raise", "missing"]
) -> list[Answer | None]:
    """Ask the environment for its answer to each episode; None where it failed to give one.

    Args:
        respond: The environment.
        rows: The row of each episode.
        episodes: Those that can go on.
        on_error: What an environment does that raises (SystemExit too), gives another number of answers, or something
            that is no answer: "raise" raises; "missing" gives None, for all in the first two cases.

    Raises:
        AnswerError: As `on_error` says.
        StopRun: The environment raised it, whatever `on_error` says.
    """
    at_work("the environment")
    try:
        returned = answers_of(respond, rows, episodes)
    except BaseException as error:
        if not is_own_doing(error):
            raise
        if on_error == "missing":
            return [None] * len(episodes)
        if isinstance(error, AnswerError):
            raise
        raise AnswerError(str(error) if isinstance(error, UserError) else reason_of(error)) from error
    answers: list[Answer | None] = []
    for number, answer in enumerate(returned):
        try:
            answers.append(checked(answer))
        except ValueError as error:
            if on_error == "raise":
                text = one_line(repr(episodes[number].last.text[:40]), 50)
                raise AnswerError(f"it answered {error} to completion {number} ({text})") from error
            answers.append(None)
    return answers


def ask_environment(
    answering: Answering,
    prepare: Callable[[Any], Any] | None,
    rows: Sequence[Row],
    episodes: Sequence[Episode],
    ended: Sequence[bool],
    places: Sequence[tuple[int, int]],
    shape: tuple[int, ...],
) -> Replies:
    """Answers to some completions of a chunk, and their tokens.

    Args:
        answering: The task's.
        prepare: `Environment.prepare`.
        rows: Of each of them.
        episodes: Likewise.
        ended: Whether each one's last text came to its end.
        places: (p, g) of each.
        shape: (P, G).

    Raises:
        AnswerError: The environment failed, and is not to be passed over.
        StopRun: The environment raised it.
    """
    answers = collect_answers(answering.respond, rows, episodes, on_error="missing" if answering.lenient else "raise")
    failed = [answer is None for answer in answers]
    going = [answer is not None and not answer.done for answer in answers]
    shown = [answer.pictures if answer is not None and on else () for answer, on in zip(answers, going, strict=True)]
    pictures = None
    encoded: list[list[list[int]]] = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
    try:
        pictures = prepared(prepare, shown, places, shape)
    except AnswerError:
        if not answering.lenient:
            raise
        failed = [broken or bool(own) for broken, own in zip(failed, shown, strict=True)]
    for number, ((p, g), answer) in enumerate(zip(places, answers, strict=True)):
        if answer is None or failed[number] or not going[number]:
            continue
        grids = [] if pictures is None else list(np.asarray(pictures.grid[p, g])[: len(answer.pictures)])
        try:
            encoded[p][g] = answering.encode_answer(answer, ended[number], grids)
        except AnswerError:
            if not answering.lenient:
                raise
            failed[number] = True
    going = [on and not broken for on, broken in zip(going, failed, strict=True)]
    return Replies(answers, going, failed, _padded(encoded, answering.pad_id, pictures))


def _padded(encoded: Sequence[Sequence[Sequence[int]]], pad_id: int, pictures: Any) -> ReplyTokens:
    """Token lists `[P][G]` as arrays; at least one place wide."""
    width = max(1, *(len(tokens) for group in encoded for tokens in group))
    array = np.full((len(encoded), len(encoded[0]), width), pad_id, np.int32)
    mask = np.zeros(array.shape, bool)
    for p, group in enumerate(encoded):
        for g, tokens in enumerate(group):
            array[p, g, : len(tokens)] = tokens
            mask[p, g, : len(tokens)] = True
    return ReplyTokens(array, mask, pictures)


def prepared(
    prepare: Callable[[Any], Any] | None,
    shown: Sequence[Sequence[Any]],
    places: Sequence[tuple[int, int]],
    shape: tuple[int, ...],
) -> Any:
    """The pictures that some completions are shown, as `Pictures` [P, G, I, ..]; None where there are none."""
    owners = [place for place, own in zip(places, shown, strict=True) for _ in own]
    sources = [picture for own in shown for picture in own]
    if not sources:
        return None
    if prepare is None:
        raise AnswerError("it answered with a picture, and the policy reads text alone")
    try:
        return placed(prepare(_stacked(sources)), owners, shape)
    except BaseException as error:
        if not is_own_doing(error):
            raise
        reason = str(error) if isinstance(error, UserError | ValueError) else reason_of(error)
        raise AnswerError(f"its picture: {one_line(reason, 150)}") from error


def _stacked(sources: list[Any]) -> Any:
    """Pictures drawn in torch, of one size, as one tensor, which stays where it is; others as they are."""
    drawn = all(hasattr(one, "detach") and one.is_floating_point() and one.ndim == 3 for one in sources)
    if not drawn or len({(one.shape, one.dtype, one.device) for one in sources}) > 1:
        return sources
    import torch

    return torch.stack(sources)
