"""Which devices take part in a collective together, as XLA writes it down."""

from __future__ import annotations

import math
import re
from collections import defaultdict

import numpy as np

_DEVICES = r"\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+"  # counted up over dimensions, which are then transposed; or listed
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_COUNTED = re.compile(rf"replica_groups=\[([\d,]+)\]<=({_DEVICES})")
_MESH = re.compile(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(({_DEVICES})\))? \{{([^}}]*)\}}")
_NAME = r"'?([\w.\-]+)'?"


def replica_groups(attributes: str, count: int) -> list[list[int]]:
    """Return the devices of each group: listed, counted up, or those along axes of a mesh; all `count` if none says."""
    if listed := _LISTED.search(attributes):
        return [_numbers(group) for group in listed[1].split("},")]
    if counted := _COUNTED.search(attributes):
        return _devices(counted[2]).reshape(_numbers(counted[1])).tolist()
    if mesh := _MESH.search(attributes):
        return _along(mesh[1], mesh[2], mesh[3])
    if "replica_groups=" in attributes and "replica_groups={}" not in attributes:
        raise ValueError(f"replica groups of an unknown form: {attributes[:120]}")
    return [list(range(count))]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _devices(text: str) -> np.ndarray:
    if not text.startswith("["):
        return np.array(_numbers(text))
    dimensions, _, order = text.partition("T")
    sizes = _numbers(dimensions)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(_numbers(order) or range(len(sizes)))


def _along(mesh: str, device_ids: str | None, grouped: str) -> list[list[int]]:
    """Group the devices that differ only along axes ('a'), or parts of axes ('a':(before)size), of a mesh ('a'=8)."""
    sizes = {name: int(size) for name, size in re.findall(rf"{_NAME}=(\d+)", mesh)}
    devices = _devices(device_ids) if device_ids else np.arange(math.prod(sizes.values()))
    places = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    for name, before, size in re.findall(rf"{_NAME}(?::\((\d+)\)(\d+))?", grouped):
        step = sizes[name] // (int(before) * int(size)) if size else 1
        places[name] = places[name] - places[name] // step % int(size or sizes[name]) * step
    groups = defaultdict(list)
    for device, *place in zip(devices.ravel().tolist(), *places.values(), strict=True):
        groups[tuple(place)].append(device)
    return list(groups.values())
