"""`python -m grpo_jax.evaluate --run DIR [--checkpoint best] [--out FILE]`.

Evaluate a checkpoint on held-out prompts, also of a run in training, without writing to the run's folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo_jax.errors import UserError, command, exit_process, run_parser


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    description = "Restore a policy from a run directory and measure it on the held-out prompts."
    parser = run_parser("evaluate", description)
    parser.add_argument("--prompts", type=int, default=None, help="Test prompts; 0 for all (default: the run's).")
    parser.add_argument("--samples", type=int, help="Sampled completions per prompt (default: the run's).")
    parser.add_argument("--temperature", type=float, help="Temperature of these samples (default: the run's).")
    parser.add_argument("--mesh", type=int, nargs=2, metavar=("FSDP", "TENSOR"), help="Mesh (default: the run's).")
    parser.add_argument("--json", action="store_true", help="Print JSON only.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="Also write the JSON to a file.")
    return parser


def _evaluate(options: argparse.Namespace) -> None:
    from grpo_jax.config.sections import MeshSection
    from grpo_jax.runs.compile_cache import enable_compile_cache
    from grpo_jax.runs.directory import finite, write_atomically
    from grpo_jax.runs.evaluation import measure_all
    from grpo_jax.runs.loading import load
    from grpo_jax.runs.policy import restore_variables, run_config, saved_renderer
    from grpo_jax.runs.results import find, samples_of, samples_tables, statistics_of

    enable_compile_cache()
    config = run_config(options.run)
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        raise UserError(f"--out: expected a file in a folder that is there, got {options.out}")
    requested = {name: getattr(options, name) for name in ("prompts", "samples", "temperature")}
    overrides = {name: value for name, value in requested.items() if value is not None}
    if "temperature" in overrides and not config.evaluation.samples:
        overrides.setdefault("samples", 1)
    try:
        config = config.replace(evaluation=config.evaluation.replace(**overrides))
        if options.mesh is not None:
            mesh = MeshSection(fsdp=options.mesh[0], tensor=options.mesh[1])
            config = config.replace(policy=config.policy.replace(mesh=mesh))
    except UserError as error:  # it names sections
        lines = (str(line).replace("EvaluationSection.", "--") for line in error.args)
        raise UserError(*(line.replace("MeshSection.", "--mesh ") for line in lines)) from error
    info = (lambda *_: None) if options.json else lambda name, detail="": print(f"{name:<10} {detail}")
    with ExitStack() as exit_stack:
        ctx = load(config, info, exit_stack=exit_stack)
        if not ctx.test_rows:
            raise UserError(f"{options.run}: no prompts were held out (data.held_out), so there is nothing to measure")
        identity = ctx.task_data.identity
        variables, meta = restore_variables(ctx.policy.variables, options.run, options.checkpoint, identity)
        if ctx.renderer is not None:
            ctx.renderer.restore(saved_renderer(ctx.renderer.state(), options.run, meta["step"]))
        evaluations = measure_all(ctx, variables)
    findings = find(ctx, {}, options.checkpoint, evaluations)
    report: dict[str, Any] = {
        "checkpoint": options.checkpoint,
        "step": meta.get("step"),
        "prompts": len(ctx.test_rows),
        **{kind: evaluation.measures for kind, evaluation in evaluations.items()},
        **samples_of(ctx, {options.checkpoint: statistics_of(evaluations)}),
        **findings.entries,
    }
    written = json.dumps(finite(report), indent=2)
    if options.out is not None:
        write_atomically(options.out, written + "\n")
    if options.json:
        print(written)
        return
    print(f"\n{report['prompts']} held-out prompts, checkpoint {options.checkpoint} (step {report['step']})")
    _print_measures(report)
    samples = [line for table in samples_tables(report) for line in table.lines()]
    for line in [*samples, *findings.lines]:
        print(line)


def _print_measures(report: Mapping[str, Any]) -> None:
    from grpo_jax.runs.evaluation import START_RENDERER

    kinds = [kind for kind in ("unchanged", START_RENDERER, "greedy", "sampled", "oracle") if kind in report]
    print(f"{'measure':<20}" + "".join(f"{kind:>12}" for kind in kinds))
    for name in report["greedy"]:
        cells = (report[kind].get(name) for kind in kinds)
        print(f"{name:<20}" + "".join(f"{'':>12}" if cell is None else f"{cell:>12.4f}" for cell in cells))


main = command(make_parser, _evaluate)

if __name__ == "__main__":
    exit_process(main())
