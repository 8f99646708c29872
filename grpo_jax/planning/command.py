"""`python -m grpo_jax.train … --plan [--device_memory_gib 16,16,16 | --target h100]`, from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from grpo_jax.config.command_line import spelled
from grpo_jax.config.fields import require
from grpo_jax.config.run import POLICY, Config
from grpo_jax.errors import UserError
from grpo_jax.models.policy import precision_of
from grpo_jax.planning import PLAN, TARGET, PlanRequest
from grpo_jax.planning.memory import (
    FREE,
    DeviceMemory,
    PolicyMemory,
    list_savings,
    plan_devices,
    plan_policy,
    read_shape,
    read_shown,
)
from grpo_jax.planning.programs import Report
from grpo_jax.planning.targets import Target, parse_target, prepare
from grpo_jax.runs.policy import NEW
from grpo_jax.runs.processes import require_for_processes
from grpo_jax.training.memory import GIB

_PREALLOCATED = 0.75  # JAX's default share of a card


def show_plan(config: object, request: PlanRequest) -> int:
    """Print the plan of a config; return 0 if it fits, 1 if not."""
    target = parse_target(request.target) if request.target else None
    if target is not None:
        prepare()
    if not isinstance(config, Config) or config.policy.path == NEW:
        raise UserError(f"{PLAN}: a small policy, made when the run begins, takes little; there is nothing to plan")
    size, gib = config.policy.mesh.size, request.gib
    if target is not None:
        require(size <= target.count, "policy.mesh", f"at most {target.count} devices for {TARGET} {target}", size)
        require_for_processes(config, target.processes(size))
        gib = (target.kind.memory / GIB,) * target.count
    model = read_shape(config.policy.path)
    pictures, notes = read_shown(config, model)
    _show_devices(gib, config)
    memory, programs = plan_policy(config, model, pictures, target)
    cards = plan_devices(config, memory, gib, target)
    _print_cards(config, memory, cards, notes)
    _print_programs(programs, target)
    full = [card for card in cards if card.excess]
    if not full:
        print("It fits.")
        return 0
    print(f"It does not fit: {', '.join(card.name for card in full)}. These take less (plan again with them):")
    options = [f"  --{name} {spelled(value)}" for name, value in list_savings(config, cards).items()]
    print("\n".join(options) or "  (nothing that is known here)")
    return 1


def _show_devices(gib: tuple[float, ...], config: Config) -> None:
    """Simulate on the CPU devices that are only planned for, as many as a mesh may want."""
    if not gib:
        return
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(len(gib), config.policy.mesh.size))
    except RuntimeError:  # JAX has started already: it keeps the devices that it has
        pass


def _print_cards(config: Config, memory: PolicyMemory, cards: Sequence[DeviceMemory], notes: Sequence[str]) -> None:
    task = config.model_dump()["task"]["kind"]
    print(f"Plan of {task}: {config.policy.path}, {memory.parameters:,} parameters, {memory.trained:,} trained")
    dtype, precision = config.policy.compute_dtype, config.policy.matmul_precision
    print(f"  computed in {dtype}, matmul_precision {precision_of(dtype, precision) or 'default'}")
    for note in notes:
        print(f"  {note}")
    for card in cards:
        print(f"{card.name}, {_gib(card.capacity)} GiB")
        for part, lines in card.parts.items():
            print(f"  {part}")
            for line in lines:
                size = _gib(line.bytes) if line.counted else f"({_gib(line.bytes)})"
                print(f"    {line.name:<26}{size:>9}  {line.note}".rstrip())
        verdict = f"{_gib(card.excess)} GiB too much" if card.excess else "fits"
        print(f"  needed {_gib(card.needed)} of {_gib(card.room)} GiB ({FREE:.0%} left free): {verdict}")
        tight = not card.excess and card.needed > _PREALLOCATED * card.capacity
        if tight and POLICY in card.parts and card.name != "cpu":
            print("  JAX takes 75 % of a card by itself: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95")


def _print_programs(programs: Mapping[str, Report], target: Target | None) -> None:
    """Print memory and work of a call of each program, on one device; of a target also the bound."""
    where = "here" if target is None else f"for {target.kind.title}"
    print(f"Programs, compiled {where} and not run; judges, which torch runs, are no part of them:")
    bound = "" if target is None else "  bound"
    print(f"  {'':<10}{'arguments':>12}{'temporary':>11}{'peak, GiB':>11}{'TFLOP':>9}{'GB moved':>10}{bound}")
    for name, report in programs.items():
        sizes = (report.argument_bytes, report.temporary_bytes, report.peak_bytes)
        memory = "".join(f"{_gib(size):>{width}}" for size, width in zip(sizes, (12, 11, 11), strict=True))
        work = f"{report.work.flops / 1e12:>9.3g}{report.work.bytes / 1e9:>10.3g}"
        bound = "" if target is None else f"  {report.bound_seconds(target):.3g} s"
        print(f"  {name:<10}{memory}{work}{bound}")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
