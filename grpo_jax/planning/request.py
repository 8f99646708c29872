"""The part of a command line that asks for a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_jax.errors import UserError

PLAN, MEMORY = "--plan", "--device_memory_gib"


def take_request(arguments: Sequence[str]) -> tuple[tuple[float, ...] | None, list[str]]:
    """Splits --plan and --device_memory_gib off a command line.

    Returns:
        The GiB of each device to plan for, () for the devices of this machine, None where no plan is asked for; and the
        other arguments.

    Raises:
        UserError: The memory is no list of positive numbers, or comes without --plan.
    """
    rest: list[str] = []
    memory: str | None = None
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        name, equals, value = argument.partition("=")
        if name == MEMORY:
            memory = value if equals else pending.pop(0) if pending else ""
        elif argument != PLAN:
            rest.append(argument)
    if PLAN in arguments:
        return _sizes(memory), rest
    if memory is not None:
        raise UserError(f"{MEMORY}: it says what {PLAN} is to plan for; add {PLAN}")
    return None, rest


def _sizes(memory: str | None) -> tuple[float, ...]:
    if memory is None:
        return ()
    try:
        gib = tuple(float(part) for part in memory.split(","))
    except ValueError:
        gib = (0.0,)
    if not all(0 < size < math.inf for size in gib):
        raise UserError(f"{MEMORY}: expected the GiB of each device, such as 16,16,16, got {memory!r}")
    return gib
