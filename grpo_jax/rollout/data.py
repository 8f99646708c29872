"""Rows of a data set: their split into parts, and their order in training.

The order of an epoch, the rows of a batch and the noise of a picture depend only on (seed, number). A checkpoint thus
stores one number.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from grpo_jax.errors import UserError, short_name
from grpo_jax.models.hf.chat import PICTURE, Fixed, Message, Part
from grpo_jax.models.vision.pictures import Pictures
from grpo_jax.rollout.pictures import File, Source, content_of, digest

SPLITS = ("train", "validation", "test")
RESERVED_COLUMNS = (
    *("prompts", "completions", "completion_ids", "image", "images", "baseline_images", "pictures", "episodes"),
    *("trainer_state", "log_metric", "log_extra", "prompt_messages", "completion_messages", "is_conversation"),
    "place_in_group",
)
"""Names that rewards receive from the trainer; a column of the same name would be lost."""

PICTURE_MARK = "<image>"
"""Place of a picture in a prompt of plain text; it occurs once per picture, or never."""
Result = TypeVar("Result")
_WORD = 2**32
# Purposes of a seed: each has its own stream of random numbers.
_ORDER, _NOISE, _EVALUATION_NOISE, _FURTHER = 1, 2, 3, 4


@dataclass(frozen=True)
class Row:
    """One prompt of a data set."""

    id: int  # constant: the line in the file (from 1), or the position in the built-in list
    prompt: str  # the user's text
    columns: dict[str, Any] = field(default_factory=dict)  # the row's other fields, passed to the rewards
    pictures: tuple[Source, ...] = ()  # pictures of the prompt in order, as sources that `rollout.pictures` reads
    messages: tuple[Message, ...] = ()  # the conversation to continue, with the row's pictures; () for the prompt alone

    @property
    def key(self) -> str:
        """Return a string that identifies prompt, pictures and conversation."""
        if not (self.pictures or self.messages):
            return self.prompt
        messages = [(message.role, message.parts) for message in self.messages]
        return repr((self.prompt, messages, [digest(source) for source in self.pictures]))


def map_pictures(row: Row, function: Callable[[Source], Result]) -> list[Result]:
    """Return function(source) of each picture of a row; OSError and ValueError become a UserError with row and file."""
    results = []
    for place, source in enumerate(row.pictures, 1):
        try:
            results.append(function(source))
        except (OSError, ValueError) as error:
            which = f"picture {place}" if len(row.pictures) > 1 else "picture"
            name = f" {short_name(source.name)}" if isinstance(source, File) else ""
            raise UserError(f"row {row.id}, {which}{name}: {error}") from error
    return results


FACTS = np.dtype(
    [(name, np.int64) for name in ("id", "place", "text_bytes", "pictures", "messages")]
    + [("digest", "S32"), ("content", "S16"), ("split", np.int8)]
)
"""Facts of a row that is not held: its id, its place in the source, bytes of all its text, its pictures and messages
(0 for a prompt alone), hashes of its prompt and of all that it holds, and its place in `SPLITS`, or `NO_SPLIT`."""
NO_SPLIT = -1


def facts_of(row: Row, place: int = 0, split: int = NO_SPLIT) -> tuple:
    """Return the entries of `FACTS` of a row; columns that are not valid JSON count as null."""
    content = (row.prompt, [(message.role, message.parts) for message in row.messages], len(row.pictures), row.columns)
    text = json.dumps(content, default=lambda value: None, skipkeys=True)
    return (
        *(row.id, place, text_bytes(row), len(row.pictures), len(row.messages)),
        *(hashlib.sha256(row.key.encode()).digest(), hashlib.blake2b(text.encode(), digest_size=16).digest(), split),
    )


def text_bytes(row: Row) -> int:
    """Count the bytes of all text of a row."""
    return sum(len(text.encode()) for text in [message.text for message in row.messages] or [row.prompt])


class Rows(Sequence[Row]):
    """Lazy rows: make(place) makes one on each access, and their source is not copied."""

    def __init__(self, make: Callable[[int], Row], facts: np.ndarray):
        self.make = make
        self.facts = facts  # `FACTS` [n]

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, index: Any) -> Any:
        """Return a row, or a list of rows for a slice."""
        if isinstance(index, slice):
            return tuple(map(self.make, self.facts["place"][index].tolist()))
        return self.make(int(self.facts["place"][index]))

    def take(self, which: np.ndarray) -> Rows:
        """Return some rows, by place or by mask."""
        return Rows(self.make, self.facts[which])


def row_facts(rows: Sequence[Row]) -> np.ndarray:
    """Return the `FACTS` [n] of rows."""
    return rows.facts if isinstance(rows, Rows) else np.array([facts_of(row) for row in rows], FACTS)


class PromptSet(NamedTuple):
    """Splits of a data set: one to train on, one to choose the best checkpoint, one to report."""

    train: Sequence[Row]
    validation: Sequence[Row]
    test: Sequence[Row]


def all_rows(prompts: PromptSet) -> Rows:
    """Return the rows of all splits, concatenated."""
    ends = np.cumsum([len(part) for part in prompts]).tolist()

    def make(place: int) -> Row:
        which = bisect.bisect_right(ends, place)
        return prompts[which][place - ends[which]]  # a negative index, from the end of the split

    facts = np.concatenate([row_facts(part) for part in prompts])
    facts["place"] = np.arange(len(facts))
    return Rows(make, facts)


TRAINING_ROWS, HELD_OUT_PICTURES = "training rows", "held-out pictures"


def data_identity(prompts: PromptSet) -> dict[str, str]:
    """Return a digest of each split's rows, and of held-out pictures, by which a resumed run recognises its data."""
    digests, pictures = {}, hashlib.sha256()
    for name, rows in zip((TRAINING_ROWS, "validation rows", "test rows"), prompts, strict=True):
        facts = row_facts(rows)
        digests[name] = f"{len(rows)} of digest {hashlib.sha256(facts['content'].tobytes()).hexdigest()[:12]}"
        for place in () if name == TRAINING_ROWS else np.flatnonzero(facts["pictures"]).tolist():
            for content in map_pictures(rows[place], content_of):
                pictures.update(content)
            digests[HELD_OUT_PICTURES] = f"digest {pictures.hexdigest()[:12]}"
    return digests


