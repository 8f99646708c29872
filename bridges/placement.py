"""Which device each part runs on: the policy in JAX, renderer and scorer in torch.

By default each has a card of its own, `gpu:0`, `gpu:1` and `gpu:2`; with fewer cards they share, without any
they run on the CPU. Cards are numbered as torch and JAX see them, that is after `CUDA_VISIBLE_DEVICES`.
"""

import importlib.util
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path

import jax

from grpo_jax.errors import UserError


@dataclass(frozen=True)
class Placement:
    """Where the parts run, or are asked to run.

    Attributes:
        policy: "cpu" or "gpu:N", or several cards as "gpu:0,gpu:1"; "auto" in a request.
        renderer: "cpu" or "gpu:N"; "auto" in a request.
        scorer: likewise.
    """

    policy: str = "auto"
    renderer: str = "auto"
    scorer: str = "auto"

    @property
    def policy_cards(self) -> tuple[int, ...]:
        """Numbers of the policy's cards; none on the CPU."""
        return tuple(int(name.removeprefix("gpu:")) for name in self.policy.split(",") if name != "cpu")


PARTS = tuple(field.name for field in fields(Placement))


def place(
    policy: str = "auto", renderer: str = "auto", scorer: str = "auto", *, policy_count: int = 1
) -> tuple[Placement, list[str]]:
    """Finds a device for each part on this machine; call it, and `prepare_jax`, before JAX is used.

    Args:
        policy: "auto", "cpu", "gpu:N" or "gpu:N,gpu:M".
        renderer: "auto", "cpu" or "gpu:N".
        scorer: likewise.
        policy_count: cards that the policy takes on "auto".

    Returns:
        The placement, and lines to print where it is not one card for each part.

    Raises:
        UserError: if a device is named that is not there, or that the installed jax or torch cannot use.
    """
    import torch

    torch_gpus = torch.backends.cuda.is_built() or torch.version.hip is not None
    count = torch.cuda.device_count() if torch_gpus else _count_cards()
    if policy == "auto" and policy_count > 1 and count and _jax_has_gpus():
        policy = ",".join(f"gpu:{card}" for card in range(policy_count))
    request = Placement(policy, renderer, scorer)
    return resolve(request, count, jax_gpus=_jax_has_gpus(), torch_gpus=torch_gpus)


def resolve(
    request: Placement, gpu_count: int, *, jax_gpus: bool = True, torch_gpus: bool = True
) -> tuple[Placement, list[str]]:
    """The rules of `place`, as a function of what there is.

    A part asked to be on "auto" takes its own card (0, 1 and 2) if that exists and nobody named it, else the
    first free one, else it shares: not with the policy if there is another card, and the fuller ones last.

    Args:
        request: a device or "auto" for each part.
        gpu_count: cards of the machine.
        jax_gpus: whether the installed jax can use them.
        torch_gpus: whether the installed torch can.

    Returns:
        The placement, and at most one line that tells of sharing or falling back.

    Raises:
        UserError: as `place`.
    """
    usable = {part: gpu_count if (jax_gpus if part == "policy" else torch_gpus) else 0 for part in PARTS}
    chosen: dict[str, list[str]] = {}
    for part in PARTS:
        if getattr(request, part) != "auto":
            chosen[part] = _named(part, getattr(request, part), usable[part], gpu_count)
    for part in PARTS:
        if part not in chosen:
            taken = [name for names in chosen.values() for name in names]
            policy = chosen.get("policy", [])
            chosen[part] = [_free_or_shared(PARTS.index(part), usable[part], taken, policy)]
    placement = Placement(**{part: ",".join(names) for part, names in chosen.items()})
    moved = [
        part
        for i, part in enumerate(PARTS)
        if getattr(request, part) == "auto" and getattr(placement, part) != f"gpu:{i}"
    ]
    return placement, [_note(placement, gpu_count, jax_gpus, torch_gpus)] if moved else []


