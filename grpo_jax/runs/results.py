"""Results of a run: summary, tables, gallery and episodes, from the evaluations at its start and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode
from grpo_jax.rollout.pictures import thumbnail
from grpo_jax.rollout.rewards import join_names, maximised_names
from grpo_jax.rollout.rollout import GALLERY
from grpo_jax.runs.context import RunContext
from grpo_jax.runs.evaluation import START_RENDERER, Evaluation, Statistics, eval_reward_values, evaluate_texts
from grpo_jax.runs.metrics import TOTAL, regressed_measures
from grpo_jax.runs.session import Progress, Record
from grpo_jax.sampling.samplers import measured_section
from grpo_jax.tasks.task import EpisodeEntry, Findings, Finished, GalleryEntry, ShownTurn, Table, of_turns

_SHOWN_SIZE = 256  # pixels of a prompt's picture in the report


def baseline_lines(ctx: RunContext, before: Mapping[str, Evaluation]) -> list[str]:
    """Return the measures of the start in one line, and a note on rewards that no completion got."""
    if not before:
        return ["no prompts are held out: nothing is measured before and after training"]
    measured, values = before["greedy"].measures, np.moveaxis(before["greedy"].rollout.final_rewards, -1, 0)
    listed = "  ".join(f"{name} {value:.3f}" for name, value in measured.items() if not of_turns(name, measured))
    absent = {name for name, rewards in zip(ctx.fns.reward_names, values, strict=True) if np.isnan(rewards).all()}
    missing = [name for name in maximised_names(ctx.rewards.weights) if name in absent]
    notes = [f"warning: no held-out completion got the reward {join_names(missing)}"] if missing else []
    return [*notes, f"baseline on {len(ctx.test_rows)} held-out prompts: {listed}"]


def report(ctx: RunContext, progress: Progress, after: Mapping[str, Evaluation]) -> Finished:
    """Return summary, tables, gallery and episodes of a run, from the evaluations at its start and end."""
    findings = find(ctx, progress.notes.task_data, "after", after)
    summary: Record = {**summarise(ctx, progress, after), **findings.entries}
    samples = samples_tables(summary)
    lines = [line for table in samples for line in table.lines()]
    finished = Finished(summary, lines=[*lines, *findings.lines], tables=[*findings.tables, *samples])
    if not after:
        return finished
    greedy = after["greedy"]
    pairs = zip(ctx.test_rows[:GALLERY], greedy.episodes, strict=False) if ctx.fns.env else ()
    episodes = [shown_episode(*pair) for pair in pairs]  # chosen by position, not by result
    tables, gallery = [*finished.tables, texts_table(ctx, greedy)], make_gallery(ctx, greedy, after.get(START_RENDERER))
    return finished._replace(gallery=gallery, tables=tables, episodes=episodes)


def find(ctx: RunContext, task_data: Record, name: str, evaluations: Mapping[str, Evaluation]) -> Findings:
    """Return the task's findings from evaluations, the last of which is called `name`; none without any."""
    if not evaluations:
        return Findings()
    rollouts = {kind: evaluation.rollout for kind, evaluation in evaluations.items()}
    report = ctx.task_data.report
    return report.findings({**task_data, **report.remember(name, rollouts)}, ctx.test_rows)


def summarise(ctx: RunContext, progress: Progress, after: Mapping[str, Evaluation]) -> Record:
    """Return evaluation.<measure>.{before, after, oracle, unchanged}, improvement and devices.

    If the renderer was trained, "start_renderer" has the trained policy's texts drawn before its training, and "oracle"
    the best known texts after it; "oracle_before" has those before it.
    """
    before, now = progress.notes.before, {kind: evaluation.measures for kind, evaluation in after.items()}
    measures = now.get("greedy", {})
    kinds = {"before": "greedy", "before_sampled": "sampled"} | {n: n for n in ("oracle", "unchanged", "untrained")}
    by_kind = {kind: before.get(texts, {}) for kind, texts in kinds.items()}
    by_kind |= {"after": measures, "after_sampled": now.get("sampled", {})}
    if START_RENDERER in now:  # references are drawn by the trained renderer too
        by_kind |= {START_RENDERER: now[START_RENDERER], "oracle_before": by_kind["oracle"]}
        by_kind["oracle"] = now.get("oracle", {})
    evaluation = {name: {kind: values.get(name) for kind, values in by_kind.items()} for name in measures}
    baseline, reward = before.get("greedy", {}).get(TOTAL), measures.get(TOTAL)
    improvement = None if baseline is None or reward is None else reward - baseline
    suspect: list[str] = []
    if improvement and improvement > 0:
        at_start = progress.notes.eval_rewards_at_start.get("test", {})
        suspect = regressed_measures(at_start, eval_reward_values(ctx, after["greedy"]))
    relative = improvement / baseline if improvement is not None and baseline and baseline > 0 else None
    return {
        "evaluation": evaluation,
        "baseline_reward": baseline,
        "reward": reward,
        "improvement": improvement,
        "relative_improvement": relative,
        "iterations": progress.iteration,
        "suspect": suspect,
        "truncated_iterations": progress.notes.truncated,
        "best": {"iteration": progress.best_iteration, "validation_score": progress.best_score},
        "prompts": len(ctx.test_rows),
        "devices": ctx.devices,
        **samples_of(ctx, {"before": progress.notes.samples, "after": statistics_of(after)}),
    }


