"""Placement of each part on a device: the policy in JAX, the judges in torch.

By default each has its own GPU, `gpu:0`, `gpu:1`, …. With fewer GPUs they share; without any they run on the CPU. GPUs
are numbered as in torch and JAX, that is after `CUDA_VISIBLE_DEVICES`.
"""

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import jax

from grpo_jax.errors import UserError

POLICY = "policy"  # the part that JAX runs; all others are judges, which torch runs

Placement = dict[str, str]
"""Device of each part, or its request: "cpu", "gpu:N", "auto" in a request; for the policy also "gpu:0,gpu:1"."""
ALLOCATED = 0.92  # the rest of a GPU's memory is for contexts and libraries
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ALONE = 0.75  # JAX's own limit, in force where no judge shares the GPU


def policy_cards(placement: Mapping[str, str]) -> tuple[int, ...]:
    """Return the numbers of the policy's GPUs; none on the CPU."""
    return tuple(int(name.removeprefix("gpu:")) for name in placement[POLICY].split(",") if name != "cpu")


def place(requests: Mapping[str, str], *, policy_count: int = 1) -> tuple[Placement, list[str]]:
    """Find a device for each part on this machine; call it, and `prepare_jax`, before JAX is used.

    Requests are "auto", "cpu" or "gpu:N" by part, for the policy also "gpu:N,gpu:M"; on "auto" it takes `policy_count`
    GPUs. Also returns lines to print, unless each part has its own GPU. UserError if a named device does not exist, or
    the installed jax or torch cannot use it.
    """
    judges = [where for part, where in requests.items() if part != POLICY]
    torch_gpus, count = bool(judges), _count_cards()
    if any(where != "cpu" for where in judges):
        import torch

        torch_gpus = torch.backends.cuda.is_built() or torch.version.hip is not None
        count = torch.cuda.device_count() if torch_gpus else count
    if requests[POLICY] == "auto" and policy_count > 1 and count and _jax_has_gpus():
        requests = {**requests, POLICY: ",".join(f"gpu:{card}" for card in range(policy_count))}
    return resolve(requests, count, jax_gpus=_jax_has_gpus(), torch_gpus=torch_gpus)


def resolve(
    requests: Mapping[str, str], gpu_count: int, *, jax_gpus: bool = True, torch_gpus: bool = True
) -> tuple[Placement, list[str]]:
    """Apply the rules of `place` to a number of GPUs and the frameworks that can use them.

    A part on "auto" takes its own GPU: 0 for the policy, 1, 2, … for the judges in order. If that does not exist, or
    another part names it, the part takes the first free GPU. Else it shares the least shared one, with the policy only
    if there is no other. Returns at most one line, about sharing or falling back.
    """
    parts = tuple(requests)
    usable = {part: gpu_count if (jax_gpus if part == POLICY else torch_gpus) else 0 for part in parts}
    named = [part for part in parts if requests[part] != "auto"]
    chosen = {part: _named(part, requests[part], usable[part], gpu_count) for part in named}
    for number, part in enumerate(parts):
        if part not in chosen:
            taken = [name for names in chosen.values() for name in names]
            chosen[part] = [_free_or_shared(number, usable[part], taken, chosen.get(POLICY, []))]
    placement = {part: ",".join(chosen[part]) for part in parts}
    moved = [part for i, part in enumerate(parts) if requests[part] == "auto" and placement[part] != f"gpu:{i}"]
    return placement, [_note(placement, gpu_count, jax_gpus, torch_gpus)] if moved else []


def prepare_jax(placement: Mapping[str, str]) -> list[str]:
    """Show JAX only the policy's GPUs; if torch shares one, stop JAX from preallocating its memory.

    Call it before JAX's backend starts, which any use of an array does. The user's environment variables
    `JAX_PLATFORMS` and `XLA_PYTHON_CLIENT_PREALLOCATE` are kept. Returns a line if JAX had already started.
    """
    cards = policy_cards(placement)
    if jax_has_started():
        if _jax_cards().keys() == set(cards):
            return []
        devices = ", ".join(map(str, jax.local_devices()))
        return [f"JAX had already started: it keeps the devices it sees ({devices})"]
    if cards:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, cards)))
        judges = {where for part, where in placement.items() if part != POLICY}
        if judges & set(placement[POLICY].split(",")):
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    elif _jax_has_gpus():
        jax.config.update("jax_platforms", "cpu")
    return []


def share_memory(placement: Mapping[str, str], needed: int | None) -> list[str]:
    """Divide a GPU's memory between JAX and torch if the policy shares it with judges; return a line about it.

    Call it before JAX's backend starts. Nothing is preallocated (`prepare_jax`): a share is an upper limit. `needed`
    are the bytes reported by the judges on the policy's GPUs, None if one does not report.
    """
    judges = {where for part, where in placement.items() if part != POLICY}
    shared = [card for card in policy_cards(placement) if f"gpu:{card}" in judges]
    if not shared or jax_has_started():
        return []
    import torch

    total = min(torch.cuda.get_device_properties(card).total_memory for card in shared)
    ours, theirs = memory_shares(needed, total)
    if not os.environ.get("XLA_CLIENT_MEM_FRACTION"):
        os.environ[FRACTION] = str(ours)
    for card in shared:
        torch.cuda.set_per_process_memory_fraction(theirs, card)
    cards = ", ".join(f"gpu:{card}" for card in shared)
    return [f"memory of {cards}: at most {ours:.0%} for the policy and {theirs:.0%} for judges, taken as needed"]


