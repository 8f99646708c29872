"""Rows that are read as training comes to them (data.streaming): a data set of any size, of which little is in memory.

A stream is cut into blocks, and each block is shuffled by itself, so that its rows are a function of the seed and of
where the block begins. That place is what a checkpoint keeps: a resumed run reads the block again.
"""

from __future__ import annotations

import csv
import glob
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from grpo_jax.errors import StopRun, UserError, one_line, short_name
from grpo_jax.rollout.data import EpochOrder, Row, batches_per_epoch, epoch_order, row_digest
from grpo_jax.rollout.records import DELIMITERS, HUB, Record, filled, load_hub, loading, parse_object, quiet_datasets

HEAD = 1000
"""Rows at the beginning of a stream that are looked at before a run: of these some are held out."""


class Source(NamedTuple):
    """A data set that is read in order, in one or several files.

    Attributes:
        data: The `datasets.IterableDataset`.
        unit: "line" or "row", for errors; `first` is the number of the first one.
        base: The folder that paths in it are relative to.
        record: What was read → a record.
    """

    data: Any
    unit: str
    first: int
    base: Path | None
    record: Callable[[dict[str, Any]], Record]


def open_source(place: str) -> Source:
    """Open a .jsonl, .csv, .tsv, .txt or .parquet file, or a data set of the hub, to be read in order."""
    path, kind = Path(place), Path(place).suffix.lower()
    if not place.startswith(HUB):
        if kind not in (".jsonl", ".txt", ".parquet", *DELIMITERS):
            expected = f"a .jsonl, .csv, .tsv, .txt or .parquet file, or {HUB}OWNER/NAME"
            raise UserError(f"data.prompts: expected {expected} with data.streaming, got {short_name(place)}")
        if not path.is_file():
            raise UserError(f"{short_name(path)} does not exist: give a .jsonl, .csv or .txt file with prompts")
    with loading(place):
        return _opened(place, path, kind)


def _opened(place: str, path: Path, kind: str) -> Source:
    import datasets

    def load(builder: str, **options: Any) -> Any:
        file = glob.escape(str(path))
        return datasets.load_dataset(builder, data_files=file, split="train", streaming=True, **options)

    if place.startswith(HUB):
        data = load_hub(place, split="train", streaming=True)
        return Source(data.decode(False) if data.features else data, "row", 0, None, dict)
    if kind == ".parquet":
        return Source(load("parquet").decode(False), "row", 0, path.parent, dict)
    if kind in DELIMITERS:
        sheet = {"path": str(path), "delimiter": DELIMITERS[kind]}
        data = datasets.IterableDataset.from_generator(_sheet, gen_kwargs=sheet)
        return Source(data, "row", 1, path.parent, filled)
    parse = parse_object if kind == ".jsonl" else (lambda text: {"prompt": text})
    data = load("text", encoding="utf-8-sig")
    return Source(data, "line", 1, path.parent, lambda line: parse(line["text"]) if line["text"].strip() else None)


def _sheet(path: str, delimiter: str) -> Iterator[dict[Any, Any]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file, delimiter=delimiter, strict=True)


class Position(NamedTuple):
    """Where a block begins; all of it JSON.

    Attributes:
        iteration: The first that draws from it.
        block: Its number in the run, from 0.
        epoch: Passes over the data set before it.
        file: How many of its files this pass has behind it.
        count: Rows and blank lines of the file before it.
        state: `IterableDataset.state_dict()` there; None at the beginning of a file.
    """

    iteration: int = 0
    block: int = 0
    epoch: int = 0
    file: int = 0
    count: int = 0
    state: Mapping[str, Any] | None = None


class Block(NamedTuple):
    """Rows that some iterations draw from.

    Attributes:
        rows: In the order of the data.
        first: The first of these iterations.
        order: That in which they are drawn.
        epochs: Passes over the data set when an iteration is done; of a stream, whose length nobody knows, whole ones.
    """

    rows: Sequence[Row]
    first: int = 0
    order: EpochOrder = epoch_order
    epochs: float = 0.0


Parse = Callable[[Record, int], Row]
"""(record, number) → its row; raises ValueError."""


