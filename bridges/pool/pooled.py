"""Proxy of a judge whose copies are the actors of a pool: calls are split into batches of rows, and answers joined."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from bridges.placement import cards_left
from bridges.pool import actor, cluster
from bridges.pool.cluster import NotRowByRow, PoolLost
from bridges.pool.pool import Answer, Pool, Request, require_room, start_actors
from bridges.pool.section import PoolSection
from grpo_jax.errors import UserError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
ROWS = 32
"""Rows of a batch where neither the pool nor its judge sets them."""
_START_SECONDS = 600.0  # to load the judges; large weights on a slow disk, or a cluster that grows, take minutes


class PooledJudge:
    """Proxy of a pool, with the plain attributes and the methods of the judge that the actors loaded.

    Arguments of one length are split into batches of rows, whose answers are joined in their order: a judge must
    judge each row by itself. Tensors of more than one axis that it answers stay in Ray's object store
    (`stored.Stored`).
    """

    device = "cpu"

    def __init__(self, pool: Pool, description: tuple[dict, list, Any], *, size: int, close: Callable[[], None]):
        """Take a pool whose actors have loaded a judge, their description of it, and the rows of a batch."""
        attributes, methods, _ = description
        vars(self).update({name: value for name, value in attributes.items() if name not in ("device", "close")})
        self._pool, self._methods, self._size, self._close = pool, frozenset(methods), size, close
        self.placed = f"{len(pool.seats)} actors of a Ray cluster"
        judge = f"{attributes['summary']}; " if "summary" in attributes else ""
        self.summary = f"{judge}{self.placed}, {size} rows at a time"

    def __getattr__(self, name: str) -> Any:
        """Return a proxy of a method of the judge."""
        methods = vars(self).get("_methods", ())
        if name not in methods:
            names = ", ".join(sorted(methods))
            raise AttributeError(f"{name} is in the actors of a pool, which are asked by methods alone: {names}")
        return self._draw if name == "draw" else functools.partial(self._ask, name)

    def close(self) -> None:
        """End the actors; the last pool of a process ends the cluster that the first one started."""
        self._close()

    def _ask(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        requests = split(method, arguments, keywords, self._size)
        return join(self._pool.ask(requests), requests, f"{self._pool.name}.{method}".rstrip("."))

    def _draw(self, texts: Sequence[str], seeds: Sequence[int], **keywords: Any) -> Any:
        """Draw equal pairs of text and seed once."""
        pairs = list(zip(texts, seeds, strict=True))
        different = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        drawn = self._ask("draw", [text for text, _ in different], [seed for _, seed in different], **keywords)
        return drawn if len(different) == len(pairs) else drawn[[different[pair] for pair in pairs]]


class PooledReward(PooledJudge):
    """`PooledJudge` of a judge that can be called, with its signature, from which a reward's arguments are chosen."""

    def __init__(self, pool: Pool, description: tuple[dict, list, Any], **options: Any):
        super().__init__(pool, description, **options)
        parameters = []
        for name, kind, optional in description[2]:
            default = None if optional else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default))
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the judge."""
        return self._ask("", *arguments, **keywords)


def load_pooled(judge: Any, section: PoolSection, name: str) -> PooledJudge:
    """Start the actors of a pool and wait until they have loaded the judge; `name` is for errors.

    An error of loading the judge is raised as it was.
    """
    try:
        with _other_cards(section.address):
            cluster.enter(section.address)
    except UserError as error:
        raise UserError(f"{name}{'.address' if section.address else ''}: {error}") from error
    pool = None

    @functools.cache
    def end() -> None:
        if pool is not None:
            pool.close()
        cluster.leave()

    try:
        require_room(name, section)
        pool = Pool(name, start_actors(name, [judge] * section.replicas, section), section)
        description = pool.wait_until_ready(_START_SECONDS)
    except BaseException as error:
        end()
        if isinstance(error, PoolLost):  # nothing has begun that could be saved
            raise UserError(f"{error}; the pool did not start") from error
        raise
    size = section.batch or getattr(judge, "batch_size", None) or description[0].get("batch_size")
    kind = PooledJudge if description[2] is None else PooledReward
    return kind(pool, description, size=size if isinstance(size, int) and size > 0 else ROWS, close=end)


@contextmanager
def _other_cards(address: str | None) -> Iterator[None]:
    """Give a cluster that is started inside the cards that this process does not use itself."""
    left = cards_left() if address is None else None
    before = os.environ.get(_VISIBLE)
    if left is None:
        yield
        return
    os.environ[_VISIBLE] = ",".join(left)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before


def split(method: str, arguments: Sequence[Any], keywords: dict[str, Any], size: int) -> list[Request]:
    """Split a call into batches of `size` rows, the last with what is left.

    Lists, tuples, and arrays of NumPy or torch have rows. Where these are not all of one length, or none is given,
    the call is one batch. Tensors of more than one axis go through the object store, once.
    """
    places = {**dict(enumerate(arguments)), **keywords}
    rows = {place: len(value) for place, value in places.items() if _has_rows(value)}
    whole = len(set(rows.values())) != 1 or 0 in rows.values()
    stored = {}
    if any(map(actor.is_tensor, places.values())):
        from bridges.pool.stored import as_stored

        tensors = {place: as_stored(places[place]) for place in rows}
        stored = {place: value for place, value in tensors.items() if value is not None}
    requests = []
    for start in [0] if whole else range(0, next(iter(rows.values())), size):
        batch: dict[Any, Any] = {}
        pieces = {}
        references: list[Any] = []
        for place, value in places.items():
            part = value if whole or place not in rows else value[start : start + size]
            batch[place] = None if place in stored else actor.on_host(part)
        for place, value in stored.items():
            part = value if whole else value[start : start + size]
            blocks = sorted({block for block, _ in part.contents.rows})
            numbers = {block: len(references) + number for number, block in enumerate(blocks)}
            references += [part.contents.blocks[block].reference for block in blocks]
            pieces[place] = [(numbers[block], row) for block, row in part.contents.rows], part.contents.blocks[0].kind
        named = {name: batch.pop(name) for name in keywords}
        requests.append(Request(method, list(batch.values()), named, pieces, references))
    return requests


def _has_rows(value: Any) -> bool:
    """Tell whether a value is a list, a tuple, or an array with an axis."""
    if isinstance(value, np.ndarray) or actor.is_tensor(value):
        return value.ndim > 0
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def join(answers: Sequence[Answer], requests: Sequence[Request], judge: str) -> Any:
    """Join the answers to the batches of a call, in their order; NotRowByRow if one has not a value for each row."""
    values: list[Any] = [answer.value for answer in answers]
    stored = [answer.stored for answer in answers if answer.stored]
    if stored:
        from bridges.pool.stored import join_stored, values_of

        values = [join_stored([answer.stored]) if answer.stored else answer.value for answer in answers]
    if len(values) == 1:
        return values[0]
    for value, request in zip(values, requests, strict=True):
        count = _count_rows(request)
        if not _has_rows(value) or len(value) != count:
            came = f"{len(value)} values" if _has_rows(value) else type(value).__name__
            raise NotRowByRow(
                f"{judge} answered a batch of {count} rows with {came}, so it does not judge row by row: set its "
                "`batch` to the rows of a whole call, which is then not taken apart"
            )
    if len(stored) == len(values):
        return join_stored(stored)
    if stored:
        values = [values_of(value) for value in values]
    if all(isinstance(value, list) for value in values):
        return [entry for value in values for entry in value]
    if all(isinstance(value, tuple) for value in values):
        return tuple(entry for value in values for entry in value)
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(values)
    if all(map(actor.is_tensor, values)):
        return sys.modules["torch"].cat(values)
    raise NotRowByRow(f"{judge} answered one batch with a {type(values[0]).__name__}, and another with something else")


def _count_rows(request: Request) -> int:
    if request.pieces:
        return len(next(iter(request.pieces.values()))[0])
    return next(len(value) for value in (*request.arguments, *request.keywords.values()) if _has_rows(value))
