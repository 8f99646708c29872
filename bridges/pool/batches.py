"""A method call split into batches of rows, and their answers joined."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridges.pool import actor
from bridges.pool.errors import NotRowByRow
from bridges.pool.pool import Request


def requests_of(method: str, arguments: Sequence[Any], keywords: Mapping[str, Any], size: int) -> list[Request]:
    """Split a call into batches of `size` rows, the last with what is left.

    Lists, tuples, and arrays of NumPy or torch have rows. Where these are not all of one length, or none is given,
    the call is one batch. Tensors of more than one axis go through the object store, once.
    """
    places = {**dict(enumerate(arguments)), **keywords}
    rows = {place: len(value) for place, value in places.items() if has_rows(value)}
    count = next(iter(rows.values())) if len(set(rows.values())) == 1 else None
    stored = {place: _stored(places[place]) for place in rows}
    stored = {place: value for place, value in stored.items() if value is not None}
    if not count:
        return [_request(method, arguments, keywords, stored)]
    starts = range(0, count, size)
    return [_request(method, arguments, keywords, stored, rows, slice(start, start + size)) for start in starts]


def has_rows(value: Any) -> bool:
    """Tell whether a value is a list, a tuple, or an array with an axis."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return False
    return isinstance(value, list | tuple) or (
        (isinstance(value, np.ndarray) or actor.is_tensor(value)) and value.ndim > 0
    )


def _stored(value: Any) -> Any:
    """Put a tensor of more than one axis into the object store; None for anything else."""
    if not actor.is_tensor(value):
        return None
    from bridges.pool.stored import as_stored

    return as_stored(value)


def _request(
    method: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    stored: Mapping[Any, Any],
    rows: Mapping[Any, int] | None = None,
    part: slice = slice(None),
) -> Request:
    """Build the batch `part` of those arguments that have `rows`; stored ones as references and row numbers."""
    references: list[Any] = []
    pieces = {}
    for place, value in stored.items():
        contents, first = value.contents, len(references)
        own = contents.rows[part] if rows else contents.rows
        used = sorted({block for block, _ in own})
        references += [contents.blocks[block].reference for block in used]
        numbers = {block: first + number for number, block in enumerate(used)}
        pieces[place] = [(numbers[block], row) for block, row in own], contents.blocks[0].kind

    def sent(place: Any, value: Any) -> Any:
        if place in stored:
            return None
        return actor.on_host(value[part] if rows and place in rows else value)

    return Request(
        method,
        [sent(place, value) for place, value in enumerate(arguments)],
        {name: sent(name, value) for name, value in keywords.items()},
        pieces,
        references,
    )


def joined(answers: Sequence[tuple[Any, Any]], requests: Sequence[Request], who: str) -> Any:
    """Join the answers to the batches of a call, in their order; NotRowByRow if one has not a value for each row.

    `answers` are heads and references, as `Pool.ask` gives them; `who` is named in errors.
    """
    kept = [head[0] == "kept" for head, _ in answers]
    if all(kept):
        from bridges.pool import stored

        values: list[Any] = [stored.joined([(reference, head[1])]) for head, reference in answers]
        if len(answers) == 1:
            return values[0]
        _check(values, requests, who)
        return stored.joined([(reference, head[1]) for head, reference in answers])
    values = [_fetched(head, reference) for head, reference in answers]
    if len(values) == 1:
        return values[0]
    _check(values, requests, who)
    return _concatenated(values, who)


def _fetched(head: Any, reference: Any) -> Any:
    if head[0] != "kept":
        return head[1]
    from bridges.pool import stored

    return stored.values_of(stored.joined([(reference, head[1])]))


def _check(values: Sequence[Any], requests: Sequence[Request], who: str) -> None:
    for value, request in zip(values, requests, strict=True):
        count = rows_in(request)
        if not has_rows(value) or len(value) != count:
            came = f"{len(value)} values" if has_rows(value) else type(value).__name__
            raise NotRowByRow(
                f"{who} answered a batch of {count} rows with {came}, so it does not judge row by row: set its `batch` "
                "to the rows of a whole call, which is then not taken apart"
            )


def rows_in(request: Request) -> int:
    """Count the rows of a batch."""
    if request.pieces:
        return len(next(iter(request.pieces.values()))[0])
    return next(len(value) for value in (*request.arguments, *request.keywords.values()) if has_rows(value))


def _concatenated(values: Sequence[Any], who: str) -> Any:
    first = values[0]
    if all(isinstance(value, list) for value in values):
        return [entry for value in values for entry in value]
    if all(isinstance(value, tuple) for value in values):
        return tuple(entry for value in values for entry in value)
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(values)
    if all(map(actor.is_tensor, values)):
        return sys.modules["torch"].cat(list(values))
    raise NotRowByRow(f"{who} answered one batch with a {type(first).__name__}, and another with something else")
