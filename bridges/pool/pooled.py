"""Proxy of a judge whose copies are the actors of a pool, with the judge's own interface."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bridges.placement import cards_left
from bridges.pool import batches, cluster
from bridges.pool.errors import PoolLost
from bridges.pool.pool import Limits, Pool
from bridges.pool.section import PoolSection
from bridges.pool.starting import require_room, start_actors
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
        own = f"{attributes['summary']}; " if "summary" in attributes else ""
        self.summary = f"{own}{self.placed}, {size} rows at a time"

    def __getattr__(self, name: str) -> Any:
        """Return a proxy of a method of the judge."""
        methods = vars(self).get("_methods", ())
        if name not in methods:
            known = ", ".join(sorted(methods))
            raise AttributeError(f"{name} is in the actors of a pool, which are asked by methods alone: {known}")
        return self._draw if name == "draw" else functools.partial(self._ask, name)

    def close(self) -> None:
        """End the actors; the last pool of a process ends the cluster that the first one started."""
        self._close()

    def _ask(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        requests = batches.requests_of(method, arguments, keywords, self._size)
        who = f"{self._pool.name}.{method}".rstrip(".")
        return batches.joined(self._pool.ask(requests), requests, who)

    def _draw(self, texts: Sequence[str], seeds: Sequence[int], **keywords: Any) -> Any:
        """Draw equal pairs of text and seed once."""
        pairs = list(zip(texts, seeds, strict=True))
        different = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        drawn = self._ask("draw", [text for text, _ in different], [seed for _, seed in different], **keywords)
        return drawn if len(different) == len(pairs) else drawn[[different[pair] for pair in pairs]]


class PooledReward(PooledJudge):
    """`PooledJudge` of a judge that can be called."""

    def __init__(self, pool: Pool, description: tuple[dict, list, Any], **options: Any):
        """As `PooledJudge`; its signature is the judge's, from which a reward's arguments are chosen."""
        super().__init__(pool, description, **options)
        made = [_parameter(*entry) for entry in description[2]]
        self.__signature__ = inspect.Signature(made)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the judge."""
        return self._ask("", *arguments, **keywords)


def _parameter(name: str, kind: str, optional: bool) -> inspect.Parameter:
    default = None if optional else inspect.Parameter.empty
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default)


def load_pooled(judge: Any, section: PoolSection, name: str) -> PooledJudge:
    """Start the actors of a pool and wait until they have loaded the judge; `name` is for errors.

    An error of loading the judge is raised as it was.
    """
    try:
        with _other_cards(section.address):
            cluster.enter(section.address)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    pool = None
    try:
        require_room(name, section)
        pool = Pool(name, start_actors(name, [judge] * section.replicas, section), _limits(section))
        description = pool.wait_until_ready(_START_SECONDS)
    except BaseException as error:
        _end(pool)
        if isinstance(error, PoolLost):  # nothing has begun that could be saved
            raise UserError(f"{error}; the pool did not start") from error
        raise
    kind = PooledJudge if description[2] is None else PooledReward
    ended = functools.cache(lambda: _end(pool))
    return kind(pool, description, size=_rows(judge, section, description[0]), close=ended)


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


def _end(pool: Pool | None) -> None:
    if pool is not None:
        pool.close()
    cluster.leave()


def _limits(section: PoolSection) -> Limits:
    return Limits(section.in_flight, section.batch_attempts, section.batch_timeout)


def _rows(judge: Any, section: PoolSection, attributes: Mapping[str, Any]) -> int:
    own = getattr(judge, "batch_size", None) or attributes.get("batch_size")
    return section.batch or (own if isinstance(own, int) and own > 0 else ROWS)
