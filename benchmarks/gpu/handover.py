"""Arrays between JAX and torch on one GPU: shared memory, right lifetime, complete values.

A kernel is in flight when its result is handed over: whether the receiver waited for it shows in the values.
`in_flight` counts the hand-overs that came before the kernels had ended; where it is 0 nothing was tested.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing
from outcome import Figures, Measurements, needs_torch_beside_jax

from grpo_jax.errors import UserError

TRIES = 20


def measurements(tiny: bool) -> Measurements:
    """Addresses and times, freed memory, streams both ways, donation, memory side by side."""
    return {
        "same memory, and the time it takes": functools.partial(addresses, tiny),
        "a tensor that begins off 16 bytes": unaligned,
        "JAX to torch, freed in flight": functools.partial(freed_in_flight, tiny, "torch"),
        "torch to JAX, freed in flight": functools.partial(freed_in_flight, tiny, "jax"),
        "JAX to torch, a kernel in flight": functools.partial(jax_in_flight, tiny),
        "torch to JAX, a kernel in flight": functools.partial(torch_in_flight, tiny, side=False),
        "torch to JAX, in flight on a stream of its own": functools.partial(torch_in_flight, tiny, side=True),
        "a living view is not overwritten by donation": donation,
        "memory shared without preallocation": functools.partial(side_by_side, tiny),
    }


def _dlpack() -> Any:
    """Our module, where torch can use JAX's device."""
    needs_torch_beside_jax()
    from bridges import dlpack

    return dlpack


def addresses(tiny: bool) -> Figures:
    """Whether types and axes of length 1 keep address and values; µs by direction for a small and a large array."""
    dlpack, device = _dlpack(), needs_torch_beside_jax()
    import torch

    kinds = ("float32", "bfloat16", "float16", "int32", "uint8", "bool")
    cases = [(name, (512,)) for name in kinds] + [("float32", shape) for shape in ((3, 1, 6, 2), (5, 1), (2, 3, 1))]
    moved, wrong, figures = [], [], {}
    for name, shape in cases:
        values = np.arange(math.prod(shape)).reshape(shape) % 2
        array, tensor = jnp.asarray(values, name), torch.tensor(values, device=device).to(getattr(torch, name))
        there, back = dlpack.to_torch(array), dlpack.to_jax(tensor)
        if there.data_ptr() != array.unsafe_buffer_pointer() or back.unsafe_buffer_pointer() != tensor.data_ptr():
            moved.append(f"{name} {shape}")
        # A program reads the array by the layout that it was handed with.
        if not bool((there == tensor).all()) or not bool((jax.jit(jnp.add)(back, back) == array + array).all()):
            wrong.append(f"{name} {shape}")
    for size in (2**8, 2**10) if tiny else (2**8, 2**28):
        array, tensor = jnp.ones(size), torch.ones(size, device=device)
        there = timing.seconds(dlpack.to_torch, array, wait=timing.wait_for_torch)
        back = timing.seconds(dlpack.to_jax, tensor)
        figures |= {f"{4 * size:,} bytes to torch, µs": 1e6 * there, f"{4 * size:,} bytes to JAX, µs": 1e6 * back}
    return {"moved": moved or None, "wrong": wrong or None, **figures, "agrees": not moved and not wrong}


def unaligned() -> Figures:
    """A tensor that begins between two addresses of 16 bytes, which a GPU's programs refuse: it is copied."""
    dlpack, device = _dlpack(), needs_torch_beside_jax()
    import torch

    tensor = torch.arange(1025, dtype=torch.float32, device=device)[1:]
    total = float(jax.jit(jnp.sum)(dlpack.to_jax(tensor)))
    return {"offset": tensor.data_ptr() % 16, "agrees": total == tensor.sum().item()}


def freed_in_flight(tiny: bool, receiver: str) -> Figures:
    """The lender drops its array while the receiver's kernels still run, and takes memory of that size again."""
    dlpack, device = _dlpack(), needs_torch_beside_jax()
    import torch

    size, turns = (64, 3) if tiny else (4096, 30)
    slow, there = jax.random.normal(jax.random.key(0), (size, size)), torch.ones(size, size, device=device)

    @jax.jit
    def read_late(x: jax.Array, slow: jax.Array) -> jax.Array:
        y = jax.lax.fori_loop(0, turns, lambda _, y: jnp.sin(y @ slow / size), slow)
        return jnp.mean(x + 1e-30 * y)

    def to_jax(number: int) -> tuple[bool, float]:
        tensor = torch.full((size, size), number + 1.0, device=device)
        result = read_late(dlpack.to_jax(tensor), slow)
        del tensor
        junk = [torch.full((size, size), -1.0, device=device) for _ in range(3)]
        return not result.is_ready(), float(result) + 0 * len(junk)

    def to_torch(number: int) -> tuple[bool, float]:
        array = jnp.full((size, size), number + 1.0).block_until_ready()
        view, y = dlpack.to_torch(array), there
        for _ in range(turns):
            y = torch.sin(y @ there / size)
        total = (view + 1e-30 * y).mean()
        del view, array
        junk = [jnp.full((size, size), -1.0) for _ in range(3)]
        flying = device == "cuda" and not torch.cuda.current_stream().query()
        return flying, total.item() + 0 * len(junk)

    read_late(slow, slow).block_until_ready()
    return _tried(to_jax if receiver == "jax" else to_torch, [1.0, 2.0])


