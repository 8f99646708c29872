"""Arrays in Ray's object store: rows of them, split and joined without being fetched.

Pictures of a pooled renderer stay where they were drawn. A pooled scorer is given references, and its actor fetches
the pictures by itself; any other reader fetches them, once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_map

from bridges.pool import actor, cluster


class Contents:
    """Rows in the object store, each (reference of an array, number of the row), of one shape and type."""

    def __init__(self, rows: list[tuple[Any, int]], inner: tuple[int, ...], kind: str):
        """Take rows, the shape of one, and their type, such as "float32"."""
        self.rows, self.inner, self.kind = rows, inner, kind
        self.tensor: torch.Tensor | None = None  # once it was fetched
        self._lock = threading.Lock()

    def fetch(self) -> torch.Tensor:
        """The rows as a tensor on the CPU, fetched the first time; PoolLost if the cluster or the holder is gone."""
        with self._lock:
            if self.tensor is None:
                self.tensor = actor.as_tensor(actor.gathered(self.rows, cluster.get), self.kind, None)
            return self.tensor


class Stored(torch.Tensor):
    """A tensor [B, …] whose values are in the object store.

    Shape, type, rows by number or slice, `repeat_interleave` of rows and `to` a device fetch nothing. Any other
    operation works on the values, which are fetched once.
    """

    contents: Contents

    @staticmethod
    def __new__(cls, contents: Contents, device: Any = "cpu") -> Stored:
        """Rows as a tensor on a device."""
        shape, dtype = (len(contents.rows), *contents.inner), getattr(torch, contents.kind)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.contents = contents
        return made

    def taken(self, rows: Sequence[int]) -> Stored:
        """Select rows by number."""
        own = self.contents
        return Stored(Contents([own.rows[row] for row in rows], own.inner, own.kind), self.device)

    def to(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Onto a device without being fetched; into another type as any tensor."""
        if len(arguments) == 1 and not keywords and isinstance(arguments[0], str | torch.device):
            return Stored(self.contents, arguments[0])
        return values_of(self).to(*arguments, **keywords)

    def repeat_interleave(self, repeats: Any, dim: int | None = None, **keywords: Any) -> torch.Tensor:
        """Repeat rows without fetching them; other axes as any tensor."""
        if isinstance(repeats, int) and dim == 0 and not keywords:
            return self.taken([row for row in range(len(self)) for _ in range(repeats)])
        return values_of(self).repeat_interleave(repeats, dim, **keywords)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Select rows by slice or list without fetching them; any other index as any tensor."""
        if isinstance(index, slice):
            return self.taken(range(len(self))[index])
        if isinstance(index, list | range) and all(type(row) is int for row in index):
            return self.taken(index)
        return values_of(self)[index]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return values_of(self).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"Stored({list(self.shape)}, {self.dtype}, fetched={self.contents.tensor is not None})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a function of torch to the values; what is known without them is answered at once."""
        if func in _KNOWN:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(values_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_dispatch__ = __torch_function__
    """The same for operations that reach torch by another way."""


def values_of(value: Any) -> Any:
    """A stored tensor's values, on its device; anything else as it is."""
    return value.contents.fetch().to(value.device) if isinstance(value, Stored) else value


def stored(reference: Any, shape: Sequence[int], kind: str) -> Stored:
    """An array of the object store, of a shape, and of a tensor type such as "float32"."""
    rows, *inner = shape
    return Stored(Contents([(reference, row) for row in range(rows)], tuple(inner), kind))


def concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors; stored ones of one shape and type are not fetched."""
    contents = [part.contents for part in parts if isinstance(part, Stored)]
    kinds = {(one.inner, one.kind) for one in contents}
    if len(contents) < len(parts) or len(kinds) > 1:
        return torch.cat(list(parts))
    return Stored(Contents([row for one in contents for row in one.rows], *kinds.pop()))


def as_stored(array: Any) -> Stored | None:
    """Put a tensor of more than one axis into the object store; None for what travels with its batch.

    PoolLost if the cluster is gone.
    """
    if isinstance(array, Stored):
        return array
    if not (isinstance(array, torch.Tensor) and array.ndim > 1 and len(array)):
        return None
    import ray

    values, kind = actor.as_array(array.detach().cpu())
    return stored(cluster.attempt(ray.put, values), array.shape, kind)


_KNOWN = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(getattr(torch.Tensor, name) for name in ("dim", "size", "numel", "__len__", "is_floating_point", "element_size")),
    torch.Tensor.is_cuda.__get__,
}
"""Properties known without the values."""
