"""Copies of values that user code gave or gets: neither sees what the other changes later."""

import copy
import sys
from collections.abc import MutableMapping, MutableSequence, MutableSet
from typing import Any

_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
_MUTABLE = (MutableSequence, MutableMapping, MutableSet)
_ARRAYS = ("numpy", "ndarray", "copy"), ("torch", "Tensor", "clone"), ("PIL.Image", "Image", "copy")


def own_copy(value: Any) -> Any:
    """Copy nested lists, tuples, dictionaries, sets, and arrays, tensors and Pillow's pictures; share all the rest."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {name: own_copy(item) for name, item in value.items()}
    if kind in (list, tuple, set):
        return kind(value if _PLAIN.issuperset(map(type, value)) else map(own_copy, value))
    for module, name, copied in _ARRAYS:  # without importing them
        if isinstance(value, getattr(sys.modules.get(module), name, ())):
            return getattr(value, copied)()
    return copy.deepcopy(value) if isinstance(value, _MUTABLE) else value
