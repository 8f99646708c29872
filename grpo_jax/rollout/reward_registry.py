"""Resolve a config's rewards before any heavy import, and bind them to judges and to the run's state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NamedTuple

from grpo_jax.config.fields import require
from grpo_jax.config.named import IN_PYTHON, fixed_options, load_object
from grpo_jax.config.sections import RewardSection
from grpo_jax.core.advantages import Condition
from grpo_jax.errors import Problems, UserError, failures_as, one_line, short_name
from grpo_jax.rollout.data import RESERVED_COLUMNS, Row
from grpo_jax.rollout.rewards import Columns, Reward, arguments_of, check_options, with_arguments


@dataclasses.dataclass(frozen=True)
class TaskRewards:
    """A task's own rewards, beside those named by import path."""

    # By name in `rewards` and `eval_rewards` of the config: a reward function, which gets its options by keyword, or a
    # class or a partial of one, which gets them instead and whose object is the reward. A judge is an argument too.
    functions: Mapping[str, Reward] = dataclasses.field(default_factory=dict)
    defaults: Sequence[RewardSection] = ()  # rewards if the config names none
    eval_defaults: Sequence[str] = ()  # eval rewards if the config names none
    eval_always: tuple[str, ...] = ()  # names among `functions` that are eval rewards of every run, last
    # name → an eval reward for names that follow a pattern (NAME@K); None for other names
    measures: Callable[[str], Reward | None] = lambda name: None
    # (completions, columns) → further columns for the rewards, called once for all of them
    columns: Callable[[Sequence[str], Columns], Columns] | None = None
    column_names: tuple[str, ...] = ()  # of these columns


class ResolvedReward(NamedTuple):
    """A resolved reward, with the inputs of `bind`."""

    name: str
    function: Reward  # or `JUDGE_AS_REWARD`
    judge: str = ""  # name of another judge to use; "" for the function's own
    options: Mapping[str, object] = MappingProxyType({})
    messages: bool | None = False  # as in `with_arguments`


def JUDGE_AS_REWARD(**columns: object) -> object:
    """Stand in for a judge that is itself a reward, such as a reward model, until `bind` replaces it."""


class ResolvedRewards(NamedTuple):
    """Rewards that a run maximises, and eval rewards that it only reports."""

    sections: tuple[RewardSection, ...]  # N rewards as configured
    maximised: tuple[ResolvedReward, ...]  # one for each
    evaluated: tuple[ResolvedReward, ...]  # W eval rewards
    eval_rewards: tuple[str, ...]  # their names as configured, with full import paths

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of each reward by name, in order."""
        return {section.called: section.weight for section in self.sections}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Return the conditions between rewards, by index."""
        index = {section.called: position for position, section in enumerate(self.sections)}
        return tuple(
            Condition(index[section.called], index[section.condition_on], section.threshold)
            for section in self.sections
            if section.condition_on is not None
        )

    @property
    def argument_names(self) -> frozenset[str]:
        """Return the names of all rewards' arguments."""
        return frozenset(name for entry in (*self.maximised, *self.evaluated) for name in arguments_of(entry.function))

    def describe(self) -> str:
        """Describe the maximised rewards: name, weight and condition of each."""
        where = [f" where {one.condition_on} ≥ {one.threshold:g}" if one.condition_on else "" for one in self.sections]
        return ", ".join(f"{one.called} × {one.weight:g}{end}" for one, end in zip(self.sections, where, strict=True))


def resolve_rewards(
    sections: Sequence[RewardSection],
    eval_rewards: Sequence[str],
    source: TaskRewards,
    judges: Sequence[str],
    functions: Mapping[str, Reward] = MappingProxyType({}),
) -> ResolvedRewards:
    """Find a config's rewards and bind their options; UserError if one does not exist.

    Args:
        judges: Names of the available judges.
        functions: Functions by label, which replace the sections' names.
    """
    sections = sections or source.defaults
    require(sections, "rewards", "at least one, such as my_rewards.py:function", [])

    def of_user(name: str, function: Reward, options: Mapping[str, object]) -> ResolvedReward:
        check_options(name, function, options, RESERVED_COLUMNS)
        return ResolvedReward(name, function, options=fixed_options(function, options), messages=None)

    def find(name: str, options: Mapping[str, object], where: str) -> ResolvedReward:
        """Find a reward by import path, among the task's, or among the task's with another judge."""
        place, _, label = name.rpartition(":")
        if place == IN_PYTHON:
            raise UserError(
                f"reward {label}: run() was given this function in Python and nothing here can import it: call "
                f"run(config, rewards=[{label}]) again (with resume=True to continue or to measure), or keep it in a "
                "module"
            )
        if place:
            return of_user(label, load_object(name, "reward"), options)
        base, _, judge = name.partition("@")
        if name in source.functions:
            base, judge = name, ""
        elif (measured := source.measures(name)) is not None and where == "eval_rewards":
            return ResolvedReward(name, measured)
        if name in judges:
            check_options(name, JUDGE_AS_REWARD, options)
            return ResolvedReward(name, JUDGE_AS_REWARD, name, messages=None)
        if base not in source.functions or (judge and not judges):
            raise UserError(f"{where}: {_unknown(name, source, where)}")
        if judge:
            require(judge in judges, f"{where}.{name}", f"one of the judges {[*judges]}", judge)
        function, options = _make_reward(source.functions[base], options, name)
        return ResolvedReward(name, function, judge, options)

    maximised = []
    for section in sections:
        if (function := functions.get(section.called)) is not None:
            reward = of_user(section.called, function, section.options)
        else:
            reward = find(section.name, section.options, "rewards")
            if section.messages and ":" not in section.name:
                raise UserError(f"rewards.{section.called}: messages is for rewards of your own; drop it")
        messages = section.messages if reward.messages is None else False
        maximised.append(reward._replace(name=section.called, messages=messages))
    names = (*(eval_rewards or source.eval_defaults), *source.eval_always)
    evaluated = tuple(find(name, {}, "eval_rewards") for name in names)
    return ResolvedRewards(tuple(sections), tuple(maximised), evaluated, names)


