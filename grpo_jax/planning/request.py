"""The part of a command line that asks for a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grpo_jax.config.files import read_yaml
from grpo_jax.errors import UserError

PLAN, MEMORY, JUDGES = "--plan", "--device_memory_gib", "--judges"


class Request(NamedTuple):
    """What a plan is asked for.

    Attributes:
        gib: GiB of each device; () for those of this machine.
        times: What --judges says of measured seconds: a run, a file or numbers, "" for the config's own run_dir; None
            where no time is asked for.
    """

    gib: tuple[float, ...] = ()
    times: str | None = None


def take_request(arguments: Sequence[str]) -> tuple[Request | None, list[str]]:
    """Splits --plan, --device_memory_gib and --judges off a command line.

    --judges with a mapping is the config's section and stays.

    Returns:
        The request, None where no plan is asked for; and the other arguments.

    Raises:
        UserError: The memory is no list of positive numbers, or what belongs to --plan comes without it.
    """
    rest: list[str] = []
    memory, times, planning = None, None, False
    pending = list(arguments)
    while pending:
        name, equals, value = pending.pop(0).partition("=")
        argument = f"{name}{equals}{value}"
        if argument == PLAN:
            planning = True
        elif name == MEMORY:
            memory = value if equals else pending.pop(0) if pending else ""
        elif name == JUDGES:
            if not equals and pending and not pending[0].startswith("--"):
                value = pending.pop(0)
            if _is_section(value):
                rest.append(f"{JUDGES}={value}")
            else:
                times = value
        else:
            rest.append(argument)
    if not planning:
        _refuse_alone(memory, times)
    return (Request(_gib(memory), times) if planning else None), rest


def _is_section(words: str) -> bool:
    """Whether it says which judges there are, rather than where their seconds stand."""
    try:
        return words.lstrip().startswith("{") or isinstance(read_yaml(words), Mapping)
    except ValueError:
        return False


def _refuse_alone(memory: str | None, times: str | None) -> None:
    if memory is not None:
        raise UserError(f"{MEMORY}: it says what {PLAN} is to plan for; add {PLAN}")
    if times is not None:
        raise UserError(
            f"{JUDGES}: expected judges by name, as in '{{scorer: {{kind: open_clip}}}}'; for an iteration's time by "
            f"measured seconds add {PLAN}"
        )


def _gib(memory: str | None) -> tuple[float, ...]:
    try:
        gib = tuple(float(part) for part in memory.split(",")) if memory is not None else ()
    except ValueError:
        gib = (0.0,)
    if not all(0 < size < math.inf for size in gib):
        raise UserError(f"{MEMORY}: expected the GiB of each device, such as 16,16,16, got {memory!r}")
    return gib