def memory_shares(needed: int | None, total: int, *, shared: bool = True) -> tuple[float, float]:
    """Return JAX's and torch's shares of a GPU with `total` bytes, if judges need `needed` bytes (None: unknown).

    torch gets 1.5 times the judges' need, but at least a fifth, and more than two thirds of the GPU only if they need
    it. The user's `XLA_PYTHON_CLIENT_MEM_FRACTION` is kept, and torch gets the rest.
    """
    given = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get(FRACTION)
    if given or not shared:
        ours = float(given or _ALONE)
        return ours, max(ALLOCATED - ours, 0.05)
    need = ALLOCATED / 3 if needed is None else needed / total
    theirs = max(min(max(1.5 * need, 0.2), 2 / 3), min(need + 0.01, ALLOCATED - 0.1))
    return round(ALLOCATED - theirs, 2), round(theirs, 2)


def policy_devices(placement: Mapping[str, str]) -> list[jax.Device]:
    """Return the policy's JAX devices: the named GPUs that JAX sees, else its devices; starts JAX's backend."""
    cards = _jax_cards()
    if policy_cards(placement):
        return [cards[card] for card in policy_cards(placement) if card in cards] or jax.local_devices()
    return jax.local_devices(backend="cpu") if cards else jax.local_devices()


def cards_left() -> list[str] | None:
    """Return the GPUs unused by this process, as in `CUDA_VISIBLE_DEVICES`; None if there are none.

    JAX's visible GPUs, and those where torch holds memory, are used.
    """
    count = _count_cards()
    if not count:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if visible is None else [name for name in visible.split(",") if name.strip()]
    used = set(_jax_cards()) if jax_has_started() else set()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        used |= {card for card in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(card)}
    return [name for card, name in enumerate(names) if card not in used]


def _named(part: str, value: str, usable: int, gpu_count: int) -> list[str]:
    """Return the devices of an explicit request, in normal form."""
    names = value.split(",") if part == POLICY else [value]
    if names == ["cpu"]:
        return names
    matches = [re.fullmatch(r"(?:gpu|cuda)(?::(\d+))?", name.strip()) for name in names]
    if not all(matches):
        raise UserError(f'devices.{part}: expected "auto", "cpu" or "gpu:N", got {value!r}')
    cards = [int(match[1] or 0) for match in matches if match]
    there = ", ".join(["cpu", *(f"gpu:{i}" for i in range(gpu_count))])
    if max(cards) >= gpu_count:
        raise UserError(f"devices.{part}: there is no {value} here; this machine has {there}")
    if not usable:
        library, extra = ("jax", "grpo_jax[cuda12]") if part == POLICY else ("torch", "torch for CUDA")
        raise UserError(f"devices.{part}: the installed {library} cannot use {value}; install {extra}, or say cpu")
    return [f"gpu:{card}" for card in dict.fromkeys(cards)]


def _free_or_shared(preferred: int, usable: int, taken: list[str], policy: list[str]) -> str:
    if not usable:
        return "cpu"
    cards = [f"gpu:{i}" for i in range(usable)]
    free = [card for card in (*cards[preferred : preferred + 1], *cards) if card not in taken]
    return free[0] if free else min(cards, key=lambda card: (card in policy, taken.count(card)))


def _note(placement: Mapping[str, str], gpu_count: int, jax_gpus: bool, torch_gpus: bool) -> str:
    """Return a line such as "policy on gpu:0, renderer on gpu:1, scorer on gpu:1 (2 GPUs found)"."""
    count = f"{gpu_count or 'no'} GPU{'' if gpu_count < 2 else 's'} found"
    unable = [name for name, able in (("jax", jax_gpus), ("torch", torch_gpus)) if gpu_count and not able]
    if unable:
        count += f", but the installed {' and '.join(unable)} cannot use GPUs"
    return f"{', '.join(f'{part} on {where}' for part, where in placement.items())} ({count})"


def _jax_cards() -> dict[int, jax.Device]:
    """Return JAX's GPUs by torch's number; starts JAX's backend."""
    return {device.local_hardware_id: device for device in jax.local_devices() if device.platform == "gpu"}


def jax_has_started() -> bool:
    """Return whether JAX's backend has started; if JAX's private function moves, False, which is harmless."""
    with suppress(ImportError):
        from jax._src.xla_bridge import backends_are_initialized

        return backends_are_initialized()
    return False


def _jax_has_gpus() -> bool:
    """Return whether the installed jax supports GPUs, without starting it."""
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
        return False
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")
    return any(importlib.util.find_spec(name) is not None for name in plugins)


def _count_cards() -> int:
    """Count the driver's NVIDIA GPUs, if torch cannot."""
    listing = Path("/proc/driver/nvidia/gpus")
    # Sandboxes list only the devices; WSL2 has only the management library.
    count = len(list(listing.iterdir())) if listing.is_dir() else len(list(Path("/dev").glob("nvidia[0-9]*")))
    count = count or _managed_cards()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([name for name in visible.split(",") if name.strip()]))


def _managed_cards() -> int:
    """Count the GPUs with NVIDIA's management library; 0 without it."""
    count = ctypes.c_uint(0)
    with suppress(OSError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            library.nvmlDeviceGetCount_v2(ctypes.byref(count))
            library.nvmlShutdown()
    return count.value