def required_columns(rewards: ResolvedRewards, source: TaskRewards, judges: Collection[str]) -> dict[str, str]:
    """Return the arguments of rewards that only the data's columns can fill, each with its reward's name."""
    if source.columns is not None and not source.column_names:  # the task adds unknown columns
        return {}
    filled = {*RESERVED_COLUMNS, "messages", *judges, *source.column_names}
    needed: dict[str, str] = {}
    for reward in (*rewards.maximised, *rewards.evaluated):
        names = arguments_of(reward.function, required=True)
        needed |= {name: reward.name for name in names if name not in {*filled, *reward.options}}
    return needed


def require_columns(needed: Mapping[str, str], rows: Iterable[Row]) -> None:
    """Raise UserError for a name in `required_columns` that is a column of no row."""
    columns: dict[str, None] = {}
    for row in rows if needed else ():
        columns |= dict.fromkeys(row.columns)
        if needed.keys() <= columns.keys():
            return
    for name in [name for name in needed if name not in columns]:
        raise UserError(
            f"reward {needed[name]}: no column fills its argument {name!r}; the data has "
            f"{', '.join(columns) or 'none'}: name one by data.columns.{name} or judges.{name}, or give it a default"
        )


def require_values(rewards: ResolvedRewards, rows: Iterable[Row]) -> None:
    """Raise UserError for rows whose columns a reward's `check_row(columns)`, if it has one, refuses by ValueError."""
    for reward in (*rewards.maximised, *rewards.evaluated):
        check, problems = getattr(reward.function, "check_row", None), Problems()
        for row in rows if check else ():
            try:
                check(row.columns)  # pyright: ignore[reportOptionalCall] without it there are no rows
            except ValueError as error:
                problems.add(f"row {row.id}: {error}")
        problems.refuse(f"reward {reward.name}")


def bind(resolved: ResolvedReward, judges: Mapping[str, object]) -> Reward:
    """Bind the judges among a reward's arguments, or return the judge that is the reward; raises UserError."""
    name, function = resolved.name, resolved.function
    if function is JUDGE_AS_REWARD:
        judge = judges[resolved.judge]
        if not callable(judge):
            raise UserError(f"{name}: judges.{resolved.judge} is not a reward; name one that uses it")
        return with_arguments(judge, {}, messages=getattr(judge, "takes_messages", False) and resolved.messages)
    own = [argument for argument in arguments_of(function) if argument in judges]
    if resolved.judge and len(own) != 1:
        raise UserError(f"{name}: expected a reward of one judge before @{resolved.judge}, it has {own or 'none'}")
    bound = {argument: judges[resolved.judge or argument] for argument in own}
    return with_arguments(function, resolved.options, bound, messages=resolved.messages)


def judge_named(name: str) -> AbstractContextManager[None]:
    """Convert any error inside to a UserError that names the judge."""

    def describe(error: BaseException) -> BaseException:
        if isinstance(error, UserError | ModuleNotFoundError):
            return error
        return UserError(f"judges.{name}: loading it raised {type(error).__name__}: {one_line(error, 150)}")

    return failures_as(describe)


def _unknown(name: str, source: TaskRewards, where: str) -> str:
    if os.path.isdir(name):
        return (
            f"{short_name(name)} is a folder: a reward model is a judge, --judges.NAME sequence_classification "
            "--judges.NAME.path FOLDER, and NAME is the reward (docs/judges.md)"
        )
    measures = source.eval_defaults if where == "eval_rewards" else ()  # examples of names that follow a pattern
    names = ", ".join(sorted({*source.functions, *measures})) or "no reward of its own"
    return f"expected package.module:function, file.py:function, or of this task {names}; got {name!r}"


def _make_reward(reward: Reward, options: Mapping[str, object], label: str) -> tuple[Reward, Mapping[str, object]]:
    """Return one of the task's rewards and its remaining options; a class consumes them."""
    is_class = inspect.isclass(reward.func if isinstance(reward, functools.partial) else reward)
    check_options(label, reward, options, () if is_class else RESERVED_COLUMNS)
    if not is_class:
        return reward, options
    try:
        return reward(**options), {}
    except (TypeError, ValueError, UserError) as error:
        raise UserError(f"rewards.{label}.options: {error}") from error
