"""Evaluation on held-out prompts: of the policy's completions and of baselines; also of a single typed prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.named import IN_PYTHON
from grpo_jax.core.pass_at_k import mean_interval, pass_at_k
from grpo_jax.errors import Stopped, UserError
from grpo_jax.models.sharding import on_host
from grpo_jax.models.variables import Variables
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import Episode
from grpo_jax.rollout.pipeline import Work
from grpo_jax.rollout.rollout import Rollout, collect, judge
from grpo_jax.runs.batches import weigh
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.context import RunContext
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.loading import load
from grpo_jax.runs.metrics import OWN_MEASURES, TOTAL, present_mean, turn_measures
from grpo_jax.runs.policy import START, policy_identity, restore_variables, run_config, saved_renderer
from grpo_jax.tasks.task import Info
from grpo_jax.training.estimators import total_rewards

START_RENDERER = "start_renderer"
"""Name of the evaluation of greedy completions drawn by the renderer before its training."""

Statistics = dict[str, dict[str, list[float]]]
"""By measure and statistic ("mean@8", "pass@1", …): the mean over prompts and the bounds of its 95 % interval."""


class Evaluation(NamedTuple):
    """Means over prompts by measure name (`TOTAL` among them), with one judged episode per prompt.

    `samples` are `sample_measures` of several completions per prompt, or None with one per prompt. The other fields
    then use the first completion.
    """

    measures: dict[str, float]
    rollout: Rollout
    samples: Statistics | None = None

    @property
    def episodes(self) -> list[Episode]:
        """Return one episode per prompt; the first ones have their pictures."""
        return [group[0] for group in self.rollout.episodes]


def evaluate(ctx: RunContext, variables: Variables, rows: Sequence[Row], *, sampled: bool = False) -> Evaluation:
    """Evaluate the policy on held-out prompts, with fixed noise: one greedy completion each, or k sampled ones.

    If the task has choices, the first of the policy's ranking replaces the greedy completion.
    """
    if ctx.samplers.rank is not None and not sampled:
        return evaluate_ranking(ctx, variables, rows)
    count = ctx.config.evaluation.samples if sampled else 1
    sampler = ctx.samplers.sampled if sampled else ctx.samplers.greedy
    work = ctx.work(max(chunk_size(ctx) // count, 1))
    rollout = collect(ctx.fns, sampler, variables, rows, key=ctx.key, iteration=None, work=work)
    measures = means(ctx, rollout)
    measures |= {name: measure(rollout) for name, measure in OWN_MEASURES.items()}
    measures |= turn_measures(rollout, ctx.measure_names)
    parts = [group[:1] for group in rollout.episodes], rollout.rewards[:, :1], rollout.eval_rewards[:, :1]
    first = Rollout(rollout.rows, *parts, columns=rollout.columns)
    return Evaluation(measures, first, sample_measures(ctx, rollout) if count > 1 else None)


def configured_eval_rewards(ctx: RunContext) -> list[str]:
    """Return the eval rewards, without those that the task always has, for which lower may be better."""
    return [name for name in ctx.fns.eval_reward_names if name not in ctx.task_data.rewards.eval_always]


def caption_values(ctx: RunContext) -> dict[str, list[float]]:
    """Return the eval_rewards of the validation prompts' best known texts, which no training changes; {} without any.

    They are the oracle's texts, or the prompts as typed. They show whether a trained renderer still draws well.
    """
    rows, names = ctx.validation_rows, configured_eval_rewards(ctx)
    references = ctx.task_data.report.references(rows) if names and ctx.renderer is not None else {}
    if not references:
        return {}
    values = eval_reward_values(ctx, evaluate_texts(ctx, rows, [*references.values()][-1]))
    return {f"{name}_of_captions": column for name, column in values.items()}


def eval_reward_values(ctx: RunContext, evaluation: Evaluation) -> dict[str, list[float]]:
    """Return the eval_rewards of each prompt by name, rounded for checkpoints."""
    values = np.round(evaluation.rollout.final_eval_rewards[:, 0].T.astype(np.float64), 6)
    columns = dict(zip(ctx.fns.eval_reward_names, values.tolist(), strict=True))
    return {name: columns[name] for name in configured_eval_rewards(ctx)}


def sample_measures(ctx: RunContext, rollout: Rollout) -> Statistics:
    """Compute mean@k, best@k and pass@k of every reward and eval reward, and mean@k and best@k of the total.

    "mean@k" and "best@k" are means over prompts of the mean and the highest value of k completions. "pass@j", for
    j = 1, 2, 4, … and k, is the probability that at least one of j completions reaches evaluation.pass_threshold
    (`core.pass_at_k.pass_at_k`). Missing values do not count.
    """
    threshold, judged = ctx.config.evaluation.pass_threshold, rollout.final_values
    count = judged.shape[1]

    def over_prompts(values: np.ndarray) -> dict[str, list[float]]:  # of the present values [P, k]
        each = {"mean": [present_mean(row) for row in values], "best": np.fmax.reduce(values, axis=1)}
        return {f"{name}@{count}": [*mean_interval(np.array(column))] for name, column in each.items()}

    statistics: Statistics = {}
    for name, values in zip(ctx.measure_names, np.moveaxis(judged, -1, 0), strict=True):
        present, passed = np.isfinite(values).sum(1), (values >= threshold).sum(1)
        statistics[name] = over_prompts(values)
        for k in sorted({*(2**power for power in range(count.bit_length())), count}):
            interval = mean_interval(pass_at_k(passed, present, k))
            statistics[name][f"pass@{k}"] = np.clip(interval, 0.0, 1.0).tolist()  # it is a probability
    return statistics | {TOTAL: over_prompts(total_rewards(weigh(ctx, rollout)))}


def evaluate_ranking(ctx: RunContext, variables: Variables, rows: Sequence[Row]) -> Evaluation:
    """Evaluate the policy's rankings of the choices; the rows' columns hold the task's description of each."""
    choices, rank = ctx.task_data.choices, ctx.samplers.rank
    assert choices is not None and rank is not None
    texts: list[str] = []
    columns: defaultdict[str, list[object]] = defaultdict(list)
    for start in range(0, len(rows), chunk_size(ctx)):
        if ctx.is_stopped():
            raise Stopped
        part = rows[start : start + chunk_size(ctx)]
        prompt = ctx.fns.encode(part)
        states, _ = ctx.fns.see(variables, prompt.pictures)
        pictures = {} if states is None else {"pictures": states}
        ranking = on_host(rank(variables, prompt.tokens, prompt.mask, **pictures))
        texts += [choices.texts[int(number)] for number in ranking.texts[:, 0]]
        for name, values in choices.columns(part, ranking.texts, ranking.scores).items():
            columns[name] += values
    ranked = [
        dataclasses.replace(row, columns={**row.columns, **{name: values[i] for name, values in columns.items()}})
        for i, row in enumerate(rows)
    ]
    evaluation = evaluate_texts(ctx, ranked, texts)
    return evaluation._replace(rollout=evaluation.rollout._replace(columns=dict(columns)))