def split_places(digests: np.ndarray, *, held_out: int | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sorted places of the rows for training, validation and testing.

    Prompts are ranked by their hashes S32 [n], of text and pictures. The first are for testing, and as many next for
    validation. The split depends on neither order nor seed, keeps duplicates together, and moves few rows if a file
    grows. `held_out` is the number (int) or share (float, rounded; at least one if above 0) of the different prompts
    in each of the two splits. One prompt that all rows repeat is not held out.
    """
    prompts, ranks = np.unique(digests, return_inverse=True)
    share = held_out if isinstance(held_out, int) else round(held_out * len(prompts))
    count = max(share, 1) if held_out > 0 and len(prompts) > 1 else 0
    if 2 * count >= len(prompts):
        raise UserError(
            f"{len(prompts)} different prompts are too few to keep {count} for testing and {count} for validation: "
            f"lower held_out ({held_out}) or add prompts"
        )
    test = ranks < count
    train = ranks >= 2 * count
    return np.flatnonzero(train), np.flatnonzero(~(test | train)), np.flatnonzero(test)


def _seed_sequence(*numbers: int) -> np.random.SeedSequence:
    """Make a seed from integers in [0, 2**64), two words each, so different tuples give different entropy."""
    return np.random.SeedSequence([word for number in numbers for word in (number % _WORD, number // _WORD)])


@functools.lru_cache(maxsize=2)  # each batch of an epoch asks for it
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order in which an epoch visits ``n`` rows: a permutation i64 [n], a function of (seed, epoch)."""
    order = _permutation(n, _ORDER, seed, epoch)
    order.flags.writeable = False
    return order


def _permutation(n: int, *numbers: int) -> np.ndarray:
    # NumPy keeps the raw bits of a named generator stable across versions, but not its permutations.
    return np.argsort(np.random.PCG64(_seed_sequence(*numbers)).random_raw(n), kind="stable")


def batches_per_epoch(n: int, batch_size: int) -> int:
    """Count the full batches in one epoch over ``n`` rows; UserError if there is none."""
    if n < batch_size:
        raise UserError(f"a batch takes {batch_size} different prompts and there are {n}: lower it or add prompts")
    return n // batch_size


def batch_at(seed: int, iteration: int, *, batch_size: int, n: int) -> np.ndarray:
    """Return the rows of a batch, i64 [P]; iterations count from 0 over the whole run.

    A batch never crosses an epoch, so its rows are all different. Random numbers depend on the prompt's id, so a
    prompt twice in a batch would get the same completions twice. Raises as `batches_per_epoch`.
    """
    epoch, batch = divmod(iteration, batches_per_epoch(n, batch_size))
    return epoch_order(seed, epoch, n)[batch * batch_size : (batch + 1) * batch_size]


def draw_at(seed: int, iteration: int, draw: int, *, batch_size: int, n: int) -> np.ndarray:
    """Return the rows of a draw of an iteration, i64 [P]: draw 0 is its batch, later draws replace missing signal.

    The order is the iteration's batch, then all other rows shuffled. Each draw takes the next P rows and wraps around
    at the end. Within a draw all rows are different.
    """
    batch = batch_at(seed, iteration, batch_size=batch_size, n=n)
    if draw == 0:
        return batch
    shuffled = _permutation(n, _FURTHER, seed, iteration)
    drawn = np.concatenate([batch, shuffled[~np.isin(shuffled, batch)]])
    return drawn[np.arange(draw * batch_size, (draw + 1) * batch_size) % n]


def noise_seed(seed: int, iteration: int, prompt_id: int, *, evaluation: bool = False) -> int:
    """Return the seed of the initial noise of one prompt's pictures, an integer in [0, 2**63).

    The prompt and all its rewrites are rendered from the same noise (common random numbers). Pictures of a group thus
    differ only by their words. In evaluation the seed does not depend on the iteration.
    """
    purpose, visit = (_EVALUATION_NOISE, 0) if evaluation else (_NOISE, iteration)
    state = _seed_sequence(purpose, seed, visit, prompt_id, 0).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


class Encoded(NamedTuple):
    """Token ids on the host, and their mask: prompts [P, L], left-padded, or observations [P, G, A], right-padded.

    The ids are i32, the mask is bool. Placeholder tokens mark the pictures; `pictures` [P, I, ..] or [P, G, I, ..] is
    None without any.
    """

    tokens: np.ndarray
    mask: np.ndarray
    pictures: Pictures | None = None


def messages_of(row: Row, instruction: str = "", system: str = "") -> tuple[Message, ...]:
    """Return a row's messages, or one user message with its pictures, instruction and prompt; then add `system`.

    The instruction contains {prompt}, which the prompt replaces. UserError for an instruction beside a row that has
    its own messages. The system message comes first, unless the row begins with one.
    """
    before = (Message("system", (Fixed(system),)),) if system else ()
    if row.messages:
        if instruction:
            raise UserError(f"row {row.id} is a conversation, which has its own words: leave data.instruction empty")
        return row.messages if row.messages[0].role == "system" else (*before, *row.messages)
    parts: list[Part] = [PICTURE] * len(row.pictures)
    prompt: list[Part] = [row.prompt]
    if row.pictures and row.prompt.count(PICTURE_MARK) == len(row.pictures) and instruction.count("{prompt}") <= 1:
        pieces = re.split(f"({PICTURE_MARK})", row.prompt)
        prompt = [PICTURE if piece == PICTURE_MARK else piece for piece in pieces if piece]
        parts = []
    for piece in re.split(r"(\{prompt\})", instruction or "{prompt}"):
        if piece == "{prompt}":
            parts += prompt
        elif piece:
            parts.append(Fixed(piece))
    return (*before, Message("user", tuple(parts)))


def as_chat_messages(row: Row) -> list[dict[str, object]]:
    """Return a row's messages as chat messages; a picture is {"type": "image"}."""
    chat = []
    for message in messages_of(row):
        parts = [{"type": "image"} if part is PICTURE else {"type": "text", "text": part} for part in message.parts]
        chat.append({"role": message.role, "content": parts if PICTURE in message.parts else message.text})
    return chat
