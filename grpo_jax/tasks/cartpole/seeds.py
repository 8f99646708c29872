"""Seeds side by side: one compiled function over all of them, spread over the devices there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def seed_keys(seed: int, number: int) -> jax.Array:
    """Keys of the seeds seed, seed + 1, …: what is vmapped over. A seed learns alike alone and among others."""
    return jax.vmap(jax.random.key)(jnp.arange(seed, seed + number))


def split_processor() -> None:
    """Asks JAX for one CPU device per core; without effect once JAX has started, or where XLA_FLAGS says how many.

    The networks are far too small for two threads to share one product; whole seeds are what cores can share out.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except (RuntimeError, AttributeError):  # JAX has started, or is older than this option
        return


def seed_devices(seeds: int) -> list[Any]:
    """The most of JAX's devices that share the seeds evenly."""
    devices = jax.devices()
    number = max(count for count in range(1, len(devices) + 1) if seeds % count == 0)
    return devices[:number]


def over_seeds(function: Callable[..., Any], devices: Sequence[Any]) -> Callable[..., Any]:
    """Compiles `function` for many seeds: the first axis of all it takes and gives.

    Each device runs its seeds by itself: a loop ends when its own last seed is done.
    """
    vectorised = jax.vmap(function)
    if len(devices) == 1:
        return jax.jit(vectorised)
    mesh, seeds = Mesh(devices, ("seed",)), PartitionSpec("seed")
    # Nothing is summed over devices, so there is nothing for the check of such sums to find.
    shared = jax.shard_map(vectorised, mesh=mesh, in_specs=seeds, out_specs=seeds, check_vma=False)
    return jax.jit(shared, in_shardings=NamedSharding(mesh, seeds), out_shardings=NamedSharding(mesh, seeds))
