"""FLOPs and bytes of a program, counted from its jaxpr: products and attention, loops as often as they turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr

from grpo_jax.training.memory import Program, tree_bytes

_ATTENTION = {"mha_forward": 2, "mha_backward": 7, "mha_preprocess_backward": 0}
"""Products of queries and keys in the Pallas kernels for GPUs, by name; those for TPUs have none."""


class Work(NamedTuple):
    """FLOPs of products, and the bytes that they read and write."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: object) -> Work:
        """Add both numbers."""
        assert isinstance(other, Work)
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: float) -> Work:
        """Return the work of so many turns."""
        return Work(self.flops * count, self.bytes * count)


def count_work(program: Program, devices: int = 1) -> Work:
    """Return a device's share of a program's work; its bytes are at least those of its arguments.

    A loop of unknown length writes tokens: `program.turns` in all, over the loops of most rows. Those over fewer rows
    go on where half of the prompts are done, and do not turn.
    """
    traced = program.function.trace(*program.arguments).jaxpr.jaxpr
    jaxpr, _ = dce_jaxpr(traced, [True] * len(traced.outvars))  # without products that nothing reads
    loops = list(_token_loops(jaxpr))
    most = max(map(_rows, loops), default=0)
    full = sum(_rows(loop) == most for loop in loops)
    turns = {id(loop): (program.turns / full if program.turns else 1) * (_rows(loop) == most) for loop in loops}
    work = _work(jaxpr, turns)
    return Work(work.flops / devices, max(work.bytes / devices, tree_bytes(program.arguments)))


def _inner(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs of an equation's parameters."""
    for value in eqn.params.values():
        for entry in value if isinstance(value, tuple | list) else (value,):
            if isinstance(entry, ClosedJaxpr | Jaxpr):
                yield entry.jaxpr if isinstance(entry, ClosedJaxpr) else entry


def _token_loops(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            yield eqn
        elif eqn.primitive.name != "pallas_call":
            for inner in _inner(eqn):
                yield from _token_loops(inner)


def _rows(loop: JaxprEqn) -> int:
    """Return the number of rows that a loop carries flags of."""
    return max((_size(var) for var in loop.outvars if var.aval.dtype == bool), default=0)


def _work(jaxpr: Jaxpr, turns: Mapping[int, float]) -> Work:
    total = Work()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated", "pallas_call"):
            total += _kernel(eqn)
        elif name == "cond":
            total += max((_work(inner, turns) for inner in _inner(eqn)), default=Work())
        else:
            count = eqn.params["length"] if name == "scan" else turns.get(id(eqn), 1)
            total += sum((_work(inner, turns) for inner in _inner(eqn)), Work()).times(count)
    return total


def _kernel(eqn: JaxprEqn) -> Work:
    """Return the work of a product, or of one of the attention kernels."""
    given, made = eqn.invars, eqn.outvars
    traffic = sum(_size(var) * var.aval.dtype.itemsize for var in (*given, *made))
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return Work(2.0 * _size(made[0]) * math.prod(given[0].aval.shape[axis] for axis in contracted), traffic)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = given[1].aval.shape
        outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return Work(2.0 * _size(made[0]) * math.prod(kernel) / outputs, traffic)
    if eqn.params["name"] == "decode_attention":  # caches are read as far as they are written: half of one that fills
        keys, caches = given[1].aval.shape[-1], given[-2:]
        unread = sum(_size(var) * var.aval.dtype.itemsize for var in caches) * 1.5  # half of it, and all as a result
        return Work(4.0 * _size(made[0]) * (keys + caches[0].aval.shape[-1] / 2), traffic - unread)
    backward = {1: 3, 2: 4}.get(len(made), 0) if len(given) > 5 else 2  # TPU: dq; dk and dv
    products = _ATTENTION.get(eqn.params["name"], backward)
    keys = max(given[1].aval.shape[1:3])
    return Work(products * float(_size(given[0])) * keys, traffic)  # each query's product with half of the keys


def _size(var: Var) -> int:
    return math.prod(var.aval.shape)