def jax_in_flight(tiny: bool) -> Figures:
    """A chain of products is handed over as soon as it is dispatched; torch sums it at once."""
    dlpack = _dlpack()
    size, turns = (64, 3) if tiny else (4096, 20)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, y: x + x * x + jnp.sin(x @ y / size), x)

    starts = [(seed + 1) * jax.random.normal(jax.random.key(seed), (size, size)) for seed in range(2)]
    expected = [np.asarray(chain(start)).sum(dtype=np.float64) for start in starts]

    def hand_over(number: int) -> tuple[bool, float]:
        result = chain(starts[number])
        flying = not result.is_ready()
        return flying, dlpack.to_torch(result).double().sum().item()

    return _tried(hand_over, expected)


def torch_in_flight(tiny: bool, *, side: bool) -> Figures:
    """The other way; `side`: the tensor is made on another stream than torch's own, and handed over within it.

    A CPU has no streams, so there both are the same.
    """
    dlpack, device = _dlpack(), needs_torch_beside_jax()
    import torch

    size, turns = (64, 3) if tiny else (4096, 20)
    generator = torch.Generator(device).manual_seed(0)
    starts = [(seed + 1) * torch.randn(size, size, device=device, generator=generator) for seed in range(2)]
    total = jax.jit(jnp.sum)

    def chain(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(turns):
            y = x + x * x + torch.sin(x @ y / size)
        return y

    expected = [chain(start).double().sum().item() for start in starts]
    timing.wait_for_torch()
    stream = torch.cuda.Stream() if side and device == "cuda" else None

    def hand_over(number: int) -> tuple[bool, float]:
        with torch.cuda.stream(stream) if stream else nullcontext():
            result, event = chain(starts[number]), torch.cuda.Event() if device == "cuda" else None
            if event is not None:
                event.record()
            array = dlpack.to_jax(result)
        flying = event is not None and not event.query()
        found = float(total(array))
        timing.wait_for_torch()  # the memory goes back to the stream that made it
        return flying, found

    return _tried(hand_over, expected)


def _tried(hand_over: Callable[[int], tuple[bool, float]], expected: list[float]) -> Figures:
    """Hand-overs that came before the kernels' end, and those with other values than they ought to have."""
    wrong = in_flight = 0
    for number in range(TRIES):
        flying, found = hand_over(number % 2)
        in_flight += flying
        # Sums of float32 in another order; the two starts' sums are one to four.
        wrong += not np.isclose(found, expected[number % 2], rtol=1e-2)
    return {"tries": TRIES, "in_flight": in_flight, "wrong": wrong, "agrees": wrong == 0}


def donation() -> Figures:
    """A jitted function that may reuse the memory of an array that torch still reads."""
    dlpack = _dlpack()
    source = jnp.arange(256.0)
    view = dlpack.to_torch(source)
    refused = False
    try:
        jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(source).block_until_ready()
    except (ValueError, jax.errors.JaxRuntimeError) as error:  # on a card; on a CPU XLA copies
        refused = "external reference" in str(error)
        if not refused:
            raise
    kept = bool((view.cpu().numpy() == np.arange(256.0)).all())
    return {"kept": kept, "refused": refused, "agrees": kept}


def side_by_side(tiny: bool) -> Figures:
    """Both libraries take and give back memory of one GPU by turns; JAX was told to take none ahead."""
    device = needs_torch_beside_jax()
    import torch

    free, total = torch.cuda.mem_get_info() if device == "cuda" else (2**32, 2**32)
    used = timing.card_bytes("bytes_in_use") or 0
    reserved = timing.card_bytes("bytes_reserved") or timing.card_bytes("pool_bytes")
    shape = int(free * (0.01 if tiny else 0.3)) // 4 // 2**20, 2**20  # an index of one axis would not fit 32 bits
    try:
        array = jnp.ones(shape).block_until_ready()
        tensor = torch.ones(shape, device=device)
        both = float(array[-1, -1]) + tensor[-1, -1].item()
    except (RuntimeError, UserError) as error:  # out of memory, of either library
        return {"failed_after": str(error).splitlines()[0][:200], "agrees": False}
    del array, tensor
    torch.cuda.empty_cache()
    return {
        "card_gib": timing.gib(total),
        "free_before_gib": timing.gib(free),
        "jax_used_before_gib": timing.gib(used),
        "jax_reserved_before_gib": timing.gib(reserved),
        "each_took_gib": timing.gib(4 * math.prod(shape)),
        "free_after_gib": timing.gib(torch.cuda.mem_get_info()[0]) if device == "cuda" else None,
        "agrees": both == 2,
    }
