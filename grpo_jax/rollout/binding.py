"""The rewards that a config names, found before anything heavy is loaded, and given the judges they ask for later."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from grpo_jax.config.build import require_known
from grpo_jax.config.named import load_object
from grpo_jax.config.sections import RewardSection
from grpo_jax.core.advantages import Condition
from grpo_jax.errors import UserError
from grpo_jax.rollout.rewards import Maker, Reward


class Source(Protocol):
    """Where rewards come from beside import paths: a task's world."""

    rewards: Mapping[str, Any]
    default_rewards: Sequence[RewardSection]
    default_watch: Sequence[str]
    measures: Callable[[str], Reward | None]
    always_watched: tuple[str, ...]
    adapt: Callable[[Reward], Reward]
    conditions: Callable[[Sequence[RewardSection]], Sequence[RewardSection]]


class Wanted(NamedTuple):
    """A reward that was found, and the judge that it is to ask in place of its own ("" for its own)."""

    name: str
    reward: Reward
    judge: str


class Rewards(NamedTuple):
    """What a run maximises, and what it only watches.

    Attributes:
        sections: N rewards as configured, their conditions resolved.
        maximised: A function for each.
        watched: W measures.
    """

    sections: tuple[RewardSection, ...]
    maximised: tuple[Wanted, ...]
    watched: tuple[Wanted, ...]

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward by name, in order."""
        return {section.label: section.weight for section in self.sections}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions between rewards, by index."""
        index = {section.label: position for position, section in enumerate(self.sections)}
        return tuple(
            Condition(index[section.label], index[section.condition_on], section.threshold)
            for section in self.sections
            if section.condition_on is not None
        )

    def describe(self) -> str:
        """Name, weight and condition of each."""
        return ", ".join(map(_described, self.sections))


def find_rewards(
    sections: Sequence[RewardSection],
    watch: Sequence[str],
    source: Source,
    judges: Sequence[str],
    given: Sequence[Reward] | None = None,
) -> Rewards:
    """Finds the rewards of a config and binds their options.

    Args:
        sections: As configured.
        watch: Names that are watched.
        source: The task's own rewards.
        judges: Names of the judges there are.
        given: Functions in place of those that sections name. A section with the function's name gives it weight and
            condition; without one its weight is 1.

    Raises:
        UserError: A reward, judge or option that does not exist.
    """
    if given is not None:
        sections, functions = _given(sections, given)
        found = [Wanted(s.label, source.adapt(f), "") for s, f in zip(sections, functions, strict=True)]
    else:
        sections = sections or source.default_rewards
        found = [_find(section.name, section.options, source, judges, "rewards") for section in sections]
    if not sections:
        raise UserError("rewards: expected at least one, such as my_rewards.py:function")
    watch = watch or source.default_watch
    resolved = tuple(_without_none(section) for section in source.conditions(sections))
    watched = [_find(name, {}, source, judges, "watch") for name in (*watch, *source.always_watched)]
    return Rewards(resolved, tuple(found), tuple(watched))


def bind(wanted: Wanted, judges: Mapping[str, Any]) -> Reward:
    """The reward with the judges that it names as arguments."""
    own = [name for name in _arguments(wanted.reward) if name in judges]
    if not wanted.judge:
        bound = {name: judges[name] for name in own}
    elif len(own) == 1:
        bound = {own[0]: judges[wanted.judge]}
    else:
        raise UserError(f"{wanted.name}: expected a reward of one judge before @{wanted.judge}, it has {own or 'none'}")
    return functools.partial(wanted.reward, **bound) if bound else wanted.reward


def _find(name: str, options: Mapping[str, Any], source: Source, judges: Sequence[str], where: str) -> Wanted:
    """A reward by import path, of the source, or of the source with another judge."""
    label = name.rpartition(":")[2]
    if ":" in name:
        return Wanted(label, source.adapt(_with_options(load_object(name, "reward"), options, f"{where}.{label}")), "")
    base, _, judge = name.partition("@")
    if name in source.rewards:
        base, judge = name, ""
    elif (measured := source.measures(name)) is not None and where == "watch":
        return Wanted(label, measured, "")
    if base not in source.rewards:
        _refuse(name, source, where)
    if judge:
        require_known(judge, judges, f"{where}.{name}: judges")
    return Wanted(label, _with_options(source.rewards[base], options, f"{where}.{name}"), judge)


def _refuse(name: str, source: Source, where: str) -> None:
    known = ", ".join(sorted(source.rewards)) or "no reward of its own"
    raise UserError(
        f"{where}: expected package.module:function, file.py:function, or of this task {known}; got {name!r}"
    )


def _with_options(reward: Any, options: Mapping[str, Any], where: str) -> Reward:
    """A reward with its options bound, or what its maker makes of them."""
    try:
        if isinstance(reward, Maker):
            return reward.make(**options)
        if inspect.isclass(reward):
            return reward(**options)
    except (TypeError, ValueError, UserError) as error:
        raise UserError(f"{where}.options: {error}") from error
    unknown = [name for name in options if name not in _arguments(reward) and not _takes_all(reward)]
    if unknown:
        raise UserError(f"{where}.options.{unknown[0]}: no such option; it takes {', '.join(_arguments(reward))}")
    return functools.partial(reward, **options) if options else reward


def _arguments(reward: Reward) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in _parameters(reward).items() if parameter.kind in kinds]


def _takes_all(reward: Reward) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in _parameters(reward).values())


def _parameters(reward: Reward) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(reward).parameters
    except (TypeError, ValueError):  # of a builtin
        return {}


def _given(sections: Sequence[RewardSection], given: Sequence[Reward]) -> tuple[list[RewardSection], Sequence[Reward]]:
    names = [getattr(function, "__name__", type(function).__name__) for function in given]
    if not names or len(set(names)) != len(names):
        raise UserError(f"rewards: expected at least one function, each of another name, got {names}")
    by_label = {section.label: section for section in sections}
    for label in by_label:
        require_known(label, names, "rewards")
    return [by_label.get(name, RewardSection(name)) for name in names], given


def _without_none(section: RewardSection) -> RewardSection:
    return dataclasses.replace(section, condition_on=None) if section.condition_on == "none" else section


def _described(section: RewardSection) -> str:
    condition = f" where {section.condition_on} ≥ {section.threshold:g}" if section.condition_on else ""
    return f"{section.label} × {section.weight:g}{condition}"
