"""Functions that can be compiled ahead of time from shapes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import jax

from grpo_jax.errors import ABANDONED
from grpo_jax.models.variables import PyTree


class Jitted:
    """`jax.jit` of a function that compiles ahead of time if called with shapes.

    Given a `jax.ShapeDtypeStruct` among its arguments, it traces, compiles in a thread, and returns the shapes of the
    results. Later calls with such arrays find the program in jit's own cache, and wait until it is compiled.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._function = jax.jit(function, **options)
        self._compiling: dict[Hashable, Future[None]] = {}

    def __call__(self, *arguments: PyTree) -> Any:
        """Call the function, or compile it for shapes."""
        return self.ready(*arguments)(*arguments)

    def ready(self, *arguments: PyTree) -> Callable[..., Any]:
        """Return the callable for such arguments: jit's function, or one that compiles it."""
        leaves = jax.tree.leaves(arguments)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return self._compile
        if self._compiling and (compiling := self._compiling.pop(_key(leaves), None)):
            compiling.result()
        return self._function

    def _compile(self, *arguments: PyTree) -> PyTree:
        leaves = jax.tree.leaves(arguments)
        key = _key(leaves)
        place = next(leaf.sharding for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct))
        done: Future[None] = Future()
        self._compiling[key] = done
        try:
            lowered = self._function.lower(*arguments)
        except BaseException:
            done.set_result(None)
            raise

        def compile_lowered() -> None:
            with suppress(Exception):  # the call of the function raises it again
                lowered.compile()
            done.set_result(None)

        threading.Thread(target=compile_lowered, name=f"{ABANDONED}compiling").start()
        return jax.tree.map(lambda leaf: placed(leaf, place), lowered.out_info)


def placed(leaf: Any, place: jax.sharding.Sharding | None, rows: int | None = None) -> jax.ShapeDtypeStruct:
    """Return an array's shape with a sharding, or the shape of its first `rows` rows."""
    shape = leaf.shape if rows is None else (rows, *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place, weak_type=getattr(leaf, "weak_type", False))


def _key(leaves: list[Any]) -> Hashable:
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves)
