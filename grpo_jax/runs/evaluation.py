"""Held-out measurement: the policy's texts, and others measured in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.core.pass_at_k import mean_interval, pass_at_k
from grpo_jax.errors import Stopped
from grpo_jax.models.sharding import on_host
from grpo_jax.models.variables import Variables
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode
from grpo_jax.rollout.rollout import Rollout, collect, judge
from grpo_jax.runs.measures import OWN_MEASURES, TOTAL, present_mean, turn_measures, with_control
from grpo_jax.runs.parts import RunContext, objectives_of
from grpo_jax.training.estimators import total_rewards

PICTURE_CHUNK = 32
"""Prompts that travel together: bounds the pictures held at once, and lets judges work while the policy writes."""
TEXT_CHUNK = 256
"""Prompts that travel together where there are no pictures."""

Statistics = dict[str, dict[str, list[float]]]
"""By measure and statistic ("mean@8", "pass@1", …): the mean over prompts and the bounds of its 95 % interval."""


class Evaluation(NamedTuple):
    """Means over prompts by measure name (`TOTAL` among them), with one judged episode per prompt.

    `samples` are `sample_measures` of several completions per prompt, the
    others being of the first; None where each prompt has one.
    """

    measures: dict[str, float]
    rollout: Rollout
    samples: Statistics | None = None

    @property
    def episodes(self) -> list[Episode]:
        """One of each prompt; the first have their pictures."""
        return [group[0] for group in self.rollout.episodes]

    @property
    def texts(self) -> list[str]:
        """P, the last turns' texts."""
        return [episode.last.completion for episode in self.episodes]


