"""Seconds of work on a GPU, and the GPU's peak rates, measured in the same process."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

GIB = 2**30


def seconds(function: Callable[..., Any], *arrays: Any, rounds: int = 5, wait: Any = jax.block_until_ready) -> float:
    """Median seconds of function(*arrays) until its result is there, behind one call that compiles."""
    wait(function(*arrays))
    return statistics.median(durations(function, *arrays, rounds=rounds, wait=wait))


def durations(
    function: Callable[..., Any], *arrays: Any, rounds: int, wait: Any = jax.block_until_ready
) -> list[float]:
    """Seconds of each of so many calls."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        wait(function(*arrays))
        found.append(time.perf_counter() - start)
    return found


def wait_for_torch(result: Any = None) -> Any:
    """Waits until torch's kernels have ended; on the CPU they have."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


@functools.cache
def ceilings(tiny: bool) -> dict[str, float]:
    """The largest rates of products in bfloat16 and of a stream through memory, of several sizes and rounds."""
    return {"flops_per_second": _products((256,) if tiny else (4096, 8192)), "bytes_per_second": _stream(tiny)}


def _products(sizes: tuple[int, ...]) -> float:
    multiply, rates = jax.jit(jnp.matmul), []
    for size in sizes:
        matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
        multiply(matrix, matrix).block_until_ready()
        rates.append(2 * size**3 / min(durations(multiply, matrix, matrix, rounds=10)))
    return max(rates)


def _stream(tiny: bool) -> float:
    """Two arrays read and one written, into memory that is there already."""
    size = 2**20 if tiny else 2**28  # 1 GiB each, far larger than any cache
    first, second = (jnp.full(size, float(i)) for i in range(2))
    triad = jax.jit(lambda a, b: a + 3.0 * b, donate_argnums=0)
    first, taken = triad(first, second).block_until_ready(), []
    for _ in range(10):
        start = time.perf_counter()
        first = triad(first, second).block_until_ready()
        taken.append(time.perf_counter() - start)
    return 3 * first.nbytes / min(taken)


def ceiling_figures(tiny: bool) -> dict[str, float]:
    """The same for a table: TFLOP/s and GB/s."""
    found = ceilings(tiny)
    return {"tflop_per_second": found["flops_per_second"] / 1e12, "gb_per_second": found["bytes_per_second"] / 1e9}


def card_bytes(name: str) -> int | None:
    """A figure of the first device's allocator, such as "peak_bytes_in_use"; None where it keeps none (a CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get(name)


def gib(size: float | None) -> float | None:
    """Bytes in GiB."""
    return None if size is None else size / GIB
