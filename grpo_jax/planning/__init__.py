"""A run's memory before anything is loaded: --plan of the training command, and what belongs to it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

from grpo_jax.errors import UserError

PLAN, MEMORY, TARGET, JSON = "--plan", "--device_memory_gib", "--target", "--plan_json"


class PlanRequest(NamedTuple):
    """What --plan is asked for.

    Attributes:
        gib: Memory of each device; () for this machine's.
        target: A device that need not be here, whose own compiler is asked ("" for none).
        file: Where the target's programs are written as JSON; "" for nowhere.
    """

    gib: tuple[float, ...] = ()
    target: str = ""
    file: str = ""


def take_request(arguments: Sequence[str]) -> tuple[PlanRequest | None, list[str]]:
    """Split --plan and its options off a command line; None without --plan."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(PLAN, action="store_true", dest="plan")
    for name in (MEMORY, TARGET, JSON):
        parser.add_argument(name, nargs="?", const="", dest=name)
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}") from error
    given = {name: value for name, value in vars(options).items() if name != "plan" and value is not None}
    if not options.plan:
        if given:
            raise UserError(f"{next(iter(given))}: it says what {PLAN} is to plan for; add {PLAN}")
        return None, rest
    for name, expected in ((TARGET, "a device, such as h100 or h100:2x8"), (JSON, "a file")):
        if given.get(name) == "":
            raise UserError(f"{name}: expected {expected}, got nothing")
    if JSON in given and TARGET not in given:
        raise UserError(f"{JSON}: it is what the compiler of a device says; add {TARGET}")
    if MEMORY in given and TARGET in given:
        raise UserError(f"{MEMORY}: expected nothing, {TARGET} has its own memory")
    gib = _gib(given[MEMORY]) if MEMORY in given else ()
    return PlanRequest(gib, given.get(TARGET, ""), given.get(JSON, "")), rest


def _gib(text: str) -> tuple[float, ...]:
    try:
        gib = tuple(float(part) for part in text.split(","))
    except ValueError:
        gib = ()
    if not gib or not all(0 < size < math.inf for size in gib):
        raise UserError(f"{MEMORY}: expected the GiB of each device, such as 16,16,16, got {text!r}")
    return gib