def evaluate_policy(
    parts: RunContext, variables: Variables, rows: Sequence[Row], *, sampled: bool = False
) -> Evaluation:
    """Measure the policy on held-out prompts, with fixed noise: one greedy completion each, or k sampled ones.

    Where the task lists the possible texts, the first of its ranking takes the greedy completion's place.
    """
    if parts.samplers.rank is not None and not sampled:
        return evaluate_ranking(parts, variables, rows)
    count = parts.config.evaluation.samples if sampled else 1
    rollout = collect(
        parts.environment,
        parts.samplers.sampled if sampled else parts.samplers.greedy,
        variables,
        rows,
        key=parts.key,
        iteration=None,
        work=parts.work(max(_chunk(parts) // count, 1)),
    )
    measures = means(parts, rollout)
    measures |= {name: measure(rollout) for name, measure in OWN_MEASURES.items()}
    measures |= turn_measures(rollout, parts.measure_names)
    samples = sample_measures(parts, rollout) if count > 1 else None
    return Evaluation(measures, rollout.first_of_each(), samples)


def asked_to_watch(parts: RunContext) -> list[str]:
    """Return the watched measures without those that the task watches in every run, of which less may be better."""
    return [name for name in parts.environment.eval_reward_names if name not in parts.task_data.rewards.always_watched]


def watched_values(parts: RunContext, evaluation: Evaluation) -> dict[str, list[float]]:
    """Return what was asked to be watched, of each prompt by name; rounded for checkpoints."""
    values = np.round(evaluation.rollout.final_eval_rewards[:, 0].T.astype(np.float64), 6)
    columns = dict(zip(parts.environment.eval_reward_names, values.tolist(), strict=True))
    return {name: columns[name] for name in asked_to_watch(parts)}


def sample_measures(parts: RunContext, rollout: Rollout) -> Statistics:
    """Mean@k and pass@k of every reward and watched measure, and mean@k of the total.

    "mean@k" is the mean over prompts of the mean over completions. "pass@j", for j = 1, 2, 4, … and k, is how often
    at least one of j completions reaches evaluation.pass_threshold (`core.pass_at_k.pass_at_k`); of no total.
    Missing values are left out.
    """
    threshold = parts.config.evaluation.pass_threshold
    judged = np.concatenate([rollout.final_rewards, rollout.final_eval_rewards], axis=-1)
    count = judged.shape[1]
    statistics: Statistics = {}
    for index, name in enumerate(parts.measure_names):
        values = judged[..., index]
        present, passed = np.isfinite(values).sum(1), (values >= threshold).sum(1)
        statistics[name] = {f"mean@{count}": _mean_of(values)}
        for k in sorted({*(2**power for power in range(count.bit_length())), count}):
            interval = mean_interval(pass_at_k(passed, present, k))
            statistics[name][f"pass@{k}"] = np.clip(interval, 0.0, 1.0).tolist()  # a probability's
    totals = total_rewards(objectives_of(parts, rollout.rewards, rollout.lengths))
    return statistics | {TOTAL: {f"mean@{count}": _mean_of(totals)}}


def _mean_of(values: np.ndarray) -> list[float]:
    """Mean over prompts of the present values [P, k], and its interval."""
    present = np.isfinite(values)
    sums = np.where(present, values, 0.0).sum(1, dtype=np.float64)
    return [*mean_interval(np.divide(sums, present.sum(1), out=np.full(len(sums), np.nan), where=present.any(1)))]


def evaluate_ranking(parts: RunContext, variables: Variables, rows: Sequence[Row]) -> Evaluation:
    """Measure the policy's rankings of the possible texts; the task's words for one stand in its row's columns."""
    choices, rank = parts.task_data.choices, parts.samplers.rank
    assert choices is not None and rank is not None
    texts: list[str] = []
    ranked_rows: list[Row] = []
    every: dict[str, list[object]] = {}
    for start in range(0, len(rows), _chunk(parts)):
        if parts.is_stopped():
            raise Stopped
        part = rows[start : start + _chunk(parts)]
        prompt = parts.environment.encode(part)
        encode_images = parts.environment.encode_images
        pictures = {}
        if prompt.pictures is not None and encode_images is not None:
            pictures["pictures"] = encode_images(variables, prompt.pictures)[0]
        ranking = on_host(rank(variables, prompt.tokens, prompt.mask, **pictures))
        columns = choices.columns(part, ranking.texts, ranking.scores)
        texts += [choices.texts[int(number)] for number in ranking.texts[:, 0]]
        ranked_rows += [
            dataclasses.replace(row, columns={**row.columns, **{name: values[i] for name, values in columns.items()}})
            for i, row in enumerate(part)
        ]
        for name, values in columns.items():
            every.setdefault(name, []).extend(values)
    evaluation = evaluate_texts(parts, ranked_rows, texts)
    return evaluation._replace(rollout=evaluation.rollout._replace(columns=every))


def evaluate_controls(parts: RunContext, variables: Variables, rows: Sequence[Row]) -> dict[str, float]:
    """Measures of the policy's episodes where another environment answers, as NAME_CONTROL."""
    environment, measures = parts.environment, {}
    if environment.env is None:
        return {}
    for control, step in parts.task_data.environment.controls.items():
        env = environment.env._replace(step=step)
        evaluation = evaluate_policy(parts._replace(environment=environment._replace(env=env)), variables, rows)
        names = environment.reward_names + environment.eval_reward_names
        measures |= {with_control(name, control): evaluation.measures[name] for name in names}
    return measures


def evaluate_texts(parts: RunContext, rows: Sequence[Row], texts: Sequence[str]) -> Evaluation:
    """Measure given texts in the policy's place: unchanged prompts or the oracle's rewrites. No length penalty."""
    rollout = judge(parts.environment, rows, [[text] for text in texts], parts.work(_chunk(parts)))
    return Evaluation(means(parts, rollout), rollout)


def _chunk(parts: RunContext) -> int:
    environment = parts.environment
    return TEXT_CHUNK if environment.render is None and environment.encode_images is None else PICTURE_CHUNK


def measure_all(parts: RunContext, variables: Variables, *, references: bool = True) -> dict[str, Evaluation]:
    """Measure the test prompts, if any: the policy's texts and, with `references`, others in its place."""
    rows = parts.test_rows
    if not rows:
        return {}
    evaluations = {"greedy": evaluate_policy(parts, variables, rows)}
    evaluations["greedy"].measures.update(evaluate_controls(parts, variables, rows))
    if parts.config.evaluation.samples:
        evaluations["sampled"] = evaluate_policy(parts, variables, rows, sampled=True)
    for kind, texts in parts.task_data.report.references(rows).items() if references else ():
        evaluations[kind] = evaluate_texts(parts, rows, texts)
    for evaluation in evaluations.values():
        evaluation.measures.update(measures_by_column(parts, rows, evaluation))
    return evaluations


def measures_by_column(parts: RunContext, rows: Sequence[Row], evaluation: Evaluation) -> dict[str, float]:
    """Means of watched measures over the prompts with one value of the column evaluation.by, as MEASURE/VALUE."""
    column = parts.config.evaluation.by
    if not column:
        return {}
    kinds = np.array([str(row.columns[column]) for row in rows])
    return {
        f"{name}/{kind}": present_mean(np.array(values)[kinds == kind])
        for name, values in watched_values(parts, evaluation).items()
        for kind in dict.fromkeys(kinds.tolist())
    }


def means(parts: RunContext, rollout: Rollout) -> dict[str, float]:
    """Mean of each reward as judged and of each watched measure, and of what is maximised: `TOTAL`.

    The total is the weighted sum of the objectives' means, each over the rows that have it (a group of one has no
    mean to take a missing value's place); NaN where an objective is missing in all rows.
    """
    judged = np.concatenate([rollout.final_rewards, rollout.final_eval_rewards], axis=-1)
    objectives = objectives_of(parts, rollout.rewards, rollout.lengths)
    terms = zip(objectives.weights, _present_means(np.asarray(objectives.rewards)), strict=True)
    total = float(sum(weight * mean for weight, mean in terms if weight))
    return {**dict(zip(parts.measure_names, _present_means(judged), strict=True)), TOTAL: total}


def _present_means(values: np.ndarray) -> list[float]:
    """Means of the present values [.., N] of each column; NaN where there is none."""
    return [present_mean(column) for column in np.moveaxis(values, -1, 0)]
