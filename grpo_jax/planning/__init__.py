"""Plan a run's memory and compute before anything is loaded: --plan of the training command, and its options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import suppress

from grpo_jax.errors import Parser, UserError

PLAN, MEMORY, TARGET = "--plan", "--device_memory_gib", "--target"
GIB = 2**30


def take_request(arguments: Sequence[str]) -> tuple[argparse.Namespace | None, list[str]]:
    """Separate --plan and its options from a command line; None without --plan.

    They are `gib`, of each device (() for this machine's), and `target`, a device to simulate ("": none).
    """
    parser = Parser("grpo plan", add_help=False, allow_abbrev=False)
    parser.add_argument(PLAN, action="store_true", dest="plan")
    devices = parser.add_mutually_exclusive_group()  # a target has its own memory
    devices.add_argument(MEMORY, type=_gib, default=(), dest="gib")
    devices.add_argument(TARGET, default="", dest="target")
    options, rest = parser.parse_known_args(arguments)
    if options.plan:
        return options, rest
    if options.gib or options.target:
        raise UserError(f"{MEMORY if options.gib else TARGET}: an option of {PLAN}; add {PLAN}")
    return None, rest


def _gib(text: str) -> tuple[float, ...]:
    with suppress(ValueError):
        gib = tuple(map(float, text.split(",")))
        if all(0 < size < math.inf for size in gib):
            return gib
    raise argparse.ArgumentTypeError(f"expected the GiB of each device, such as 16,16,16, got {text!r}")
