"""The end of a run: measure again, keep the policy, and show what changed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax import config as configuration
from grpo_jax.reports import console as reporting
from grpo_jax.evaluate import Evaluation, evaluate_policy, evaluate_texts, weighted_reward
from grpo_jax.export import export_adapters, export_policy
from grpo_jax.runs.parts import Parts
from grpo_jax.tasks.recommendation.report import policy_ranks, report_tables, results_table
from grpo_jax.rollout.rollout import Judgement
from grpo_jax.tasks.prompt_enhancement.rewriting import most_added_words
from grpo_jax.tasks.recommendation.table import TableRow, format_table, table_records
from grpo_jax.training.trainer import TrainState, saved_parts

if TYPE_CHECKING:
    from grpo_jax.runs.experiment import Progress, Run


def finish_run(run: Run, state: TrainState, progress: Progress) -> dict[str, Any]:
    """Measures the held-out prompts after training, writes `final`, `policy/`, `adapter/`, the report and summary.json.

    Returns:
        What summary.json holds.
    """
    parts, output = run.parts, run.output
    started = time.monotonic()
    after = measure_after(parts, state.variables)
    seconds = dict(progress.seconds)
    seconds["evaluate"] = seconds.get("evaluate", 0.0) + time.monotonic() - started
    run.checkpoints.save_final(progress.iteration, saved_parts(state), {"progress": progress._asdict()})
    table = recommendation_table(parts, progress, after)
    export_policy(output.directory.policy, parts.loaded, state.variables, parts.lora)
    if parts.lora is not None:
        export_adapters(output.directory.adapter, parts.loaded, state.variables, parts.lora)
    summary = summarise(run, progress, after, {**seconds, "total": time.monotonic() - run.clock})
    if table:
        summary["table"] = table_records(table)
    shown = shown_prompts(parts, after["greedy"]) if after else {}
    output.directory.write_summary(summary)
    reporting.write_run_report(
        output.directory,
        summary=summary,
        first_tables=report_tables(table),
        config_text=configuration.to_yaml(parts.config),
        **shown,
    )
    output.result(summary, ["", *format_table(table).split("\n")] if table else (), report_tables(table))
    return summary


def measure_after(parts: Parts, variables: Any) -> dict[str, Evaluation]:
    """The held-out prompts, greedy and sampled; nothing where none are held out."""
    if not parts.test_rows:
        return {}
    after = {"greedy": evaluate_policy(parts, variables, parts.test_rows)}
    if parts.config.evaluation.sampled:
        after["sampled"] = evaluate_policy(parts, variables, parts.test_rows, sampled=True)
    return after


def shown_prompts(parts: Parts, after: Evaluation) -> dict[str, Any]:
    """What the report shows of the held-out prompts: pictures, added words, rewards."""
    texts = [group[0] for group in after.rollout.texts]
    return {
        "gallery": make_gallery(parts, after),
        "added_words": most_added_words([row.prompt for row in parts.test_rows], texts),
        "table": rewards_by_prompt(parts, after),
    }


def recommendation_table(parts: Parts, progress: Progress, after: dict[str, Evaluation]) -> list[TableRow]:
    """Baselines and policies by every measure of ranking; empty for other tasks, and where nobody is held out."""
    if parts.task is None or not after:
        return []
    return results_table(parts, progress.ranks | policy_ranks("after", after))


def summarise(run: Run, progress: Progress, after: dict[str, Evaluation], seconds: dict[str, float]) -> dict[str, Any]:
    """evaluation.<measure>.{before, after, oracle, unchanged}, improvement, times, versions, devices.

    Where nothing is held out there are no measures; reward and improvement are null.
    """
    parts, before = run.parts, progress.before
    measured = after["greedy"].measures if after else {}
    oracle, unchanged = before.get("oracle", {}), before.get("unchanged", {})
    evaluation = {
        name: {
            "before": before["greedy"].get(name),
            "after": value,
            "oracle": oracle.get(name),
            "unchanged": unchanged.get(name),
            "untrained": before.get("untrained", {}).get(name),
            "before_sampled": before.get("sampled", {}).get(name),
            "after_sampled": after["sampled"].measures.get(name) if "sampled" in after else None,
        }
        for name, value in measured.items()
    }
    baseline, reward = (
        weighted_reward(parts, found) if measured else None for found in (before.get("greedy"), measured)
    )
    improvement = reward - baseline if measured else None
    return {
        "evaluation": evaluation,
        "baseline_reward": baseline,
        "reward": reward,
        "improvement": improvement,
        "relative_improvement": improvement / abs(baseline) if baseline else None,
        "iterations": progress.iteration,
        "best": {"iteration": progress.best_iteration, "validation_score": progress.best_score},
        "prompts": len(parts.test_rows),
        "seconds": seconds,
        "seed": parts.config.seed,
        "devices": parts.devices,
        "versions": reporting.versions(),
    }


def make_gallery(parts: Parts, after: Evaluation) -> list[dict[str, Any]]:
    """Before/after pairs of the first held-out prompts: the unchanged prompt's picture and the rewrite's.

    Both from the same noise, chosen by place and not by result.
    """
    rows = parts.test_rows[: parts.config.evaluation.gallery]
    if not rows or parts.environment.render is None:
        return []
    unchanged = evaluate_texts(parts, rows, [row.prompt for row in rows])
    before, later = pictures_of(unchanged.judgement), pictures_of(after.judgement)
    if before is None or later is None:  # the renderer failed, and may
        return []
    names = parts.environment.reward_names + parts.environment.watch_names
    first, second = scores_of(unchanged.judgement), scores_of(after.judgement)
    entries = []
    for index, row in enumerate(rows):
        scores = {name: (float(first[index, n]), float(second[index, n])) for n, name in enumerate(names)}
        pair = {"before": before[index], "after": later[index], "scores": scores}
        entries.append({"prompt": row.prompt, "rewrite": after.rollout.texts[index][0], **pair})
    return entries


def scores_of(judgement: Judgement) -> np.ndarray:
    """Rewards and watched measures of one text per row: f32 [P, N + W]."""
    return np.concatenate([judgement.rewards, judgement.watched], axis=-1)[:, 0]


def pictures_of(judgement: Judgement) -> np.ndarray | None:
    """The judged pictures, uint8 [P, H, W, 3]; None where some could not be drawn."""
    if any(chunk.images is None for chunk in judgement.pictures):
        return None
    return np.concatenate([to_uint8(chunk.images) for chunk in judgement.pictures])


def to_uint8(images: Any) -> np.ndarray:
    """Pictures, torch float [B, 3, H, W] in [0, 1], as uint8 [B, H, W, 3]."""
    array = images.detach().float().cpu().numpy()
    return np.round(np.clip(array, 0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)


def rewards_by_prompt(parts: Parts, after: Evaluation) -> list[dict[str, Any]]:
    """One line per held-out prompt: prompt, rewrite, each reward and watched measure."""
    environment = parts.environment
    values = scores_of(after.judgement)
    names = environment.reward_names + environment.watch_names
    return [
        {"prompt": row.prompt, "rewrite": after.rollout.texts[index][0]}
        | ({} if parts.task is None else {"wanted": row.columns["target_title"]})
        | {name: round(float(values[index, n]), 4) for n, name in enumerate(names)}
        for index, row in enumerate(parts.test_rows)
    ]