def evaluate_texts(ctx: RunContext, rows: Sequence[Row], texts: Sequence[str]) -> Evaluation:
    """Evaluate given texts in place of completions: unchanged prompts or the oracle's rewrites. No length penalty."""
    rollout = judge(ctx.fns, rows, [[text] for text in texts], ctx.work(chunk_size(ctx)))
    return Evaluation(means(ctx, rollout), rollout)


def chunk_size(ctx: RunContext) -> int:
    """Return the number of prompts per chunk: few with pictures, which take memory and are judged during sampling."""
    return 256 if ctx.fns.render is None and ctx.fns.encode_images is None else 32


def measure_all(ctx: RunContext, variables: Variables, *, references: bool = True) -> dict[str, Evaluation]:
    """Evaluate on the test prompts, if any: the policy and, with `references`, the baselines.

    If the renderer is trained, the policy's texts are also drawn by the renderer before its training.
    The policy's measures in a control environment are named NAME_CONTROL.
    """
    rows = ctx.test_rows
    if not rows:
        return {}
    evaluations = {"greedy": evaluate(ctx, variables, rows)}
    for control, step in ctx.task_data.environment.controls.items() if ctx.fns.env else ():
        controlled = evaluate(ctx._replace(fns=ctx.fns.with_step(step)), variables, rows)
        for name in ctx.measure_names:
            evaluations["greedy"].measures[f"{name}_{control}"] = controlled.measures[name]
    if ctx.config.evaluation.samples:
        evaluations["sampled"] = evaluate(ctx, variables, rows, sampled=True)
    if ctx.renderer is not None and ctx.renderer.updates:
        with ctx.renderer.untrained():
            texts = [episode.last.completion for episode in evaluations["greedy"].episodes]
            evaluations[START_RENDERER] = evaluate_texts(ctx, rows, texts)
    for kind, texts in ctx.task_data.report.references(rows).items() if references else ():
        evaluations[kind] = evaluate_texts(ctx, rows, texts)
    for evaluation in evaluations.values():
        evaluation.measures.update(measures_by_column(ctx, rows, evaluation))
    return evaluations


def measures_by_column(ctx: RunContext, rows: Sequence[Row], evaluation: Evaluation) -> dict[str, float]:
    """Return means of eval rewards over the prompts with each value of the column evaluation.by, as MEASURE/VALUE."""
    column = ctx.config.evaluation.by
    if not column:
        return {}
    kinds = np.array([str(row.columns[column]) for row in rows])
    return {
        f"{name}/{kind}": present_mean(np.array(values)[kinds == kind])
        for name, values in eval_reward_values(ctx, evaluation).items()
        for kind in dict.fromkeys(kinds.tolist())
    }


