"""A run's memory and work before anything is loaded: --plan of the training command, and its options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

from grpo_jax.errors import UserError

PLAN, MEMORY, TARGET = "--plan", "--device_memory_gib", "--target"


class PlanRequest(NamedTuple):
    """The options of --plan.

    Attributes:
        gib: Memory of each device; () for this machine's.
        target: A device that need not be here, whose own compiler is asked ("" for none).
    """

    gib: tuple[float, ...] = ()
    target: str = ""


def take_request(arguments: Sequence[str]) -> tuple[PlanRequest | None, list[str]]:
    """Split --plan and its options off a command line; None without --plan."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(PLAN, action="store_true", dest="plan")
    for name in (MEMORY, TARGET):
        parser.add_argument(name, nargs="?", const="", dest=name)
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}") from error
    given = {name: value for name, value in vars(options).items() if name != "plan" and value is not None}
    if not options.plan:
        if given:
            raise UserError(f"{next(iter(given))}: an option of {PLAN}; add {PLAN}")
        return None, rest
    if given.get(TARGET) == "":
        raise UserError(f"{TARGET}: expected a device, such as h100 or h100:2x8, got nothing")
    if len(given) == 2:
        raise UserError(f"{MEMORY}: expected nothing, {TARGET} has its own memory")
    return PlanRequest(_gib(given[MEMORY]) if MEMORY in given else (), given.get(TARGET, "")), rest


def _gib(text: str) -> tuple[float, ...]:
    try:
        gib = tuple(float(part) for part in text.split(","))
    except ValueError:
        gib = ()
    if not gib or not all(0 < size < math.inf for size in gib):
        raise UserError(f"{MEMORY}: expected the GiB of each device, such as 16,16,16, got {text!r}")
    return gib
