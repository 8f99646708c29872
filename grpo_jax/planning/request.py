"""The part of a command line that asks for a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_jax.errors import UserError

PLAN, MEMORY = "--plan", "--device_memory_gib"


def take_request(arguments: Sequence[str]) -> tuple[tuple[float, ...] | None, list[str]]:
    """Splits --plan and --device_memory_gib off a command line.

    Returns:
        GiB of each device, () for those of this machine, None where no plan is asked for; and the other arguments.

    Raises:
        UserError: The memory is no list of positive numbers, or comes without --plan.
    """
    rest, memory, planning = [], None, False
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument == PLAN:
            planning = True
        elif argument == MEMORY:
            memory = pending.pop(0) if pending else ""
        elif argument.startswith(f"{MEMORY}="):
            memory = argument.removeprefix(f"{MEMORY}=")
        else:
            rest.append(argument)
    if memory is not None and not planning:
        raise UserError(f"{MEMORY}: it says what {PLAN} is to plan for; add {PLAN}")
    try:
        gib = tuple(float(part) for part in memory.split(",")) if memory is not None else ()
    except ValueError:
        gib = (0.0,)
    if not all(0 < size < math.inf for size in gib):
        raise UserError(f"{MEMORY}: expected the GiB of each device, such as 16,16,16, got {memory!r}")
    return (gib if planning else None), rest
