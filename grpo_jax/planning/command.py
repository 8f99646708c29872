"""`python -m grpo_jax.train … --plan [--device_memory_gib 16,16,16 | --target h100]`, from config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from grpo_jax.config.build import to_dict
from grpo_jax.config.run import POLICY, Config
from grpo_jax.errors import UserError, short_name
from grpo_jax.models.policy import precision_of
from grpo_jax.planning import JSON, PLAN, TARGET, PlanRequest
from grpo_jax.planning.cards import FREE, Card, Planner, first_that_fits, list_savings, option
from grpo_jax.planning.policy import PolicyMemory, read_shape, read_shown
from grpo_jax.planning.target_plan import Report
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
    if not isinstance(config, Config):
        name = to_dict(config)["task"]["kind"]
        raise UserError(f"{PLAN}: a {name} run has no language policy and takes little; there is nothing to plan")
    if config.policy.path == NEW:
        raise UserError(f"{PLAN}: policy.path new is made of the task's words when the run begins; it is small")
    size = config.policy.mesh.size
    if target is not None and size > target.count:
        raise UserError(f"policy.mesh: expected at most {target.count} devices for {TARGET} {target}, got {size}")
    if target is not None:
        require_for_processes(config, target.processes(size))
    gib = request.gib if target is None else (target.kind.memory / GIB,) * target.count
    model = read_shape(config.policy.path)
    pictures, notes = read_shown(config, model)
    _show_devices(gib, config)
    planner = Planner(model, gib, pictures, target)
    memory, cards = planner.policy(config), planner.cards(config)
    _tell(config, memory, cards, notes)
    if target is not None:
        _tell_programs(target, planner.programs)
        if request.file:
            _write(Path(request.file), target, planner.programs)
    full = [card for card in cards if card.excess]
    if not full:
        print("It fits.")
        return 0
    verdict = f"It does not fit: {', '.join(card.name for card in full)}."
    if small := [card.name for card in full if card.runtime > card.room]:
        print(f"{verdict} Contexts and libraries alone are too much for {', '.join(small)}: take larger devices.")
        return 1
    savings = list_savings(config, cards, target)
    if target is not None and (enough := first_that_fits(planner, config, savings)):
        print(f"{verdict} It would with {enough}.")
        return 1
    alone = " Nothing below is enough alone." if target is not None else ""
    print(f"{verdict}{alone} These take less (plan again with them), and so do a smaller model and larger devices:")
    print("\n".join(f"  {option(*saving)}" for saving in savings.items()) or "  (nothing that is known here)")
    return 1


def _tell_programs(target: Target, programs: Mapping[str, Report]) -> None:
    print(f"Programs, compiled for {target.kind.title} and not run; judges, which torch runs, are counted:")
    print(
        f"{'GiB of':>12}{'arguments':>12}{'temporary':>10}{'peak':>8}{'kernels':>14}{'a layer':>9}{'copies':>8}  bound"
    )
    for name, report in programs.items():
        reading = report.reading
        sizes = (report.argument_bytes, report.temporary_bytes, report.peak_bytes)
        memory = "".join(f"{_gib(size):>{width}}" for size, width in zip(sizes, (12, 10, 8), strict=True))
        copies = reading.weight_copies + reading.cache_copies
        kernels = f"{reading.kernels:>14,}{reading.layer_kernels:>9.0f}{copies:>8}"
        print(f"  {name:<10}{memory}{kernels}  {report.bound_seconds:.3g} s")
        for kind, size, count in reading.collectives:
            print(f"  {'':<12}{count:,} x {kind}: {_gib(size)} GiB")


def _write(file: Path, target: Target, programs: Mapping[str, Report]) -> None:
    values = {name: report.as_dict(name) for name, report in programs.items()}
    try:
        file.write_text(json.dumps({"target": str(target), "programs": values}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{JSON}: {short_name(file)} cannot be written: {error.strerror}") from error


def _show_devices(gib: tuple[float, ...], config: Config) -> None:
    """Simulate on the CPU devices that are only planned for, as many as a mesh may want."""
    if not gib:
        return
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(len(gib), config.policy.mesh.size))
    except RuntimeError:  # JAX has started already: it keeps the devices that it has
        pass


def _tell(config: Config, memory: PolicyMemory, cards: Sequence[Card], notes: Sequence[str]) -> None:
    task = to_dict(config)["task"]["kind"]
    print(f"Plan of {task}: {config.policy.path}, {memory.parameters:,} parameters, {memory.trained:,} trained")
    dtype, precision = config.policy.compute_dtype, config.policy.matmul_precision
    print(f"  computed in {dtype}, matmul_precision {precision_of(dtype, precision) or 'default'}")
    for note in notes:
        print(f"  {note}")
    if config.task.not_planned:
        print(f"  not counted: {config.task.not_planned}")
    for card in cards:
        print(f"{card.name}, {_gib(card.capacity)} GiB")
        for part, lines in card.parts.items():
            print(f"  {part}")
            for line in lines:
                size = _gib(line.bytes) if line.counted else f"({_gib(line.bytes)})"
                print(f"    {line.name:<26}{size:>9}  {line.note}".rstrip())
        verdict = f"{_gib(card.excess)} GiB too much" if card.excess else "fits"
        print(
            f"  needed {_gib(card.needed)} of {_gib((1 - FREE) * card.capacity)} GiB ({FREE:.0%} left free): {verdict}"
        )
        tight = not card.excess and card.needed > _PREALLOCATED * card.capacity
        if tight and POLICY in card.parts and card.name != "cpu":
            print("  JAX takes 75 % of a card by itself: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
