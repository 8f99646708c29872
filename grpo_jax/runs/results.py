"""The end of a language run: measure again, keep the policy, and show what changed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_jax.models.broadcast import is_main_process, process_count
from grpo_jax.models.sharding import on_host
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode, Turn
from grpo_jax.rollout.pictures import thumbnail
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.evaluation import (
    Evaluation,
    Statistics,
    evaluate_texts,
    measure_all,
    watched_values,
)
from grpo_jax.runs.measures import TOTAL, fallen, turns_table
from grpo_jax.runs.parts import RunContext
from grpo_jax.runs.progress import Progress, Record, added
from grpo_jax.sampling.samplers import measured_section
from grpo_jax.tasks.display import EpisodeEntry, Findings, GalleryEntry, ShownTurn, Table
from grpo_jax.tasks.task import Finished
from grpo_jax.training.state import TrainState

_SHOWN_SIZE = 256  # pixels of a prompt's picture in the report
_PACKAGES = (
    "grpo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "torch",
    "diffusers", "open_clip_torch",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect a run's results, where installed."""
    import platform
    from importlib import metadata

    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def finish_language(parts: RunContext, state: TrainState, progress: Progress, directory: RunDirectory) -> Finished:
    """Measure the held-out prompts after training and write `policy/` and `adapter/`."""
    started = time.monotonic()
    after = measure_all(parts, state.variables, references=False)
    seconds = added(progress.seconds, {"evaluate": time.monotonic() - started})
    policy, variables = parts.policy, state.variables
    if process_count() > 1:
        variables = on_host(variables)
    if is_main_process():
        policy.save(directory.policy, variables)
        if policy.lora is not None:
            policy.save_adapters(directory.adapter, variables)
    findings = find(parts, progress.notes["remembered"], "after", after)
    summary: Record = {**summarise(parts, progress, after, seconds), **findings.entries}
    further = (turns_table(summary["evaluation"]), samples_table(summary.get("samples", {})))
    tables = [*findings.tables, *(table for table in further if table is not None)]
    lines = [*samples_lines(summary.get("samples", {})), *findings.lines]
    finished = Finished(summary, lines=lines, tables=tables)
    if not after:
        return finished
    greedy = after["greedy"]
    gallery, episodes = make_gallery(parts, greedy), shown_episodes(parts, greedy)
    return finished._replace(gallery=gallery, tables=[*tables, texts_table(parts, greedy)], episodes=episodes)


def find(parts: RunContext, remembered: Record, name: str, evaluations: Mapping[str, Evaluation]) -> Findings:
    """Return the task's findings from measurements, the last of which is called `name`; none without any."""
    if not evaluations:
        return Findings()
    rollouts = {kind: evaluation.rollout for kind, evaluation in evaluations.items()}
    report = parts.task_data.report
    return report.findings({**remembered, **report.remember(name, rollouts)}, parts.test_rows)


def summarise(
    parts: RunContext, progress: Progress, after: Mapping[str, Evaluation], seconds: Mapping[str, float]
) -> Record:
    """evaluation.<measure>.{before, after, oracle, unchanged}, improvement, times, devices."""
    before, measures = progress.notes["before"], after["greedy"].measures if after else {}

    def measured(kind: str, name: str) -> float | None:
        return before.get(kind, {}).get(name)

    evaluation = {
        name: {
            "before": measured("greedy", name),
            "after": value,
            "oracle": measured("oracle", name),
            "unchanged": measured("unchanged", name),
            "untrained": measured("untrained", name),
            "before_sampled": measured("sampled", name),
            "after_sampled": after["sampled"].measures.get(name) if "sampled" in after else None,
        }
        for name, value in measures.items()
    }
    baseline, reward = before.get("greedy", {}).get(TOTAL), measures.get(TOTAL)
    improvement = None if baseline is None or reward is None else reward - baseline
    suspect: list[str] = []  # watched measures that fell since the start
    if improvement is not None and improvement > 0:
        suspect = fallen(progress.notes.get("watched", {}).get("test", {}), watched_values(parts, after["greedy"]))
    return {
        "evaluation": evaluation,
        "baseline_reward": baseline,
        "reward": reward,
        "improvement": improvement,
        "relative_improvement": improvement / abs(baseline) if baseline and improvement is not None else None,
        "iterations": progress.iteration,
        "suspect": suspect,
        "best": {"iteration": progress.best_iteration, "validation_score": progress.best_score},
        "prompts": len(parts.test_rows),
        "seconds": dict(seconds),
        "devices": parts.devices,
        **samples_of(parts, {"before": progress.notes.get("samples"), "after": statistics_of(after)}),
    }


def statistics_of(evaluations: Mapping[str, Evaluation]) -> Statistics | None:
    """Statistics of several completions per prompt; None where each prompt had one, or none."""
    return evaluations["sampled"].samples if "sampled" in evaluations else None