class StreamedRows(Sequence[Row]):
    """Training rows of a stream; as a sequence those of its beginning, by which a run is set up."""

    def __init__(self, source: Source, parse: Parse, subject: str, *, buffer: int):
        """Read the beginning; `subject` names the data in errors, `buffer` is data.shuffle_buffer."""
        self._source, self._parse, self._subject, self._buffer = source, parse, subject, buffer
        self._held_out: frozenset[bytes] = frozenset()
        self._blocks: deque[Block] = deque(maxlen=2)  # with training.lag two iterations are on their way
        self._starts: deque[Position] = deque(maxlen=2)
        self._next = Position()
        self._reader: Iterator[Row] | None = None
        self._lock = threading.Lock()
        self._place: tuple[int, int, int, Any] = (0, 0, 0, None)  # epoch, file, count and data behind the last row read
        reader = self._read(Position(), range(source.data.num_shards))
        self._head = [*itertools.islice(reader, max(buffer, HEAD))]

    def __len__(self) -> int:
        return len(self._head)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._head[index]

    def without(self, digests: Sequence[bytes]) -> StreamedRows:
        """Pass over these prompts (`row_digest`), wherever they come."""
        self._held_out = frozenset(digests)
        self._head = [row for row in self._head if row_digest(row) not in self._held_out]
        return self

    def block_at(self, iteration: int, *, seed: int, batch_size: int) -> Block:
        """Return the block of an iteration; they are asked for in order, one or another twice.

        UserError if there are too few rows for a batch; StopRun if the next ones cannot be read.
        """
        with self._lock:
            while self._next.iteration <= iteration:
                self._advance(seed, batch_size)
            return next(block for block in reversed(self._blocks) if block.first <= iteration)

    def position(self, iteration: int) -> Position:
        """Return where the block of the next iteration begins, or, if it was not read yet, where it will."""
        return max(
            (start for start in (*self._starts, self._next) if start.iteration <= iteration), key=lambda one: one[0]
        )

    def go_to(self, position: Position) -> None:
        """Go on where a checkpoint was; a run that is past that stays where it is."""
        if position.iteration > self._next.iteration:
            self._next, self._reader = position, None

    def _advance(self, seed: int, batch_size: int) -> None:
        start = self._next
        if self._reader is None:
            files = epoch_order(seed, start.epoch, self._source.data.num_shards) if self._buffer > 1 else None
            self._reader = self._read(start, range(self._source.data.num_shards) if files is None else files.tolist())
        size = -(-self._buffer // batch_size) * batch_size
        rows = [*itertools.islice(self._reader, size)]
        if len(rows) == size:
            epoch, file, count, data = self._place
            end = Position(epoch=epoch, file=file, count=count, state=data.state_dict())
        else:
            self._reader, end = None, Position(epoch=start.epoch + 1)
            if (start.file, start.count) == (0, 0):
                batches_per_epoch(len(rows), batch_size)
        end = end._replace(iteration=start.iteration + len(rows) // batch_size, block=start.block + 1)
        self._next = end
        if len(rows) < batch_size:
            return

        def order(seed: int, epoch: int, n: int) -> np.ndarray:
            return epoch_order(seed, start.block, n) if self._buffer > 1 else np.arange(n)

        self._blocks.append(Block(rows, start.iteration, order, float(start.epoch)))
        self._starts.append(start)

    def _read(self, start: Position, files: Sequence[int]) -> Iterator[Row]:
        """Yield the rows of an epoch behind a position; `_place` is the one behind the last row."""
        source = self._source
        for place in range(start.file, len(files)):
            data = source.data.shard(len(files), files[place])
            count = start.count if place == start.file else 0
            if count:
                data.load_state_dict(dict(start.state or {}))
            for record in self._records(data, files[place], count):
                count += 1
                number = source.first + count - 1
                if record is None:
                    continue
                try:
                    row = self._parse(record, number * len(files) + files[place] if len(files) > 1 else number)
                except ValueError as error:
                    raise StopRun(f"{self._where(files[place], number)}: {error}") from error
                if row_digest(row) not in self._held_out:
                    self._place = start.epoch, place, count, data
                    yield row

    def _records(self, data: Any, file: int, count: int) -> Iterator[Record]:
        with quiet_datasets():  # it would also log what it raises
            reader = iter(data)
        while True:
            try:
                with quiet_datasets():
                    read = next(reader, None)
            except Exception as error:  # of the network, of pandas, of pyarrow
                where = self._where(file, self._source.first + count - 1)
                raise StopRun(
                    f"{where}: what is behind it cannot be read: {one_line(error.__cause__ or error, 120)}"
                ) from error
            if read is None:
                return
            count += 1
            yield self._source.record(read)

    def _where(self, file: int, number: int) -> str:
        shard = f", file {file + 1}" if self._source.data.num_shards > 1 else ""
        return f"{short_name(self._subject)}{shard}: {self._source.unit} {number}"
