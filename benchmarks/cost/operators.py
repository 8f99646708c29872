"""Where the seconds of one phase of a GRPO iteration go, operator by operator, on the CPU.

    python benchmarks/cost/operators.py --case small --phase update [--top 25] [--threads 1] [--json FILE]

The cases are those of benchmarks/iteration_work.py, the phases sampling, logprobs (the reference's log-probabilities)
and update. The worker of grpo_iteration.py runs three iterations in a process of its own: one that compiles, one that
is timed, and one in which the phase is traced. Each event of the trace is joined with its instruction of the optimised
HLO that XLA wrote out. Loops and calls are left out: what they run is there itself. With several threads operators
may run side by side, and their seconds add up to more than the phase's.

Prints two Markdown tables: the kinds of operators, and those that took longest, with the end of their place in the JAX
program. FLOPs are those of products of matrices, counted from their shapes; below the first table stands what
benchmarks/floor.py counts, without what is computed again, the masked half of attention, and tokens of pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import floor
import grpo_iteration
import hlo
import iteration_work as work

TRACED = 2  # of the iterations: after the one that compiles and the one that is timed
ENDING = 80  # characters of a place in the program


class Operator(NamedTuple):
    """An instruction of a compiled program, and what all its calls in the phase took and did."""

    name: str
    kind: str
    shape: str
    place: str
    calls: int
    seconds: float
    flops: float


# ------------------------------------------------------------------------------------------------ in the worker


def trace_phase(given: work.Assignment, phase: str, trace: Path) -> list[dict[str, float]]:
    """Runs iterations, of which the last traces the phase into the folder `trace`: seconds of each by phase."""
    import iteration_ours
    import jax

    from grpo_jax.config import PolicySection

    loaded, processor = iteration_ours.read(given)
    sample, see, prepare, step, state = iteration_ours.make_phases(given.case, loaded, PolicySection().remat)
    functions = {"sampling": sample, "logprobs": prepare, "update": step}
    traced, calls = functions[phase], 0
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0

    def watched(*arguments):
        nonlocal calls
        calls += 1
        if calls <= TRACED:
            return traced(*arguments)
        jax.block_until_ready(arguments)
        with jax.profiler.trace(str(trace), profiler_options=options):
            return jax.block_until_ready(traced(*arguments))

    functions[phase] = watched
    phases = functions["sampling"], see, functions["logprobs"], functions["update"], state
    return iteration_ours.iterate(given, loaded, processor, phases)


def read_events(trace: Path) -> dict[tuple[int, str], tuple[int, float]]:
    """Calls and seconds of each (program, instruction) of a trace."""
    import jax

    calls, seconds = Counter(), Counter()
    for path in trace.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for event in (event for line in plane.lines for event in line.events):
                told = dict(event.stats)
                if "hlo_op" in told:
                    key = int(told["program_id"]), str(told["hlo_op"])
                    calls[key] += 1
                    seconds[key] += event.duration_ns / 1e9
    return {key: (calls[key], seconds[key]) for key in calls}


# --------------------------------------------------------------------------------------------- reading what it saw


def read_modules(dump: Path, programs: set[int]) -> dict[int, hlo.Module]:
    """The optimised HLO of programs, by their numbers."""
    modules = {}
    for program in programs:
        (path,) = dump.glob(f"module_{program:04d}.*after_optimizations.txt")
        modules[program] = hlo.read(path.read_text())
    return modules


def join(
    events: dict[tuple[int, str], tuple[int, float]], modules: dict[int, hlo.Module], vocabulary: int
) -> list[Operator]:
    """The operators, slowest first.

    Args:
        events: Calls and seconds by (program, instruction).
        modules: Each program's HLO.
        vocabulary: Of the case.

    Raises:
        KeyError: A program has no such instruction.
    """
    found = []
    for (program, name), (calls, seconds) in events.items():
        module = modules[program]
        instruction = module.instructions[name]
        if instruction.opcode in hlo.CONTAINERS:
            continue
        dots = module.products(name)
        place = dots[0].op_name if dots else instruction.op_name
        flops = float(calls * module.flops(name))
        found.append(Operator(name, module.kind(name, vocabulary), instruction.shape, place, calls, seconds, flops))
    return sorted(found, key=lambda one: -one.seconds)


def measure(case: work.Case, phase: str, threads: int) -> dict[str, Any]:
    """Runs a worker: its operators, and the phase's seconds without the trace."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = grpo_iteration.make_folder(case, root)
        given = work.Assignment(case, model, TRACED + 1, threads, "", "wall", root / "report.json")
        dump, cores = root / "hlo", sorted(os.sched_getaffinity(0))[:threads]
        env = grpo_iteration.environment(threads)
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        env["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # XLA writes out only what it compiles
        command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, __file__]
        done = subprocess.run([*command, "--worker", phase, *work.command_line(given)], env=env, cwd=root)
        if done.returncode:
            raise SystemExit(f"{case.name}: the worker ended with exit status {done.returncode}")
        report = json.loads(given.out.read_text())
        events = {(program, name): (calls, seconds) for program, name, calls, seconds in report["events"]}
        modules = read_modules(dump, {program for program, _ in events})
    seconds = report["iterations"][TRACED - 1][phase]
    return {"seconds": seconds, "versions": report["versions"], "operators": join(events, modules, case.vocabulary)}