def prepare_jax(placement: Placement) -> list[str]:
    """Shows JAX the policy's cards only; where torch shares one, keeps JAX from claiming its whole memory.

    Must come before JAX's backend starts, which any use of an array does. What the user set himself, the
    environment variables `JAX_PLATFORMS` and `XLA_PYTHON_CLIENT_PREALLOCATE`, is left alone.

    Args:
        placement: as resolved by `place`.

    Returns:
        Lines to print: empty, or one that says that JAX had started already and keeps the devices it has.
    """
    cards = placement.policy_cards
    if _jax_has_started():
        seen = {d.local_hardware_id for d in jax.local_devices() if d.platform == "gpu"}
        if seen == set(cards):
            return []
        return [f"JAX had already started: it keeps the devices it sees ({_listed(jax.local_devices())})"]
    shared = set(placement.policy.split(",")) & {placement.renderer, placement.scorer}
    if cards:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, cards)))
        if shared:
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    elif _jax_has_gpus():
        jax.config.update("jax_platforms", "cpu")
    return []


def policy_devices(placement: Placement) -> list[jax.Device]:
    """The JAX devices of the policy: the named cards that JAX sees, else what it has; starts JAX's backend."""
    cards = {d.local_hardware_id: d for d in jax.local_devices() if d.platform == "gpu"}
    if placement.policy_cards:
        return [cards[card] for card in placement.policy_cards if card in cards] or jax.local_devices()
    return jax.local_devices(backend="cpu") if cards else jax.local_devices()


def _named(part: str, value: str, usable: int, gpu_count: int) -> list[str]:
    """The devices of an explicit request, in one spelling."""
    names = value.split(",") if part == "policy" else [value]
    if names == ["cpu"]:
        return names
    matches = [re.fullmatch(r"(?:gpu|cuda)(?::(\d+))?", name.strip()) for name in names]
    if not all(matches):
        raise UserError(f'placement.{part}: expected "auto", "cpu" or "gpu:N", got {value!r}')
    cards = [int(match[1] or 0) for match in matches if match]
    there = ", ".join(["cpu", *(f"gpu:{i}" for i in range(gpu_count))])
    if max(cards) >= gpu_count:
        raise UserError(f"placement.{part}: there is no {value} here; this machine has {there}")
    if not usable:
        library, extra = ("jax", "grpo_jax[cuda12]") if part == "policy" else ("torch", "torch for CUDA")
        raise UserError(f"placement.{part}: the installed {library} cannot use {value}; install {extra}, or say cpu")
    return [f"gpu:{card}" for card in dict.fromkeys(cards)]


def _free_or_shared(preferred: int, usable: int, taken: list[str], policy: list[str]) -> str:
    if not usable:
        return "cpu"
    cards = [f"gpu:{i}" for i in range(usable)]
    own = cards[preferred : preferred + 1]
    for card in own + cards:
        if card not in taken:
            return card
    return min(cards, key=lambda card: (card in policy, taken.count(card)))


def _note(placement: Placement, gpu_count: int, jax_gpus: bool, torch_gpus: bool) -> str:
    """Such as "policy on gpu:0; renderer and scorer share gpu:1 (2 GPUs found)"."""
    places: dict[str, list[str]] = {}
    for part in PARTS:
        places.setdefault(getattr(placement, part), []).append(part)
    phrases = []
    for where, parts in places.items():
        names = " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
        phrases.append(f"{names} {'share' if len(parts) > 1 else 'on'} {where.replace('cpu', 'the CPU')}")
    found = {0: "no GPU found", 1: "1 GPU found"}.get(gpu_count, f"{gpu_count} GPUs found")
    unable = [name for name, able in (("jax", jax_gpus), ("torch", torch_gpus)) if gpu_count and not able]
    if unable:
        found += f", but the installed {' and '.join(unable)} cannot use GPUs"
    return f"{'; '.join(phrases)} ({found})"


def _jax_has_started() -> bool:
    # JAX has no public question for this; if the private one moves, act as if it had not started: harmless
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()


def _jax_has_gpus() -> bool:
    """Whether the installed jax can drive GPUs, found without starting it."""
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
        return False
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")
    return any(importlib.util.find_spec(name) is not None for name in plugins)


def _count_cards() -> int:
    """NVIDIA cards as the driver lists them, for when torch cannot be asked."""
    listing = Path("/proc/driver/nvidia/gpus")
    count = len(list(listing.iterdir())) if listing.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([name for name in visible.split(",") if name.strip()]))


def _listed(devices: list[jax.Device]) -> str:
    return ", ".join(str(device) for device in devices)
