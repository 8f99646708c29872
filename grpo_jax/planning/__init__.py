"""A run's memory before anything is loaded: --plan and --device_memory_gib of the training command."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from grpo_jax.errors import UserError

PLAN, MEMORY = "--plan", "--device_memory_gib"


def take_request(arguments: Sequence[str]) -> tuple[tuple[float, ...] | None, list[str]]:
    """Split --plan and its memory (() for this machine's devices, None without --plan) off a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(PLAN, action="store_true", dest="plan")
    parser.add_argument(MEMORY, nargs="?", const="", dest="memory")
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}") from error
    if options.memory is None:
        return () if options.plan else None, rest
    if not options.plan:
        raise UserError(f"{MEMORY}: it says what {PLAN} is to plan for; add {PLAN}")
    try:
        gib = tuple(float(part) for part in options.memory.split(","))
    except ValueError:
        gib = ()
    if not gib or not all(0 < size < math.inf for size in gib):
        raise UserError(f"{MEMORY}: expected the GiB of each device, such as 16,16,16, got {options.memory!r}")
    return gib, rest