# ------------------------------------------------------------------------------------------------------- what it says


def rate(flops: float, seconds: float) -> str:
    """GFLOP/s, or nothing where no matrices are multiplied."""
    return f"{flops / seconds / 1e9:.0f}" if flops and seconds else ""


def kinds_table(operators: list[Operator]) -> str:
    """Seconds, share and FLOPs by kind, slowest first."""
    seconds, flops = defaultdict(float), defaultdict(float)
    for one in operators:
        for name in (one.kind, "all"):
            seconds[name] += one.seconds
            flops[name] += one.flops
    lines = ["| operators | s | share | GFLOP | GFLOP/s |", "|---|---|---|---|---|"]
    for name in sorted(seconds, key=lambda name: (name == "all", -seconds[name])):
        count = f"{flops[name] / 1e9:.3g}" if flops[name] else ""
        share = seconds[name] / seconds["all"]
        lines.append(f"| {name} | {seconds[name]:.3g} | {share:.1%} | {count} | {rate(flops[name], seconds[name])} |")
    return "\n".join(lines)


def top_table(operators: list[Operator], top: int) -> str:
    """The operators that took longest."""
    lines = ["| ms | calls | GFLOP/s | operator | shape | place |", "|---|---|---|---|---|---|"]
    for one in operators[:top]:
        cells = f"{1000 * one.seconds:.3g} | {one.calls} | {rate(one.flops, one.seconds)} | {one.name}"
        lines.append(f"| {cells} | {re.sub(r'{[^}]*}', '', one.shape)} | {one.place[-ENDING:]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="small", choices=list(work.CASES))
    parser.add_argument("--phase", default="update", choices=work.PHASES)
    parser.add_argument("--top", type=int, default=25, help="how many operators the second table lists")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all operators there")
    chosen = parser.parse_args()
    case = work.CASES[chosen.case]
    found = measure(case, chosen.phase, chosen.threads)
    operators = found["operators"]
    counted = floor.COUNTS[chosen.phase](case).flops
    print(
        f"{case.name}, {chosen.phase}, {chosen.threads} thread(s): {found['seconds']:.3g} s; "
        f"traced, its operators {sum(one.seconds for one in operators):.3g} s\n"
    )
    print(kinds_table(operators))
    print(f"\nbenchmarks/floor.py counts {counted / 1e9:.3g} GFLOP.\n")
    print(top_table(operators, chosen.top))
    if chosen.json:
        written = {
            "machine": grpo_iteration.machine(),
            **{name: getattr(chosen, name) for name in ("case", "phase", "threads")},
            **found,
            "floor_flops": counted,
            "operators": [one._asdict() for one in operators],
        }
        chosen.json.write_text(json.dumps(written, indent=1) + "\n")


def worker(arguments: list[str]) -> None:
    """Runs and traces in this process; the report has [program, instruction, calls, seconds] of each as "events"."""
    phase, given = arguments[0], work.assignment(arguments[1:])
    trace = given.out.with_name("trace")
    rows = trace_phase(given, phase, trace)
    events = [[*key, *value] for key, value in read_events(trace).items()]
    work.write_report(given, rows, ("grpo_jax", "jax", "jaxlib"), events=events)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    else:
        main()
