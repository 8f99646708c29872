"""Metrics of an iteration: its row of metrics.jsonl, the columns of its completions, and the names of measures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import one_line
from grpo_jax.rollout.data import batches_per_epoch
from grpo_jax.rollout.pictures import pictures_column
from grpo_jax.rollout.reward_registry import ResolvedRewards
from grpo_jax.rollout.rewards import join_names, maximised_names
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.rollout.tools import ERROR
from grpo_jax.runs.context import RunContext
from grpo_jax.runs.endings import MISSING_ITERATIONS
from grpo_jax.runs.session import SCORE, Notes, Record
from grpo_jax.tasks.task import of_turns
from grpo_jax.training.estimators import OVERLONG, Objectives, signal_metrics, total_rewards

_CONSTANT_ITERATIONS = 5  # consecutive iterations with one value of a reward, after which a run warns
RIGHT = 1.0
"""A measure's best value: a first turn that reaches it was right."""
_NOTHING = 1e-6  # a change within rounding
TOTAL = "total"
"""Name of the measure that is maximised, for "best" and the improvement."""
OWN_MEASURES: Mapping[str, Callable[[Rollout], float]] = {
    "completion_tokens": lambda rollout: float(rollout.lengths.sum(-1).mean()),
    "valid": lambda rollout: float(rollout.valid.mean()),
}
"""Measures of held-out completions beside rewards and eval rewards."""


def present_mean(values: np.ndarray) -> float:
    """Return the mean of the finite values, in float64; NaN without any."""
    present = values[np.isfinite(values)].astype(np.float64)
    return float(present.mean()) if present.size else float("nan")


def turn_measures(rollout: Rollout, names: Sequence[str]) -> dict[str, float]:
    """Return further held-out measures of multi-turn episodes; nothing for single-turn tasks.

    They are means over the completions with a value. "NAME_turn_U" is the value after U turns, for all but the last
    turn; an ended episode keeps its last value. "NAME_peak" is the best over the turns. "NAME_kept" is the share that
    ended no worse, among those right in the first turn (`RIGHT`). "NAME_gain" is the end minus the start. The measures
    of turns are NaN for a reward that only ends of episodes get.
    """
    if rollout.rewards.shape[2] == 1:
        return {}
    values = np.concatenate([rollout.rewards, rollout.eval_rewards], axis=-1)
    values = values.reshape(-1, *values.shape[2:])  # [P·G, U, N + W]
    ends = rollout.final_values.reshape(len(values), -1)
    # A missing turn has no value of any name; a turn whose measures all failed counts as the previous one.
    exists = np.isfinite(values).any(axis=-1)
    last = np.maximum.accumulate(np.where(exists, np.arange(values.shape[1]), 0), axis=1)
    carried = np.take_along_axis(values, last[..., None], axis=1)
    measures: dict[str, float] = {}
    going_on = np.arange(values.shape[1]) < np.array([[len(e.turns) - 1] for group in rollout.episodes for e in group])
    for n, name in enumerate(names):
        if going_on.any() and not np.isfinite(values[going_on, n]).any():
            values[:, :, n] = carried[..., n] = np.nan
        first, end, turns = values[:, 0, n], ends[:, n], values[:, :, n]
        measures |= {
            f"{name}_turn_{turn + 1}": present_mean(carried[:, turn, n]) for turn in range(values.shape[1] - 1)
        }
        best = np.where(np.isfinite(turns), turns, -np.inf).max(axis=1)
        right = (first >= RIGHT) & np.isfinite(end)
        measures[f"{name}_peak"] = present_mean(best)
        measures[f"{name}_kept"] = present_mean(np.where(right, end >= first, np.nan))
        measures[f"{name}_gain"] = present_mean(end - first)
    return measures


