"""Rows of a data set: how they are split, and the order in which training visits them.

The order of an epoch, the rows of a batch and the noise of a picture are functions of (seed, number) alone, so that a
checkpoint stores one number.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from grpo_jax.errors import UserError, short_name
from grpo_jax.models.hf.chat import PICTURE, Fixed, Message, Part
from grpo_jax.rollout.pictures import File, Source, digest

if TYPE_CHECKING:
    from grpo_jax.config.sections import TrainingSection

SPLITS = ("train", "validation", "test")
RESERVED_COLUMNS = (
    *("prompts", "completions", "completion_ids", "image", "images", "baseline_images", "pictures", "episodes"),
    *("trainer_state", "log_metric", "prompt_messages", "completion_messages", "place_in_group"),
)
"""Names that rewards receive from the trainer; a column of the same name would be lost."""

PICTURE_MARK = "<image>"
"""In a prompt of plain text, the place of a picture: as often as there are pictures, or never."""
Result = TypeVar("Result")
_WORD = 2**32
# What a seed is for: one number never serves two purposes.
_ORDER, _NOISE, _EVALUATION_NOISE, _FURTHER, _LIKE = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Row:
    """One prompt of a data set.

    Attributes:
        id: Never changes: its line in the file (from 1), or its place in the built-in list.
        prompt: The user's text.
        columns: The row's other fields, passed to the rewards.
        pictures: Those of the prompt, in its order: sources as `rollout.pictures` reads them.
        messages: The conversation that is to be answered, its pictures those of the row; () for the prompt alone.
    """

    id: int
    prompt: str
    columns: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[Source, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def key(self) -> str:
        """Text that is equal for equal prompts, pictures and conversations alone."""
        if not (self.pictures or self.messages):
            return self.prompt
        messages = [(message.role, message.parts) for message in self.messages]
        return repr((self.prompt, messages, [digest(source) for source in self.pictures]))


def map_pictures(row: Row, function: Callable[[Source], Result]) -> list[Result]:
    """Return function(source) of each picture of a row; a ValueError becomes a UserError with row and file."""
    results = []
    for place, source in enumerate(row.pictures, 1):
        try:
            results.append(function(source))
        except ValueError as error:
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
    """Return the entries of `FACTS` of a row; columns that JSON does not have count as null."""
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
    """Rows that make(place) makes on each access; their source is not copied."""

    def __init__(self, make: Callable[[int], Row], facts: np.ndarray):
        self.make = make
        self.facts = facts  # `FACTS` [n]

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, index: Any) -> Any:
        """A row; of a slice all of them, made."""
        if isinstance(index, slice):
            return tuple(map(self.make, self.facts["place"][index].tolist()))
        return self.make(int(self.facts["place"][index]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(Row.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def take(self, which: np.ndarray) -> Rows:
        """Return some of them, by place or by mask."""
        return Rows(self.make, self.facts[which])


def row_facts(rows: Sequence[Row]) -> np.ndarray:
    """Return the `FACTS` [n] of rows."""
    return rows.facts if isinstance(rows, Rows) else np.array([facts_of(row) for row in rows], FACTS)


class PromptSet(NamedTuple):
    """Parts of a data set: one to learn from, one to choose the best checkpoint, one to report."""

    train: Sequence[Row]
    validation: Sequence[Row]
    test: Sequence[Row]


def all_rows(prompts: PromptSet) -> Rows:
    """Return the rows of its parts, one part behind another."""
    ends = np.cumsum([len(part) for part in prompts]).tolist()

    def make(place: int) -> Row:
        which = bisect.bisect_right(ends, place)
        return prompts[which][place - ends[which]]  # from its end

    facts = np.concatenate([row_facts(part) for part in prompts])
    facts["place"] = np.arange(len(facts))
    return Rows(make, facts)


TRAINING_ROWS = "training rows"


def data_identity(prompts: PromptSet) -> dict[str, str]:
    """Return a digest of the rows of each part, by which a resumed run knows its data."""
    digests = {}
    for name, rows in zip((TRAINING_ROWS, "validation rows", "test rows"), prompts, strict=True):
        content = row_facts(rows)["content"].tobytes()
        digests[name] = f"{len(rows)} of digest {hashlib.sha256(content).hexdigest()[:12]}"
    return digests


def one_prompt(rows: Sequence[Row]) -> bool:
    """Return whether all rows have the same prompt."""
    return len(np.unique(row_facts(rows)["digest"])) == 1


def split_places(digests: np.ndarray, *, held_out: int | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the places of the rows to train on, to validate with and to test with, each in order.

    Prompts are ranked by their hashes S32 [n], of text and pictures; the first are for testing, as many next
    for validation. The choice depends on no order and no seed, a prompt's duplicates follow it, and adding rows to a
    file moves few others. `held_out` is the number of different prompts (int) or the share of them (float, rounded; at
    least one if above 0) that each of the two parts gets. One prompt that all rows repeat is not held out.
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
    """Make a seed of integers in [0, 2**64), two words each, so that different tuples are different entropy."""
    return np.random.SeedSequence([word for number in numbers for word in (number % _WORD, number // _WORD)])


@functools.lru_cache(maxsize=2)  # each batch of an epoch asks for it
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order in which an epoch visits ``n`` rows: a permutation i64 [n], a function of (seed, epoch)."""
    order = _permutation(n, _ORDER, seed, epoch)
    order.flags.writeable = False
    return order


