"""Proxy of a judge whose copies are the actors of a pool: calls are split into batches of rows, and answers joined."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.placement import cards_left
from bridges.pool import actor, cluster
from bridges.pool.cluster import NotRowByRow, PoolLost
from bridges.pool.pool import Pool, Request, require_room
from grpo_jax.config.judge import PoolSection
from grpo_jax.errors import UserError

if TYPE_CHECKING:
    from inspect import Signature

_VISIBLE = "CUDA_VISIBLE_DEVICES"
ROWS = 32
"""Rows of a batch where neither the pool nor its judge sets them."""


class PooledJudge:
    """Proxy of a pool, with the plain attributes and the methods of the judge that the actors loaded.

    Arguments of one length are split into batches of rows, whose answers are joined in their order: a judge must
    judge each row by itself. Tensors of more than one axis that it answers stay in Ray's object store
    (`stored.Stored`).
    """

    device = "cpu"

    def __init__(
        self,
        pool: Pool,
        description: tuple[dict[str, Any], list[str], Signature | None],
        *,
        size: int,
        close: Callable[[], None],
    ):
        """Take a pool whose actors have loaded a judge, their description of it, and the rows of a batch."""
        attributes, methods, signature = description
        vars(self).update({name: value for name, value in attributes.items() if name not in ("device", "close")})
        self._pool, self._methods, self._size = pool, frozenset(methods), size
        self.close = close
        """End the actors; the last pool of a process ends the cluster that the first one started."""
        self.placed = f"{len(pool.actors)} actors of a Ray cluster"
        judge = f"{attributes['summary']}; " if "summary" in attributes else ""
        self.summary = f"{judge}{self.placed}, {size} rows at a time"
        if signature is not None:
            self.__signature__ = signature

    def __getattr__(self, name: str) -> Any:
        methods = vars(self).get("_methods", ())
        if name not in methods:
            names = ", ".join(sorted(methods))
            raise AttributeError(f"{name} is in the actors of a pool, which are asked by methods alone: {names}")
        return self._draw if name == "draw" else functools.partial(self._ask, name)

    def _ask(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        rows, requests = split(method, {**dict(enumerate(arguments)), **keywords}, self._size)
        return join(self._pool.ask(requests), rows, f"{self._pool.name}.{method}".rstrip("."))

    def _draw(self, texts: Sequence[str], seeds: Sequence[int], **keywords: Any) -> Any:
        """Draw equal pairs of text and seed once."""
        pairs = list(zip(texts, seeds, strict=True))
        different = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        drawn = self._ask("draw", [text for text, _ in different], [seed for _, seed in different], **keywords)
        return drawn if len(different) == len(pairs) else drawn[[different[pair] for pair in pairs]]


class PooledReward(PooledJudge):
    """`PooledJudge` of a judge that can be called, with its signature, from which a reward's arguments are chosen."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the judge."""
        return self._ask("", *arguments, **keywords)


def load_pooled(judge: Any, section: PoolSection, name: str) -> PooledJudge:
    """Start the actors of a pool and wait until they have loaded the judge; `name` is for errors.

    An error of loading the judge is raised as it was.
    """
    try:
        _enter(section.address)
    except UserError as error:
        raise UserError(f"{name}{'.address' if section.address else ''}: {error}") from error
    pool = Pool(name, section)

    @functools.cache
    def end() -> None:
        pool.close()
        cluster.leave()

    try:
        require_room(name, section)
        description = pool.start([judge] * section.replicas)
    except BaseException as error:
        end()
        if isinstance(error, PoolLost):  # nothing has begun that could be saved
            raise UserError(f"{name}: {error}; the pool did not start") from error
        raise
    size = section.batch or getattr(judge, "batch_size", None) or description[0].get("batch_size")
    kind = PooledJudge if description[2] is None else PooledReward
    return kind(pool, description, size=size if isinstance(size, int) and size > 0 else ROWS, close=end)


def _enter(address: str | None) -> None:
    """Enter the cluster; one that is started inside gets the cards that this process does not use itself."""
    left = cards_left() if address is None else None
    before = os.environ.get(_VISIBLE)
    if left is not None:
        os.environ[_VISIBLE] = ",".join(left)
    try:
        cluster.enter(address)
    finally:
        if left is not None:
            del os.environ[_VISIBLE]
        if before is not None:
            os.environ[_VISIBLE] = before


def split(method: str, places: dict[int | str, Any], size: int) -> tuple[list[int], list[Request]]:
    """Split a call into batches of `size` rows, the last with what is left; return the rows of each, and the requests.

    `places` are the arguments by place or name. Lists, tuples, and arrays of NumPy or torch have rows. Where these are
    not all of one length, or none is given, the call is one batch. Tensors of more than one axis go through the object
    store, once.
    """
    counts = {place: len(value) for place, value in places.items() if _has_rows(value)}
    stored = {}
    if any(map(actor.is_tensor, places.values())):
        from bridges.pool.stored import as_stored

        stored = {place: kept for place in counts if (kept := as_stored(places[place])) is not None}
    rows, parts = [0], [slice(None)]
    if len(set(counts.values())) == 1 and 0 not in counts.values():
        (count,) = set(counts.values())
        parts = [slice(start, start + size) for start in range(0, count, size)]
        rows = [min(size, count - part.start) for part in parts]
    requests: list[Request] = []
    for part in parts:
        plain = {place: value for place, value in places.items() if place not in stored}
        values = {place: actor.on_host(value[part] if place in counts else value) for place, value in plain.items()}
        kept = {place: value[part].contents for place, value in stored.items()}
        requests.append((method, values, {place: (own.rows, own.kind) for place, own in kept.items()}))
    return rows, requests


def _has_rows(value: Any) -> bool:
    """Tell whether a value is a list, a tuple, or an array with an axis."""
    if isinstance(value, np.ndarray) or actor.is_tensor(value):
        return value.ndim > 0
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def join(values: Sequence[Any], rows: Sequence[int], judge: str) -> Any:
    """Join the answers to the batches of a call, in their order; NotRowByRow if one has not a value for each row."""
    for value, count in zip(values, rows, strict=True):
        if len(values) == 1:
            break
        if not _has_rows(value) or len(value) != count:
            came = f"{len(value)} values" if _has_rows(value) else type(value).__name__
            raise NotRowByRow(
                f"{judge} answered a batch of {count} rows with {came}, so it does not judge row by row: set its "
                "`batch` to the rows of a whole call, which is then not taken apart"
            )
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, list) for value in values):
        return [entry for value in values for entry in value]
    if all(isinstance(value, tuple) for value in values):
        return tuple(entry for value in values for entry in value)
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(values)
    if all(map(actor.is_tensor, values)):
        from bridges.pool.stored import concatenated

        return concatenated(values)
    raise NotRowByRow(f"{judge} answered one batch with a {type(values[0]).__name__}, and another with something else")