def regressed_measures(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the measures whose mean over the same prompts fell by more than twice the standard error of its change.

    There is one value per prompt, NaN if missing. A measure needs two prompts with both values.
    """

    def has_regressed(name: str) -> bool:
        change = np.asarray(after[name], np.float64) - np.asarray(before[name], np.float64)
        change = change[np.isfinite(change)]
        if change.size < 2:
            return False
        return change.mean() < -max(2 * change.std(ddof=1) / np.sqrt(change.size), _NOTHING)

    return sorted(filter(has_regressed, before.keys() & after.keys()))


def require_names(config: Config, rewards: ResolvedRewards, controls: Collection[str]) -> None:
    """Refuse rewards and eval rewards with the name of another measure of the run."""
    sections = [*rewards.sections, *(RewardSection(name=name) for name in rewards.eval_rewards)]
    names = [section.called for section in sections]
    reserved = {SCORE, TOTAL, *OWN_MEASURES, *(f"{name}_{control}" for name in names for control in controls)}
    reserved |= {OVERLONG} if config.algorithm.overlong_buffer else set()
    measured_names = {*names, *(f"{name}_turn_1" for name in names)}
    measured: dict[str, RewardSection] = {}
    for place, section in enumerate(sections):
        name = section.called
        plain = RewardSection(name=section.name, options=section.options, messages=section.messages or None)
        same = measured.setdefault(name, plain) == plain  # a reward may also be an eval reward, unchanged
        where = "rewards" if place < len(rewards.sections) else "eval_rewards"
        expected = "a name that no other measure of the run has (set a reward's label; in Python: {'name': function})"
        of_others = config.sampling.turns > 1 and of_turns(name, measured_names)
        require(same and name not in reserved and not of_others, f"{where}.{name}", expected, name)


def iteration_row(
    ctx: RunContext, done: int, metrics: Record, report: Record, seconds: Mapping[str, float], started: float
) -> Record:
    """Return an iteration's row from `draw`'s metrics and the update's report; `started` is on time.monotonic()."""
    size = ctx.config.training.prompts_per_batch
    completions = size * metrics.get("draws", 1) * ctx.config.sampling.group_size
    return {
        "step": done,
        "epoch": done / batches_per_epoch(len(ctx.task_data.prompts.train), size),
        **update_metrics(report),
        **metrics,
        **{f"seconds/{name}": value for name, value in seconds.items()},
        "seconds/total": time.monotonic() - started,
        "tokens_per_second": metrics["completion_tokens"] * completions / max(seconds["sample"], 1e-9),
    }


def update_metrics(report: Record) -> Record:
    """Return the update's part of a metrics row, with a value head's measures if there is one; {} without an update."""
    if "metrics" not in report:
        return {}
    parts, measured = report["metrics"], report["measured"]
    names = {"advantage": "mean_advantage", "ratio": "mean_ratio"}
    row = {
        "loss": report["loss"],
        **{names.get(name, name): mean.value() for name, mean in parts["policy"]._asdict().items()},
        "grad_norm": report["grad_norm"],
        "sampler_gap": parts["sampler_gap"].value(),
    }
    if "value" in parts:
        value, estimates = parts["value"], measured["estimates"]
        row |= {"value/loss": value.loss.value(), "value/clipped": value.clip_fraction.value()}
        row |= {"value/mean": estimates.value, "value/return": estimates.returns}
        row |= {"value/explained_variance": estimates.explained_variance, "completion_kl": estimates.completion_kl}
    row |= {"entropy_coef": report["entropy_coef"]} if "entropy_coef" in report else {}
    row |= {"off_policy_masked": parts["off_policy_masked"].value()} if "off_policy_masked" in parts else {}
    row |= {name: measured[name] for name in ("importance_weight", "importance_clipped") if name in measured}
    row = {name: float(value) for name, value in row.items()}
    return row | {"skipped_updates": report["skipped"], "learning_rate": report["learning_rate"]}


def rollout_metrics(ctx: RunContext, rollout: Rollout, objectives: Objectives) -> dict[str, float]:
    """Return the batch's part of a metrics row: judged rewards, maximised total, signal, lengths, completions."""
    samples, rewards, eval_rewards = rollout.samples, rollout.final_rewards, rollout.final_eval_rewards
    assert samples is not None
    row: dict[str, float] = {}
    for index, name in enumerate(ctx.fns.reward_names):
        row |= _spread(f"reward/{name}", rewards[..., index])
        row[f"missing/{name}"] = float(np.isnan(rewards[..., index]).mean())
    row |= _spread("reward/total", total_rewards(objectives))
    if OVERLONG in objectives.names:
        row |= _spread(f"reward/{OVERLONG}", np.asarray(objectives.rewards[..., -1]))
    row |= signal_metrics(objectives)
    for index, name in enumerate(ctx.fns.eval_reward_names):
        row |= _spread(f"eval_rewards/{name}", eval_rewards[..., index])
    lengths = samples.mask.sum(-1)
    row |= {
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(samples.truncated.mean()),
    }
    row |= turn_metrics(rollout, ctx.fns.reward_names, ctx.fns.eval_reward_names)
    row |= {"tool_errors": tool_errors(rollout)[0]} if ctx.config.data.tool_names else {}
    prompts = [row.prompt for row in rollout.rows]
    return row | ctx.task_data.report.statistics(prompts, rollout.texts, rollout.valid.tolist())


def turn_metrics(rollout: Rollout, rewards: Sequence[str], eval_rewards: Sequence[str]) -> dict[str, float]:
    """Return the episodes' part of a metrics row; nothing for single-turn tasks.

    Entries "…@turnU" are means over the completions with turn U, from 1; "turns" and "observation_tokens" are per
    episode.
    """
    lengths, samples = rollout.lengths, rollout.samples
    if lengths.shape[2] == 1 or samples is None or samples.present is None:
        return {}
    row: dict[str, float] = {}
    judged = (("reward", rewards, rollout.rewards), ("eval_rewards", eval_rewards, rollout.eval_rewards))
    for turn in range(lengths.shape[2]):
        for kind, names, values in judged:
            row |= {
                f"{kind}/{name}@turn{turn + 1}": present_mean(values[:, :, turn, n]) for n, name in enumerate(names)
            }
        tokens = lengths[:, :, turn]
        row[f"completion_tokens@turn{turn + 1}"] = present_mean(np.where(tokens > 0, tokens, np.nan))
    answered = (samples.present & ~samples.mask).sum(-1)
    return row | {"turns": float((lengths > 0).sum(-1).mean()), "observation_tokens": float(answered.mean())}


def tool_errors(rollout: Rollout) -> tuple[float, str]:
    """Return the share of errors among the results of data.tools, NaN without a result, and the last result."""
    turns = (turn for group in rollout.episodes for episode in group for turn in episode.turns)
    answers = [turn.observation for turn in turns if turn.observation is not None and not turn.observation.done]
    results = [text for answer in answers for text in answer.messages or (answer.text,)]
    return present_mean(np.array([text.startswith(ERROR) for text in results], float)), ["", *results][-1]


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    present = values[np.isfinite(values)].astype(np.float64)
    return {f"{name}/mean": present_mean(values), f"{name}/std": float(present.std()) if present.size else float("nan")}


def completion_columns(ctx: RunContext, rollout: Rollout, advantages: np.ndarray) -> Record:
    """Return the columns of a batch's completions, by group; one entry per completion, or per turn of episodes.

    `advantages` are f32 [P, G] (for PPO the mean over each completion's tokens), or [P, G, T] by turn.
    """
    samples, lengths = rollout.samples, rollout.lengths
    assert samples is not None
    _, group, turns = lengths.shape
    names = [f"reward/{name}" for name in ctx.fns.reward_names]
    names += [f"eval_rewards/{name}" for name in ctx.fns.eval_reward_names]
    values = np.concatenate([rollout.rewards, rollout.eval_rewards], axis=-1)
    entries: list[Record] = []
    pictures = []
    for p, g in np.ndindex(advantages.shape[:2]):
        row = rollout.rows[p]
        for number, turn in enumerate(rollout.episodes[p][g].turns):
            advantage = advantages[p, g]
            if advantages.ndim == 3:
                in_turn = samples.mask[p, g] & (True if samples.turn is None else samples.turn[p, g] == number)
                in_turn = in_turn[: advantages.shape[2]]
                advantage = advantage[in_turn].mean() if in_turn.any() else 0
            entry = {"prompt": row.prompt, "completion": turn.completion, "raw_completion": turn.raw_completion}
            if turns > 1:
                answer = None if turn.observation is None or turn.observation.done else turn.observation.text
                entry |= {"episode": p * group + g, "turn": number + 1, "observation": answer}
            entry |= {**dict(zip(names, values[p, g, number], strict=True)), **turn.logged}
            entry |= {"advantage": np.float32(advantage), "length": int(lengths[p, g, number])}
            entries.append(entry | {"truncated": turn.truncated, "valid": turn.valid})
            pictures.append(row.pictures)
    columns = {name: [entry.get(name) for entry in entries] for name in dict.fromkeys(itertools.chain(*entries))}
    columns |= {name: _cells(values) for name, values in columns.items() if name.startswith("log/")}
    return columns | pictures_column(pictures)


def _cells(values: list[Any]) -> list[Any]:
    """Return values of one type that a file can hold unchanged, others as texts."""
    kinds = {type(value) for value in values if value is not None}
    fits = all(abs(value) < 2**53 for value in values if type(value) is int)
    if fits and (kinds <= {int, float} or kinds == {bool}):
        return values
    texts = [None if value is None else str(value) for value in values]
    return [text and text.encode(errors="replace").decode() for text in texts]


def reward_streaks(ctx: RunContext, rollout: Rollout, notes: Notes) -> Notes:
    """Count consecutive iterations: a reward missing or constant, no text that ended, no tool result but errors."""
    judged = rollout.rewards if ctx.config.algorithm.turn_advantage == "return" else rollout.final_rewards
    values = dict(zip(ctx.fns.reward_names, np.moveaxis(judged, -1, 0), strict=True))
    streaks: dict[str, int] = {}
    constant: dict[str, list[float]] = {}
    ranges = dict(notes.range)
    for name in maximised_names(ctx.rewards.weights):
        present = np.unique(values[name][~np.isnan(values[name])]) + 0.0  # converts -0 to 0
        streaks[name] = 0 if len(present) else notes.streaks.get(name, 0) + 1
        if len(present):
            extremes = [*ranges.get(name, ()), *present.tolist()]
            ranges[name] = [min(extremes), max(extremes)]
        if len(present) == 1:
            value, (last, count) = float(present[0]), notes.constant.get(name, (None, 0))
            constant[name] = [value, count + 1 if last == value else 1]
    cut = rollout.samples is not None and rollout.samples.truncated.all()
    truncated = notes.truncated + 1 if cut else 0
    share, last = tool_errors(rollout) if ctx.config.data.tool_names else (0.0, "")
    failing = {last: sum(notes.failing_tools.values()) + 1} if share == 1 else {}
    counted = {"streaks": streaks, "constant": constant, "range": ranges, "truncated": truncated}
    return notes._replace(**counted, failing_tools=failing)


def streak_warnings(ctx: RunContext, notes: Notes, done: int) -> list[str]:
    """Return warnings of `reward_streaks` after `done` iterations, once for each streak.

    It warns of no constant reward at its best value: the function's own `best`, or the best of several values so far.
    """
    best = {reward.name: getattr(reward.function, "best", None) for reward in ctx.rewards.maximised}
    lines = []
    for name, (value, count) in notes.constant.items():
        low, high = notes.range[name]
        is_best = value == best[name] or (low < high and value == (high if ctx.rewards.weights[name] > 0 else low))
        if count == _CONSTANT_ITERATIONS and not is_best:
            every = f"every completion of the last {_CONSTANT_ITERATIONS} iterations"
            lines.append(f"the reward {name} was {value:g} for {every}; the policy learns nothing from it")
    if notes.truncated == _CONSTANT_ITERATIONS:
        last = f"every completion of the last {notes.truncated} iterations"
        lines.append(f"{last} reached sampling.max_new_tokens; raise it")
    for error, count in notes.failing_tools.items():
        if count == _CONSTANT_ITERATIONS:
            every = f"every tool result of the last {_CONSTANT_ITERATIONS} iterations was an error"
            lines.append(f"{every}, such as {one_line(repr(error), 150)}")
    never = [name for name, count in notes.streaks.items() if count == done]
    if 0 < len(never) < len(notes.streaks) and done == min(MISSING_ITERATIONS, ctx.iterations):
        lines.append(f"no completion got the reward {join_names(never)} in the first {done} iterations")
    return lines
