"""The devices of each part of a run: in this process, and the policy's in all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import jax

from grpo_jax.config import Config, PolicySection
from grpo_jax.config.named import own_package
from grpo_jax.config.run import POLICY
from grpo_jax.errors import UserError
from grpo_jax.tasks.task import Say

_ON_THIS_MACHINE = "SLURM_LOCALID"


def place_parts(config: Config, say: Say, *, processes: int = 1) -> dict[str, str]:
    """Choose the device of each part on this machine, before JAX starts; `processes` share the policy's devices."""
    placement = own_package("bridges", "placement")
    requests = config.requests
    away = {name: requests.pop(name) for name in config.elsewhere}
    places, notes = placement.place(requests, policy_count=config.policy.mesh.size // processes)
    for note in [*(notes if config.judges else ()), *placement.prepare_jax(places)]:
        say("devices", note)
    return {**places, **away}


def place_policy(config: Config, *, processes: int) -> dict[str, str]:
    """Choose the devices of a process that has the policy alone."""
    placement = own_package("bridges", "placement")
    places, _ = placement.place({POLICY: config.requests[POLICY]}, policy_count=config.policy.mesh.size // processes)
    placement.prepare_jax(places)
    return places


def policy_devices(places: Mapping[str, str], section: PolicySection, *, processes: int = 1) -> list[jax.Device]:
    """The policy's JAX devices, as many as its mesh takes; of several processes those in the same places in each.

    UserError if there are too few, or another process runs on this machine: all would take the same.
    """
    devices, mesh = own_package("bridges", "placement").policy_devices(places), section.mesh
    wanted = mesh.size // processes
    if len(devices) < wanted:
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"policy.mesh: fsdp {mesh.fsdp} x tensor {mesh.tensor} takes {wanted} devices{each}, but the policy has "
            f"{len(devices)} ({listed(devices)}); make the mesh smaller (evaluate: --mesh FSDP TENSOR); "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} shows JAX that many on a CPU, for a trial"
        )
    if processes == 1:
        return devices[:wanted]
    if devices[0].platform == "gpu" and os.environ.get(_ON_THIS_MACHINE, "0") != "0":
        raise UserError(f"{_ON_THIS_MACHINE}: expected one process on each machine (srun --ntasks-per-node=1)")
    mine = jax.local_devices(backend=devices[0].platform)
    numbers = [mine.index(device) for device in devices[:wanted]]
    every = (jax.local_devices(process, devices[0].platform) for process in range(processes))
    return [local[number] for local in every for number in numbers]


def listed(devices: Sequence[jax.Device]) -> str:
    """Names of devices."""
    return ", ".join(map(str, devices))
