"""What a run measures of completions beside rewards and watched measures, and that no name is given twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from grpo_jax.config import Config
from grpo_jax.config.fields import require
from grpo_jax.config.sections import RewardSection
from grpo_jax.rollout.binding import ResolvedRewards
from grpo_jax.rollout.rollout import Episodes
from grpo_jax.runs.loop.early_stopping import SCORE
from grpo_jax.tasks.display import of_turns
from grpo_jax.training.estimators import OVERLONG

TOTAL = "total"
"""Name of the measure that is maximised, in which "best" and the improvement are told."""
OWN_MEASURES: Mapping[str, Callable[[Episodes], float]] = {
    "completion_tokens": lambda episodes: float(episodes.samples.mask.sum(-1).mean()),
    "usable": lambda episodes: float(episodes.usable.mean()),
}
"""What is measured of held-out completions beside rewards and watched measures."""


def with_control(name: str, control: str) -> str:
    """The name of a measure where a control answers."""
    return f"{name}_{control}"


def require_names(config: Config, rewards: ResolvedRewards, controls: Collection[str]) -> None:
    """Refuses rewards and watched measures whose name the run tells something else by, which one would replace.

    Args:
        config: The run's.
        rewards: As found.
        controls: Names of the task's controls.

    Raises:
        UserError: Naming it.
    """
    sections = [*rewards.sections, *map(RewardSection, rewards.watch)]
    names = [section.called for section in sections]
    taken = {SCORE, TOTAL, *OWN_MEASURES, *(with_control(name, control) for name in names for control in controls)}
    if config.algorithm.overlong_buffer:
        taken.add(OVERLONG)
    measured_names = {*names, *(f"{name}_turn_1" for name in names)}
    measured: dict[str, RewardSection] = {}
    for place, section in enumerate(sections):
        name = section.called
        plain = RewardSection(section.name, options=section.options, messages=section.messages)
        same = measured.setdefault(name, plain) == plain  # a reward may be watched too, as it is
        where = "rewards" if place < len(rewards.sections) else "watch"
        expected = "a name that no other measure of the run has (set a reward's label; in Python: ('name', function))"
        of_others = config.sampling.turns > 1 and of_turns(name, measured_names)
        require(same and name not in taken and not of_others, f"{where}.{name}", expected, name)
