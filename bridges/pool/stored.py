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
from bridges.pool.pool import Block


class Contents:
    """Rows of blocks, all of one row shape and type: (number of the block, row in it) of each row."""

    def __init__(self, blocks: tuple[Block, ...], rows: list[tuple[int, int]]):
        """Take blocks and rows."""
        self.blocks = blocks
        self.rows = rows
        self.tensor: torch.Tensor | None = None  # once it was fetched
        self._lock = threading.Lock()

    def fetch(self) -> torch.Tensor:
        """The rows as a tensor on the CPU, fetched the first time; PoolLost if the cluster or the holder is gone."""
        with self._lock:
            if self.tensor is None:
                used = sorted({block for block, _ in self.rows})
                arrays = cluster.get([self.blocks[block].reference for block in used])
                rows = actor.gathered(self.rows, dict(zip(used, arrays, strict=True)))
                self.tensor = actor.as_tensor(rows, self.blocks[0].kind, None)
            return self.tensor


class Stored(torch.Tensor):
    """A tensor [B, …] whose values are in the object store.

    Shape, type, rows by number or slice, `repeat_interleave` of rows and `to` a device fetch nothing. Any other
    operation works on the values, which are fetched once.
    """

    contents: Contents

    @staticmethod
    def __new__(cls, contents: Contents, device: Any = "cpu") -> Stored:
        """Rows of blocks as a tensor on a device."""
        first = contents.blocks[0]
        shape = (len(contents.rows), *first.inner)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=getattr(torch, first.kind), device=device)
        made.contents = contents
        return made

    def taken(self, rows: Sequence[int]) -> Stored:
        """Select rows by number."""
        all_rows = self.contents.rows
        return Stored(Contents(self.contents.blocks, [all_rows[row] for row in rows]), self.device)

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
        """Pickle as a plain tensor."""
        return values_of(self).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        """Representation without the values."""
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


def join_blocks(blocks: Sequence[Block]) -> Stored:
    """Join stored arrays; ValueError if row shapes or types differ."""
    kinds = sorted({f"{block.kind} {list(block.inner)}" for block in blocks})
    if len(kinds) > 1:
        raise ValueError(f"rows of one shape and type expected, got {', '.join(kinds)}")
    rows = [(number, row) for number, block in enumerate(blocks) for row in range(block.rows)]
    return Stored(Contents(tuple(blocks), rows))


def as_stored(array: Any) -> Stored | None:
    """Put a tensor of more than one axis into the object store; None for what travels with its batch.

    PoolLost if the cluster is gone.
    """
    if isinstance(array, Stored):
        return array
    if not (isinstance(array, torch.Tensor) and array.ndim > 1 and len(array)):
        return None
    values, kind = actor.as_array(array.detach().cpu())
    return join_blocks([Block(cluster.put(values), len(array), tuple(array.shape[1:]), kind)])


_KNOWN = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(getattr(torch.Tensor, name) for name in ("dim", "size", "numel", "__len__", "is_floating_point", "element_size")),
    torch.Tensor.is_cuda.__get__,
}
"""Properties known without the values."""
