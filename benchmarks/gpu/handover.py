"""Arrays between JAX and torch on one GPU: shared memory, right lifetime, complete values.

A kernel is in flight when its result is handed over: whether the receiver waited for it shows in the values.
`in_flight` counts the hand-overs that came before the kernels had ended; where it is 0 nothing was tested.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing
from outcome import Figures, Measurements, Skip, needs_torch_beside_jax

from grpo_jax.errors import UserError

TRIES = 20


def measurements(tiny: bool) -> Measurements:
    """Addresses and times, lifetimes, streams both ways, donation, memory side by side."""
    return {
        "same memory, and the time it takes": functools.partial(addresses, tiny),
        "memory outlives its source": lifetime,
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
    """Of the benchmark of the hand-over: whether all sizes kept their address, slowest µs, and those of a copy."""
    needs_torch_beside_jax()
    import bridge

    rows = [row for size in ((1e3, 1e5) if tiny else (1e3, 1e6, 1e9)) for row in bridge.measure(size, 5)]
    same = all(row["same_address"] for row in rows)
    found = {"same_address": same, "agrees": same}
    for direction in ("jax to torch", "torch to jax"):
        chosen = [row for row in rows if row["direction"] == direction]
        found[f"{direction}, slowest µs"] = 1e6 * max(row["dlpack"] for row in chosen)
        found[f"{direction}, copying {chosen[-1]['bytes']:,} bytes, µs"] = 1e6 * chosen[-1]["numpy_copy"]
    return found


def lifetime() -> Figures:
    """Values of an array whose source is gone, while others take memory."""
    dlpack, device = _dlpack(), needs_torch_beside_jax()
    import torch

    tensor, source = torch.full((2**16,), 7.0, device=device), jnp.full((2**16,), 5.0)
    array, view = dlpack.to_jax(tensor), dlpack.to_torch(source)
    del tensor, source
    gc.collect()
    junk = [torch.zeros(2**16, device=device) for _ in range(50)] + [jnp.zeros(2**16) for _ in range(50)]
    jax.block_until_ready(junk[50:])
    kept = bool((array == 7).all()) and bool((view == 5).all())
    return {"kept": kept, "agrees": kept}


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
    """The other way; `side`: the tensor is made on another stream than torch's own, and handed over within it."""
    dlpack, device = _dlpack(), needs_torch_beside_jax()
    import torch

    if side and device == "cpu":
        raise Skip("a CPU has no streams")
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
    stream = torch.cuda.Stream() if side else None

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
    """Both libraries take and give back memory of one card by turns; JAX was told to take none ahead."""
    if needs_torch_beside_jax() == "cpu":
        raise Skip("JAX takes no memory ahead on a CPU")
    import torch

    free, total = torch.cuda.mem_get_info()
    used = timing.card_bytes("bytes_in_use") or 0
    reserved = timing.card_bytes("bytes_reserved") or timing.card_bytes("pool_bytes")
    shape = int(free * (0.01 if tiny else 0.3)) // 4 // 2**20, 2**20  # an index of one axis would not fit 32 bits
    try:
        array = jnp.ones(shape).block_until_ready()
        tensor = torch.ones(shape, device="cuda")
        both = float(array[-1, -1]) + tensor[-1, -1].item()
    except (RuntimeError, UserError) as error:  # out of memory, of either library
        return {"failed_after": str(error).splitlines()[0][:200], "agrees": False}
    del array, tensor
    torch.cuda.empty_cache()
    left = torch.cuda.mem_get_info()[0]
    return {
        "card_gib": timing.gib(total),
        "free_before_gib": timing.gib(free),
        "jax_used_before_gib": timing.gib(used),
        "jax_reserved_before_gib": timing.gib(reserved),
        "each_took_gib": timing.gib(4 * math.prod(shape)),
        "free_after_gib": timing.gib(left),
        "agrees": both == 2,
    }
