"""The end of a run: measure again, keep the policy, and show what changed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax import config as configuration
from grpo_jax import reporting
from grpo_jax.evaluate import Evaluation, evaluate_policy, weighted_reward
from grpo_jax.export import export_policy
from grpo_jax.parts import Parts
from grpo_jax.tasks.prompt_enhancement import most_added_words
from grpo_jax.trainer import TrainState, saved_parts

if TYPE_CHECKING:
    from grpo_jax.experiment import Progress, Run


def finish_run(run: Run, state: TrainState, progress: Progress) -> dict[str, Any]:
    """Measures the held-out prompts after training, writes `final`, `policy/`, report.html and summary.json.

    Returns:
        What summary.json holds.
    """
    parts, output = run.parts, run.output
    started = time.monotonic()
    after = {"greedy": evaluate_policy(parts, state.variables, parts.test_rows)}
    if parts.config.evaluation.sampled:
        after["sampled"] = evaluate_policy(parts, state.variables, parts.test_rows, sampled=True)
    seconds = dict(progress.seconds)
    seconds["evaluate"] = seconds.get("evaluate", 0.0) + time.monotonic() - started
    run.checkpoints.save_final(progress.iteration, saved_parts(state), {"progress": progress._asdict()})
    export_policy(output.directory.policy, parts.loaded, state.variables, parts.lora)
    summary = summarise(run, progress, after, {**seconds, "total": time.monotonic() - run.clock})
    gallery = make_gallery(parts, state, after["greedy"])
    texts = [group[0] for group in after["greedy"].rollout.texts]
    words = most_added_words([row.prompt for row in parts.test_rows], texts)
    output.directory.write_summary(summary)
    reporting.write_run_report(
        output.directory,
        summary=summary,
        gallery=gallery,
        added_words=words,
        table=rewards_by_prompt(parts, after["greedy"]),
        config_text=configuration.to_yaml(parts.config),
    )
    output.result(summary)
    return summary


def summarise(run: Run, progress: Progress, after: dict[str, Evaluation], seconds: dict[str, float]) -> dict[str, Any]:
    """evaluation.<measure>.{before, after, oracle, unchanged}, improvement, times, versions, devices."""
    parts, before = run.parts, progress.before
    oracle, unchanged = before.get("oracle", {}), before.get("unchanged", {})
    evaluation = {
        name: {
            "before": before["greedy"].get(name),
            "after": value,
            "oracle": oracle.get(name),
            "unchanged": unchanged.get(name),
            "before_sampled": before.get("sampled", {}).get(name),
            "after_sampled": after["sampled"].measures.get(name) if "sampled" in after else None,
        }
        for name, value in after["greedy"].measures.items()
    }
    baseline, reward = (weighted_reward(parts, measures) for measures in (before["greedy"], after["greedy"].measures))
    return {
        "evaluation": evaluation,
        "baseline_reward": baseline,
        "reward": reward,
        "improvement": reward - baseline,
        "relative_improvement": (reward - baseline) / abs(baseline) if baseline else None,
        "iterations": progress.iteration,
        "best": {"iteration": progress.best_iteration, "validation_score": progress.best_score},
        "prompts": len(parts.test_rows),
        "seconds": seconds,
        "seed": parts.config.seed,
        "devices": parts.devices,
        "versions": reporting.versions(),
    }


def make_gallery(parts: Parts, state: TrainState, after: Evaluation) -> list[dict[str, Any]]:
    """Before/after pairs of the first held-out prompts: the unchanged prompt's picture and the rewrite's.

    Both from the same noise, chosen by place and not by result.
    """
    rows = parts.test_rows[: parts.config.evaluation.gallery]
    if not rows or parts.environment.render is None:
        return []
    texts = [after.rollout.texts[index][0] for index in range(len(rows))]
    unchanged = parts.environment.render(rows, [[row.prompt] for row in rows], 0, True)
    rewritten = parts.environment.render(rows, [[text] for text in texts], 0, True)
    if unchanged.images is None or rewritten.images is None:  # the renderer failed, and may
        return []
    before, later = (to_uint8(pictures.images) for pictures in (unchanged, rewritten))
    names = parts.environment.reward_names + parts.environment.watch_names
    first = scores_of(parts, rows, [row.prompt for row in rows], unchanged)
    second = scores_of(parts, rows, texts, rewritten)
    entries = []
    for index, row in enumerate(rows):
        scores = {name: (float(first[index, n]), float(second[index, n])) for n, name in enumerate(names)}
        entry = {"prompt": row.prompt, "rewrite": texts[index], "before": before[index], "after": later[index]}
        entries.append({**entry, "scores": scores})
    return entries


def scores_of(parts: Parts, rows: Sequence[Any], texts: Sequence[str], pictures: Any) -> np.ndarray:
    """Rewards and watched measures of one text per row: f32 [P, N + W]."""
    rewards, watched = parts.environment.score(rows, [[text] for text in texts], pictures)
    return np.concatenate([rewards, watched], axis=-1)[:, 0]


def to_uint8(images: Any) -> np.ndarray:
    """Pictures, torch float [B, 3, H, W] in [0, 1], as uint8 [B, H, W, 3]."""
    array = images.detach().float().cpu().numpy()
    return np.round(np.clip(array, 0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)


def rewards_by_prompt(parts: Parts, after: Evaluation) -> list[dict[str, Any]]:
    """One line per held-out prompt: prompt, rewrite, each reward and watched measure."""
    environment = parts.environment
    values = np.concatenate([after.judgement.rewards, after.judgement.watched], axis=-1)[:, 0]
    names = environment.reward_names + environment.watch_names
    return [
        {"prompt": row.prompt, "rewrite": after.rollout.texts[index][0]}
        | {name: round(float(values[index, n]), 4) for n, name in enumerate(names)}
        for index, row in enumerate(parts.test_rows)
    ]