def _permutation(n: int, *numbers: int) -> np.ndarray:
    # Raw bits of a named generator are stable over NumPy's versions; its permutations are not promised to be.
    return np.argsort(np.random.PCG64(_seed_sequence(*numbers)).random_raw(n), kind="stable")


def batches_per_epoch(n: int, batch_size: int) -> int:
    """Count the batches in one pass over ``n`` rows, the rest left over; UserError if there is none."""
    if n < batch_size:
        raise UserError(f"a batch takes {batch_size} different prompts and there are {n}: lower it or add prompts")
    return n // batch_size


def batch_at(seed: int, iteration: int, *, batch_size: int, n: int) -> np.ndarray:
    """Return the rows of a batch, i64 [P]; iterations count from 0 over the whole run.

    A batch never crosses an epoch, so its rows are all different: random numbers belong to a prompt's id, and a
    prompt that stood twice in a batch would get the same completions twice. Raises as `batches_per_epoch`.
    """
    epoch, batch = divmod(iteration, batches_per_epoch(n, batch_size))
    return epoch_order(seed, epoch, n)[batch * batch_size : (batch + 1) * batch_size]


def like_batch_at(seed: int, iteration: int, *, batch_size: int, lengths: np.ndarray, window: int = 32) -> np.ndarray:
    """Return the rows of a batch of similar lengths, i64 [P]; raises as `batches_per_epoch`.

    The rows of `window` batches (at the end of an epoch fewer, so that each row comes once) are sorted by their
    `lengths` [n], and these batches visited in a random order.
    """
    n = len(lengths)
    epoch, batch = divmod(iteration, batches_per_epoch(n, batch_size))
    first = batch - batch % window
    rows = epoch_order(seed, epoch, n)[first * batch_size : min(first + window, n // batch_size) * batch_size]
    rows = rows[np.argsort(lengths[rows], kind="stable")].reshape(-1, batch_size)
    return rows[_permutation(len(rows), _LIKE, seed, epoch, first)[batch - first]]


def iterations_in_all(section: TrainingSection, n: int) -> int:
    """Count the iterations of a run over ``n`` rows; raises as `batches_per_epoch`."""
    return section.max_steps or section.num_epochs * batches_per_epoch(n, section.prompts_per_batch)


def draw_at(seed: int, iteration: int, draw: int, *, batch_size: int, n: int) -> np.ndarray:
    """Return the rows of a draw of an iteration, i64 [P]: its batch (0), then more where that lacks signal.

    The order is the iteration's batch, then all other rows shuffled; a draw takes the next stretch, from the start
    again at the end. Within a draw all rows are different.
    """
    batch = batch_at(seed, iteration, batch_size=batch_size, n=n)
    if draw == 0:
        return batch
    shuffled = _permutation(n, _FURTHER, seed, iteration)
    drawn = np.concatenate([batch, shuffled[~np.isin(shuffled, batch)]])
    return drawn[np.arange(draw * batch_size, (draw + 1) * batch_size) % n]


def noise_seed(seed: int, iteration: int, prompt_id: int, *, evaluation: bool = False) -> int:
    """Return the seed of the noise that pictures of one prompt start from, an integer in [0, 2**63).

    All rewrites of a prompt, and the prompt itself, are rendered from it (common random numbers): pictures of a group
    differ by their words alone. In evaluation it does not depend on the iteration.
    """
    purpose, visit = (_EVALUATION_NOISE, 0) if evaluation else (_NOISE, iteration)
    state = _seed_sequence(purpose, seed, visit, prompt_id, 0).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def repeat_rows(rows: Sequence[Row], group_size: int) -> tuple[list[str], dict[str, list[object]]]:
    """Repeat each row ``group_size`` times: P·G prompts, and columns of P·G values, None if a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    repeated = [row for row in rows for _ in range(group_size)]
    return [row.prompt for row in repeated], {name: [row.columns.get(name) for row in repeated] for name in names}


def messages_of(row: Row, instruction: str = "", system: str = "") -> tuple[Message, ...]:
    """Return a row's messages, or its pictures, instruction and prompt as one of the user, behind a system message.

    The instruction says {prompt} where the prompt goes; a row with a form of its own excludes it (UserError). The
    system message is added unless the row begins with one.
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
