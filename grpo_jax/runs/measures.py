"""Measures of completions beside rewards and watched measures; no two may have the same name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.reward_registry import ResolvedRewards
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.runs.progress import SCORE
from grpo_jax.tasks.task import of_turns
from grpo_jax.training.estimators import OVERLONG

TOTAL = "total"
"""Name of the measure that is maximised, for "best" and the improvement."""
OWN_MEASURES: Mapping[str, Callable[[Rollout], float]] = {
    "completion_tokens": lambda rollout: float(rollout.lengths.sum(-1).mean()),
    "valid": lambda rollout: float(rollout.valid.mean()),
}
"""Measures of held-out completions beside rewards and watched measures."""


def with_control(name: str, control: str) -> str:
    """Name a measure where a control answers."""
    return f"{name}_{control}"


_NOTHING = 1e-6  # a change that is rounding alone


def fallen(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the measures whose mean over the same prompts fell by more than twice the standard error of its change.

    Values are one for each prompt, NaN where missing; of fewer than two prompts that have both nothing is told.
    """
    names = []
    for name in before.keys() & after.keys():
        change = np.asarray(after[name], np.float64) - np.asarray(before[name], np.float64)
        change = change[np.isfinite(change)]
        if change.size < 2:
            continue
        error = change.std(ddof=1) / np.sqrt(change.size)
        if change.mean() < -max(2 * error, _NOTHING):
            names.append(name)
    return sorted(names)


def require_names(config: Config, rewards: ResolvedRewards, controls: Collection[str]) -> None:
    """Refuse rewards and watched measures that have the name of another measure of the run."""
    sections = [*rewards.sections, *(RewardSection(name=name) for name in rewards.eval_rewards)]
    names = [section.called for section in sections]
    taken = {SCORE, TOTAL, *OWN_MEASURES, *(with_control(name, control) for name in names for control in controls)}
    if config.algorithm.overlong_buffer:
        taken.add(OVERLONG)
    measured_names = {*names, *(f"{name}_turn_1" for name in names)}
    measured: dict[str, RewardSection] = {}
    for place, section in enumerate(sections):
        name = section.called
        plain = RewardSection(name=section.name, options=section.options, messages=section.messages)
        same = measured.setdefault(name, plain) == plain  # a reward may be watched too, as it is
        where = "rewards" if place < len(rewards.sections) else "eval_rewards"
        expected = "a name that no other measure of the run has (set a reward's label; in Python: ('name', function))"
        of_others = config.sampling.turns > 1 and of_turns(name, measured_names)
        require(same and name not in taken and not of_others, f"{where}.{name}", expected, name)


RIGHT = 1.0
"""A measure's best value: a first turn that reaches it was right."""


def present_mean(values: np.ndarray) -> float:
    """Return the mean of the finite values, in float64; NaN without any."""
    present = values[np.isfinite(values)].astype(np.float64)
    return float(present.mean()) if present.size else float("nan")


def turn_measures(rollout: Rollout, names: Sequence[str]) -> dict[str, float]:
    """Held-out measures of episodes beside those of their ends; nothing where the policy writes once.

    Means over the completions that have them: "NAME_turn_U" after U turns, for all but the last turn (an episode that
    ended before stays as it ended); "NAME_peak", the best over its turns; "NAME_kept", of those that were right in
    the first turn (`RIGHT`) the share that ended no worse; "NAME_gain", the end less the start.
    """
    if rollout.rewards.shape[2] == 1:
        return {}
    values = np.concatenate([rollout.rewards, rollout.eval_rewards], axis=-1)
    values = values.reshape(-1, *values.shape[2:])  # [P·G, U, N + W]
    ends = np.concatenate([rollout.final_rewards, rollout.final_eval_rewards], axis=-1).reshape(len(values), -1)
    # A turn that does not exist has no value of any name; one whose measures all failed counts as the one before.
    exists = np.isfinite(values).any(axis=-1)
    last = np.maximum.accumulate(np.where(exists, np.arange(values.shape[1]), 0), axis=1)
    carried = np.take_along_axis(values, last[..., None], axis=1)
    measures: dict[str, float] = {}
    for n, name in enumerate(names):
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
