"""Copies of values that user code gave or gets: neither sees what the other changes later."""

import copy
import sys
from collections.abc import MutableMapping, MutableSequence, MutableSet
from operator import methodcaller
from typing import Any

_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
_MUTABLE = (MutableSequence, MutableMapping, MutableSet)
_ARRAYS = (
    ("numpy", "ndarray", copy.deepcopy),  # which may hold lists and dictionaries
    ("torch", "Tensor", methodcaller("clone")),
    ("PIL.Image", "Image", methodcaller("copy")),
)


def own_copy(value: Any, *, arrays: bool = True) -> Any:
    """Copy nested lists, tuples, dictionaries and sets, and `arrays`, tensors and Pillow's pictures; share the rest."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {name: own_copy(item, arrays=arrays) for name, item in value.items()}
    if kind in (list, tuple, set):
        return kind(value if _PLAIN.issuperset(map(type, value)) else (own_copy(item, arrays=arrays) for item in value))
    for module, name, copied in _ARRAYS if arrays else ():  # without importing them
        if isinstance(value, getattr(sys.modules.get(module), name, ())):
            return copied(value)
    return copy.deepcopy(value) if isinstance(value, _MUTABLE) else value