def statistics_of(evaluations: Mapping[str, Evaluation]) -> Statistics | None:
    """Return the statistics of several completions per prompt; None if prompts had at most one."""
    return evaluations["sampled"].samples if "sampled" in evaluations else None


def samples_of(ctx: RunContext, measured: Mapping[str, Statistics | None]) -> Record:
    """Return samples.measures.<measure>.<statistic>.<when>: [mean, low, high], and the sampling settings."""
    present = {when: by_measure for when, by_measure in measured.items() if by_measure is not None}
    if not present:
        return {}
    section = ctx.config.evaluation
    drawn = measured_section(ctx.config.sampling, section)
    settings = {name: getattr(drawn, name) for name in ("temperature", "top_k", "top_p")}
    measures: dict[str, Record] = {}
    for when, by_measure in present.items():
        for name, statistics in by_measure.items():
            for statistic, values in statistics.items():
                measures.setdefault(name, {}).setdefault(statistic, {})[when] = values
    recorded = {"k": section.samples, **settings, "threshold": section.pass_threshold, "when": list(present)}
    return {"samples": {**recorded, "measures": measures}}


def samples_tables(summary: Record) -> list[Table]:
    """Make a table of mean@k, best@k and pass@k from a summary's "samples", with 95 % intervals, if there are any."""
    samples = summary.get("samples")
    if samples is None:
        return []
    note = (
        f"{samples['k']} completions of each held-out prompt at temperature {samples['temperature']:g}. A completion "
        f"passes if it reaches {samples['threshold']:g}. Brackets have 95 % intervals over prompts."
    )
    rows = [
        (name, statistic, *(_interval(values.get(when)) for when in samples["when"]))
        for name, statistics in samples["measures"].items()
        for statistic, values in statistics.items()
    ]
    return [Table("Several completions of each prompt", ("measure", "statistic", *samples["when"]), rows, note)]


def _interval(values: Sequence[float] | None) -> str:
    if values is None or values[0] is None or not np.isfinite(values[0]):
        return "–"
    mean, low, high = values
    bounded = low is not None and np.isfinite(low)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]" if bounded else f"{mean:.3f}"


def make_gallery(ctx: RunContext, after: Evaluation, between: Evaluation | None = None) -> list[GalleryEntry]:
    """Make the gallery of the first held-out prompts, not the best; before and after have the same noise.

    `between` has the same completions, drawn by the renderer before its training.
    """
    rows = ctx.test_rows[:GALLERY]
    drawn = ctx.task_data.render is not None  # the same in all processes, which judge together
    if not rows or not (drawn or any(row.pictures for row in rows)):
        return []
    plain = ctx.task_data.report.references(rows).get("unchanged") if drawn else None
    with nullcontext() if ctx.renderer is None else ctx.renderer.untrained():
        unchanged = None if plain is None else evaluate_texts(ctx, rows, plain)
    later = [episode.last.image for episode in after.episodes[: len(rows)]]
    before = [episode.last.image for episode in unchanged.episodes] if unchanged else [None] * len(rows)
    if drawn and any(image is None for image in [*later, *(before if unchanged else ())]):  # the renderer may fail
        return []
    second = after.rollout.final_values[:, 0]
    first = unchanged.rollout.final_values[:, 0] if unchanged else np.full_like(second, np.nan)
    return [
        GalleryEntry(
            row.prompt,
            after.episodes[index].last.completion,
            before[index],
            later[index],
            {name: (float(first[index, n]), float(second[index, n])) for n, name in enumerate(ctx.measure_names)},
            shown=[thumbnail(source, _SHOWN_SIZE) for source in row.pictures],
            between=between and between.episodes[index].last.image,
        )
        for index, row in enumerate(rows)
    ]


def shown_episode(row: Row, episode: Episode) -> EpisodeEntry:
    """Return a row's episode for the report."""
    turns = []
    for turn in episode.turns:
        seen = None if turn.observation is None or turn.observation.done else turn.observation
        answer = (seen.text, seen.pictures) if seen else (None, ())
        turns.append(ShownTurn(turn.completion, turn.rewards, turn.image, *answer))
    return EpisodeEntry(row.prompt, turns, [thumbnail(source, _SHOWN_SIZE) for source in row.pictures])


def texts_table(ctx: RunContext, after: Evaluation) -> Table:
    """Make a table of held-out prompts: prompt, completion, the task's columns, rewards and eval rewards."""
    values = after.rollout.final_values[:, 0]
    columns = ctx.task_data.report.columns
    rows = [
        (
            row.prompt,
            after.episodes[index].last.completion,
            *(row.columns[column] for column in columns.values()),
            *(round(float(value), 4) for value in values[index]),
        )
        for index, row in enumerate(ctx.test_rows)
    ]
    return Table("Held-out prompts after training", ("prompt", "completion", *columns, *ctx.measure_names), rows)