def samples_of(parts: RunContext, measured: Mapping[str, Statistics | None]) -> Record:
    """samples.measures.<measure>.<statistic>.<when>: [mean, low, high], and how they were drawn."""
    present = {when: by_measure for when, by_measure in measured.items() if by_measure is not None}
    if not present:
        return {}
    section = parts.config.evaluation
    drawn = measured_section(parts.config.sampling, section)
    settings = {name: getattr(drawn, name) for name in ("temperature", "top_k", "top_p")}
    measures: dict[str, Record] = {}
    for when, by_measure in present.items():
        for name, statistics in by_measure.items():
            for statistic, values in statistics.items():
                measures.setdefault(name, {}).setdefault(statistic, {})[when] = values
    recorded = {"k": section.samples, **settings, "threshold": section.pass_threshold, "when": list(present)}
    return {"samples": {**recorded, "measures": measures}}


def samples_table(samples: Record) -> Table | None:
    """mean@k and pass@k of a summary's "samples", with their 95 % intervals; None without any."""
    if not samples:
        return None
    note = (
        f"{samples['k']} completions of each held-out prompt at temperature {samples['temperature']:g}. A completion "
        f"passes that reaches {samples['threshold']:g}. In brackets: 95 % intervals, over prompts."
    )
    rows = [
        (name, statistic, *(_interval(values.get(when)) for when in samples["when"]))
        for name, statistics in samples["measures"].items()
        for statistic, values in statistics.items()
    ]
    return Table("Several completions of each prompt", ("measure", "statistic", *samples["when"]), rows, note)


def samples_lines(samples: Record) -> list[str]:
    """Lines of `samples_table` for the terminal."""
    table = samples_table(samples)
    if table is None:
        return []
    cells = [tuple(map(str, row)) for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [table.note, *lines]


def _interval(values: Sequence[float] | None) -> str:
    if values is None or values[0] is None or not np.isfinite(values[0]):
        return "–"
    mean, low, high = values
    bounded = low is not None and np.isfinite(low)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]" if bounded else f"{mean:.3f}"


def make_gallery(parts: RunContext, after: Evaluation) -> list[GalleryEntry]:
    """Gallery of the first held-out prompts, not the best ones; before and after are drawn from the same noise."""
    rows = parts.test_rows[: parts.environment.gallery]
    drawn = parts.task_data.render is not None  # in all processes: they judge together
    if not rows or not (drawn or any(row.pictures for row in rows)):
        return []
    before = later = [None] * len(rows)
    first = np.full(scores_of(after.rollout).shape, np.nan)
    plain = parts.task_data.report.references(rows).get("unchanged")
    if drawn:
        later = _last_images(after, len(rows))
    if drawn and plain is not None:
        unchanged = evaluate_texts(parts, rows, plain)
        before, first = _last_images(unchanged, len(rows)), scores_of(unchanged.rollout)
    needed = [*later, *before] if plain is not None else later
    if drawn and any(image is None for image in needed):  # the renderer failed, and may
        return []
    second = scores_of(after.rollout)
    return [
        GalleryEntry(
            row.prompt,
            after.episodes[index].last.completion,
            before[index],
            later[index],
            {name: (float(first[index, n]), float(second[index, n])) for n, name in enumerate(parts.measure_names)},
            shown=[thumbnail(source, _SHOWN_SIZE) for source in row.pictures],
        )
        for index, row in enumerate(rows)
    ]


def _last_images(evaluation: Evaluation, count: int) -> list[np.ndarray | None]:
    return [episode.last.image for episode in evaluation.episodes[:count]]


def shown_episodes(parts: RunContext, after: Evaluation) -> list[EpisodeEntry]:
    """The episodes of the first held-out prompts, chosen by place and not by result."""
    if parts.environment.env is None:
        return []
    rows = parts.test_rows[: parts.environment.gallery]
    return [shown_episode(*pair) for pair in zip(rows, after.episodes[: len(rows)], strict=True)]


def shown_episode(row: Row, episode: Episode) -> EpisodeEntry:
    """Return a row's episode as pages show it."""

    def shown_turn(turn: Turn) -> ShownTurn:
        if turn.observation is None or turn.observation.done:
            return ShownTurn(turn.completion, turn.rewards, turn.image, None, ())
        return ShownTurn(turn.completion, turn.rewards, turn.image, turn.observation.text, turn.observation.pictures)

    pictures = [thumbnail(source, _SHOWN_SIZE) for source in row.pictures]
    return EpisodeEntry(row.prompt, [shown_turn(turn) for turn in episode.turns], pictures)


def scores_of(rollout: Rollout) -> np.ndarray:
    """Rewards and watched measures of one text per row: f32 [P, N + W]."""
    return np.concatenate([rollout.final_rewards, rollout.final_eval_rewards], axis=-1)[:, 0]


def texts_table(parts: RunContext, after: Evaluation) -> Table:
    """One line per held-out prompt: prompt, text, the task's columns, each reward and watched measure."""
    values = scores_of(after.rollout)
    columns = parts.task_data.report.columns
    rows = [
        (
            row.prompt,
            after.episodes[index].last.completion,
            *(row.columns[column] for column in columns.values()),
            *(round(float(value), 4) for value in values[index]),
        )
        for index, row in enumerate(parts.test_rows)
    ]
    return Table("Held-out prompts after training", ("prompt", "completion", *columns, *parts.measure_names), rows)
