"""Held-out measurement, and the command that repeats it from a checkpoint.

python -m grpo_jax.evaluate --run DIR [--checkpoint best]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.rollout.rollout import Environment, Judgement, Rollout, collect, judge

if TYPE_CHECKING:
    from grpo_jax.runs.parts import Parts

EVALUATION_CHUNK = 32
"""Prompts that travel together: bounds the pictures held at once, and lets judges work while the policy writes."""

TEXT_CHUNK = 256
"""The same where nothing is drawn."""


class Evaluation(NamedTuple):
    """Means over prompts by measure name, with what they were measured on."""

    measures: dict[str, float]
    judgement: Judgement
    rollout: Rollout | None


def evaluate_policy(parts: Parts, variables: Any, rows: Sequence[Any], *, sampled: bool = False) -> Evaluation:
    """Measures the policy on held-out prompts, with fixed noise: one completion each, greedy or sampled."""
    rollout = collect(
        parts.environment,
        parts.evaluation_sampler if sampled else parts.greedy_sampler,
        variables,
        rows,
        key=parts.key,
        iteration=0,
        evaluation=True,
        chunk_prompts=_chunk(parts),
        timeout=parts.timeout,
    )
    measures = means(parts.environment, rollout.judgement)
    measures["completion_tokens"] = float(rollout.samples.mask.sum(-1).mean())
    measures["usable"] = float(rollout.usable.mean())
    return Evaluation(measures, rollout.judgement, rollout)


def evaluate_texts(parts: Parts, rows: Sequence[Any], texts: Sequence[str]) -> Evaluation:
    """Measures given texts in the policy's place: the unchanged prompts, or the oracle's rewrites."""
    judgement = judge(
        parts.environment,
        rows,
        [[text] for text in texts],
        chunk_prompts=_chunk(parts),
        timeout=parts.timeout,
    )
    return Evaluation(means(parts.environment, judgement), judgement, None)


def _chunk(parts: Parts) -> int:
    return TEXT_CHUNK if parts.environment.render is None else EVALUATION_CHUNK


def measure_all(parts: Parts, variables: Any) -> dict[str, Evaluation]:
    """The test prompts measured alike: the rewrites, the unchanged prompts, the oracle's where there is one.

    Nothing where no prompts are held out.
    """
    rows = parts.test_rows
    if not rows:
        return {}
    found = {"greedy": evaluate_policy(parts, variables, rows)}
    if parts.config.evaluation.sampled:
        found["sampled"] = evaluate_policy(parts, variables, rows, sampled=True)
    if parts.config.task == "prompt_enhancement":
        found["unchanged"] = evaluate_texts(parts, rows, [row.prompt for row in rows])
    oracle = oracle_texts(rows)
    if oracle is not None:
        found["oracle"] = evaluate_texts(parts, rows, oracle)
    return found


def means(environment: Environment, judgement: Judgement) -> dict[str, float]:
    """Mean of each reward and watched measure over the present values."""
    names = environment.reward_names + environment.watch_names
    values = np.concatenate([judgement.rewards, judgement.watched], axis=-1)
    result = {}
    for index, name in enumerate(names):
        column = values[..., index]
        present = column[np.isfinite(column)]
        result[name] = float(present.mean(dtype=np.float64)) if present.size else float("nan")
    return result


def weighted_reward(parts: Parts, measures: dict[str, float]) -> float:
    """The rewards' weighted sum, the one number that "best" and the improvement are told in."""
    return float(sum(weight * measures[name] for name, weight in parts.weights.items()))


def oracle_texts(rows: Sequence[Any]) -> list[str] | None:
    """The best text there is, where the data knows it: the column "oracle", or the title to be found."""
    texts = [row.columns.get("oracle", row.columns.get("target_title")) for row in rows]
    return None if any(text is None for text in texts) else texts


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    from grpo_jax.runs.parts import guarded

    parser = argparse.ArgumentParser(
        prog="python -m grpo_jax.evaluate",
        description="Restores a policy from a run directory and measures it on the held-out prompts.",
    )
    parser.add_argument("--run", required=True, metavar="DIR", help="Run directory of a training run.")
    parser.add_argument("--checkpoint", default="final", help="final, best, or a step (default: %(default)s).")
    parser.add_argument("--prompts", type=int, default=None, help="Test prompts; 0 for all (default: the run's).")
    parser.add_argument("--mesh", type=int, nargs=2, metavar=("FSDP", "TENSOR"), help="Devices (default: the run's).")
    parser.add_argument("--json", action="store_true", help="Print JSON alone.")
    parser.add_argument("--debug", action="store_true", help="Show tracebacks.")
    options = parser.parse_args(arguments)
    return guarded(lambda: _evaluate_run(options), debug=options.debug)


def _evaluate_run(options: argparse.Namespace) -> None:
    import dataclasses

    from grpo_jax.config import MeshSection
    from grpo_jax.runs.directory import finite
    from grpo_jax.runs.parts import load_parts, own_bridges, restore_variables, run_config
    from grpo_jax.tasks.recommendation.parts import require_same_retrieval
    from grpo_jax.tasks.recommendation.report import policy_ranks, results_table
    from grpo_jax.tasks.recommendation.table import format_table, table_records

    config = run_config(options.run)
    if options.prompts is not None:
        section = dataclasses.replace(config.evaluation, prompts=options.prompts)
        config = dataclasses.replace(config, evaluation=section)
    if options.mesh is not None:
        section = dataclasses.replace(config.policy, mesh=MeshSection(*options.mesh))
        config = dataclasses.replace(config, policy=section)
    say = (lambda *_: None) if options.json else lambda name, detail="": print(f"{name:<10} {detail}")
    parts = load_parts(config, say=say)
    if not parts.test_rows:
        raise UserError(f"{options.run}: no prompts were held out (data.held_out), so there is nothing to measure")
    variables, meta = restore_variables(parts.variables, options.run, options.checkpoint)
    require_same_retrieval(parts.task, meta["progress"].get("retrieval"), own_bridges)
    rows = parts.test_rows
    report: dict[str, Any] = {"checkpoint": options.checkpoint, "step": meta.get("step"), "prompts": len(rows)}
    found = measure_all(parts, variables)
    report |= {kind: evaluation.measures for kind, evaluation in found.items()}
    table = []
    if parts.task is not None:
        table = results_table(parts, policy_ranks(options.checkpoint, found))
        report["table"] = table_records(table)
    if options.json:
        print(json.dumps(finite(report), indent=2))
        return
    kinds = [kind for kind in ("unchanged", "greedy", "sampled", "oracle") if kind in report]
    print(f"\n{len(rows)} held-out prompts, checkpoint {options.checkpoint} (step {report['step']})")
    print(f"{'measure':<20}" + "".join(f"{kind:>12}" for kind in kinds))
    for name in report["greedy"]:
        cells = (report[kind].get(name) for kind in kinds)
        print(f"{name:<20}" + "".join(f"{'':>12}" if cell is None else f"{cell:>12.4f}" for cell in cells))
    if table:
        print(f"\n{format_table(table)}")


if __name__ == "__main__":
    sys.exit(main())