def means(ctx: RunContext, rollout: Rollout) -> dict[str, float]:
    """Return the mean of each reward, of each eval reward, and of the training objective, `TOTAL`.

    The total is the weighted sum of the objectives' means, each over the rows that have a value. (A group of one has no
    mean to replace a missing value.) It is NaN if an objective is missing in all rows.
    """
    objectives, values = weigh(ctx, rollout), rollout.final_values
    rewards = np.asarray(objectives.rewards)
    total = sum(weight * present_mean(rewards[..., n]) for n, weight in enumerate(objectives.weights) if weight)
    return {name: present_mean(values[..., n]) for n, name in enumerate(ctx.measure_names)} | {TOTAL: float(total)}


def checkpoint_names(run_dir: str | Path, name: str) -> list[str]:
    """Return the names of a run's checkpoints, newest first, and `START`; UserError unless `name` can be read."""
    run_config(run_dir)
    with Checkpoints(RunDirectory(run_dir).checkpoints, read_only=True) as checkpoints:
        if name != START:
            checkpoints.read_meta(name)
        return list(dict.fromkeys([name, *reversed(checkpoints.available()), START]))


class InferenceSession:
    """A run that is loaded once, including its judges; checkpoints are restored on demand.

    A failing judge is always an error, whatever the config of `ctx`, the run.
    """

    def __init__(self, run_dir: str | Path, info: Info, exit_stack: ExitStack | None):
        """Load a directory's run; `exit_stack` closes its judges. Rewards that only Python had are missing."""
        config = run_config(run_dir).replace(on_judge_error="stop")
        given = [section.called for section in config.rewards if section.name.startswith(IN_PYTHON)]
        rewards = dict.fromkeys(given, lambda completions: [None] * len(completions))
        self.ctx = load(config, info, rewards=rewards, exit_stack=exit_stack)
        self._held_out = [*self.ctx.test_rows, *self.ctx.validation_rows]
        policy = self.ctx.policy
        identity = policy_identity(config, policy, teacher=False)
        start = self.ctx.renderer and self.ctx.renderer.state()

        def restore(checkpoint: str) -> tuple[Variables, dict[str, np.ndarray] | None]:
            variables, meta = restore_variables(policy.variables, run_dir, checkpoint, identity)
            return variables, start and saved_renderer(start, run_dir, meta["step"])

        self._restore = functools.lru_cache(2)(restore)

    def row(self, prompt: str, seed: int) -> Row:
        """Return the row of a prompt, with the columns and pictures of a held-out prompt of the same text, if any.

        Its id is `seed`, which determines noise and random numbers; a held-out prompt keeps its own id.
        """
        require(prompt := prompt.strip(), "prompt", "a text", prompt)  # as in the data
        require(0 <= seed < 2**32, "seed", "a number in [0, 2**32)", seed)
        same = [row for row in self._held_out if row.prompt.strip() == prompt]
        known = next((row for row in same if row.id == seed), same[0] if same else None)
        try:  # the data has no negative id
            known = known or self.ctx.task_data.environment.start_episode(Row(-1 - seed, prompt))
        except UserError as error:
            raise UserError(f"{error}; choose a held-out prompt") from error
        row = dataclasses.replace(known, id=seed)
        self.ctx.fns.encode([row])  # refuses a prompt that is too long
        return row

    def write(self, row: Row, checkpoint: str, *, group: bool = False) -> list[Episode]:
        """Return a checkpoint's greedy episode, judged; with `group`, a group sampled as in training."""
        ctx, (variables, drawing) = self.ctx, self._restore(checkpoint)
        if ctx.renderer is not None and drawing is not None:
            ctx.renderer.restore(drawing)
        sample = ctx.samplers.training if group else ctx.samplers.greedy
        return collect(ctx.fns, sample, variables, [row], key=ctx.key, iteration=None, work=self._work(row)).episodes[0]

    def unchanged(self, row: Row) -> Episode | None:
        """Return the unchanged prompt, judged in place of a rewrite; None if the task does not rewrite."""
        texts = self.ctx.task_data.report.references([row]).get("unchanged")
        with nullcontext() if self.ctx.renderer is None else self.ctx.renderer.untrained():
            return judge(self.ctx.fns, [row], [texts], self._work(row)).episodes[0][0] if texts else None

    def _work(self, row: Row) -> Work:
        """Return the pipeline of a row; rewards may be missing if a typed prompt lacks their columns."""
        typed = all(row.columns is not known.columns for known in self._held_out)
        return self.ctx.work(1, missing=True if typed else None)
