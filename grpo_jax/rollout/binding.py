"""The rewards that a config names, found before anything heavy is loaded, and given the judges they ask for later."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_jax.config.build import require_known
from grpo_jax.config.named import load_object
from grpo_jax.config.sections import RewardSection
from grpo_jax.core.advantages import Condition
from grpo_jax.errors import UserError, is_own_doing, one_line, said
from grpo_jax.rollout.isolated import isolate
from grpo_jax.rollout.rewards import IN_PYTHON, PICTURES, Maker, Reward, check_options, with_messages, with_options
from grpo_jax.rollout.trainer import LOG, Trainer


@dataclasses.dataclass(frozen=True)
class TaskRewards:
    """The rewards that a task has of its own, beside those named by import path.

    Attributes:
        functions: By the name that `rewards` and `watch` of the config use: a reward function, which gets a reward's
            options as keyword arguments, or what makes one of them (a class, a `Maker`). A judge is given to a reward
            that has an argument of its name, as columns are.
        defaults: Where the config names none.
        watched: Names that are watched where the config names none.
        always_watched: Names among `functions` that are watched in every run, last.
        measures: name → a reward that is only watched, for names that follow a pattern (NAME@K); None for others.
        columns: (completions, columns) → further columns for the rewards, asked once for all of them.
        adapt: Makes a reward function of the user's own fit the task's.
        conditions: Fills in conditions that rewards have by default: reward sections → reward sections.
    """

    functions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Sequence[RewardSection] = ()
    watched: Sequence[str] = ()
    always_watched: tuple[str, ...] = ()
    measures: Callable[[str], Reward | None] = lambda name: None
    columns: Callable[[Sequence[str], Mapping[str, Any]], dict[str, Any]] | None = None
    adapt: Callable[[Reward], Reward] = lambda reward: reward
    conditions: Callable[[Sequence[RewardSection]], Sequence[RewardSection]] = lambda sections: sections


class Wanted(NamedTuple):
    """A reward that was found, and the judge that it is to ask in place of its own ("" for its own)."""

    name: str
    reward: Reward
    judge: str


def itself(**columns: Any) -> Any:
    """Stands for a judge that is a reward: a reward model, or whatever else `load` gives that can be called as one."""
    raise NotImplementedError("it is bound to a judge first")


class Rewards(NamedTuple):
    """What a run maximises, and what it only watches.

    Attributes:
        sections: N rewards as configured, their conditions resolved.
        maximised: A function for each.
        watched: W measures.
        watch: Their names as configured: of an import path all of it.
    """

    sections: tuple[RewardSection, ...]
    maximised: tuple[Wanted, ...]
    watched: tuple[Wanted, ...]
    watch: tuple[str, ...]

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward by name, in order."""
        return {section.called: section.weight for section in self.sections}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions between rewards, by index."""
        index = {section.called: position for position, section in enumerate(self.sections)}
        return tuple(
            Condition(index[section.called], index[section.condition_on], section.threshold)
            for section in self.sections
            if section.condition_on is not None
        )

    @property
    def asked(self) -> frozenset[str]:
        """Names of the arguments that they have."""
        return frozenset(name for one in (*self.maximised, *self.watched) for name in _arguments(one.reward))

    def describe(self) -> str:
        """Name, weight and condition of each."""
        return ", ".join(map(_described, self.sections))


def find_rewards(
    sections: Sequence[RewardSection],
    watch: Sequence[str],
    source: TaskRewards,
    judges: Sequence[str],
    functions: Mapping[str, Reward] = MappingProxyType({}),
    *,
    timeout: float | None = None,
    trainer: Trainer | None = None,
    drawn: bool = False,
) -> Rewards:
    """Finds the rewards of a config and binds their options.

    Args:
        sections: As configured.
        watch: Names that are watched.
        source: The task's own rewards.
        judges: Names of the judges there are.
        functions: By label, in place of what sections name.
        timeout: Seconds that one call of an isolated reward may take.
        trainer: What those ask that name `trainer_state` or `log_metric`.
        drawn: Whether pictures are made of completions, which an isolated reward cannot get.

    Raises:
        UserError: A reward, judge or option that does not exist, or one that cannot be isolated.
    """
    sections = source.conditions(sections or source.defaults)
    if not sections:
        raise UserError("rewards: expected at least one, such as my_rewards.py:function")
    trainer = trainer or Trainer()
    found = [_maximised(section, functions, source, judges, timeout, trainer, drawn) for section in sections]
    names = (*(watch or source.watched), *source.always_watched)
    resolved = tuple(_without_none(section) for section in sections)
    watched = [_find(name, {}, source, judges, trainer, "watch") for name in names]
    return Rewards(resolved, tuple(found), tuple(watched), names)


def bind(wanted: Wanted, judges: Mapping[str, Any]) -> Reward:
    """The reward with the judges that it names as arguments, or the judge that is one.

    Raises:
        UserError: The judge is no reward, or the reward asks none in whose place another could be.
    """
    if wanted.reward is itself:
        judge = judges[wanted.judge]
        if not callable(judge):
            raise UserError(f"{wanted.name}: judges.{wanted.judge} is no reward by itself; name one that asks it")
        return judge
    own = [name for name in _arguments(wanted.reward) if name in judges]
    if not wanted.judge:
        bound = {name: judges[name] for name in own}
    elif len(own) == 1:
        bound = {own[0]: judges[wanted.judge]}
    else:
        raise UserError(f"{wanted.name}: expected a reward of one judge before @{wanted.judge}, it has {own or 'none'}")
    return functools.partial(wanted.reward, **bound) if bound else wanted.reward


@contextmanager
def judge_named(name: str) -> Iterator[None]:
    """Whatever a judge raises inside, as it is checked or loaded, names it.

    Raises:
        UserError: In place of what it raised.
    """
    try:
        yield
    except (UserError, ModuleNotFoundError):
        raise
    except BaseException as error:
        if not is_own_doing(error):
            raise
        raise UserError(f"judges.{name}: loading it raised {type(error).__name__}: {one_line(error, 150)}") from error


def _maximised(
    section: RewardSection,
    functions: Mapping[str, Reward],
    source: TaskRewards,
    judges: Sequence[str],
    timeout: float | None,
    trainer: Trainer,
    drawn: bool,
) -> Wanted:
    if section.isolated:
        reward = _isolated(section, judges, timeout, drawn=drawn)
    elif section.called in functions:
        reward = functions[section.called]
    else:
        found = _find(section.name, section.options, source, judges, trainer, "rewards")
        if section.messages and ":" not in section.name:
            where, expected = f"rewards.{section.called}.messages", "false, the task's own rewards take texts"
            raise UserError(f"{where}: expected {expected}; got true")
        reward = with_messages(found.reward) if section.messages else found.reward
        return found._replace(name=section.called, reward=reward)
    reward = source.adapt(with_options(_told(reward, trainer), section.called, section.options))
    return Wanted(section.called, with_messages(reward) if section.messages else reward, "")


def _told(reward: Reward, trainer: Trainer) -> Reward:
    """The reward with what it asks of the run."""
    return trainer.told(reward, _arguments(reward))


def _isolated(section: RewardSection, judges: Sequence[str], timeout: float | None, *, drawn: bool) -> Reward:
    """A user's reward in a process of its own, where nothing of the run is but texts and columns."""
    where, (place, _, label) = f"rewards.{section.called}.isolated", section.name.rpartition(":")
    if not place:
        raise UserError(
            f"{where}: expected package.module:function or file.py:function; {label} is the task's own and stays in "
            "the run's process"
        )
    if place == IN_PYTHON:
        raise UserError(
            f"{where}: run() was given {label} in Python and a process of its own cannot import it: keep it at the "
            "top level of a module, under this name"
        )
    reward = isolate(section.name, timeout)
    stays = (*judges, LOG, *(PICTURES if drawn else ()))
    here = [name for name in _arguments(reward) if name in stays]
    if here:
        raise UserError(f"{where}: {label} asks for {', '.join(here)}, which stay in the run's process: leave it false")
    return reward


def _find(
    name: str, options: Mapping[str, Any], source: TaskRewards, judges: Sequence[str], trainer: Trainer, where: str
) -> Wanted:
    """A reward by import path, of the source, or of the source with another judge."""
    place, _, label = name.rpartition(":")
    if place == IN_PYTHON:
        raise UserError(
            f"reward {label}: run() was given this function in Python and nothing here can import it: call "
            f"run(config, rewards=[{label}]) again (with resume=True to go on or to measure), or keep it in a module"
        )
    if place:
        reward = load_object(name, "reward")
        if not callable(reward):
            raise UserError(f"reward {name!r}: {label} is a {type(reward).__name__}, not a function")
        return Wanted(label, source.adapt(with_options(_told(reward, trainer), label, options)), "")
    base, _, judge = name.partition("@")
    if name in source.functions:
        base, judge = name, ""
    elif (measured := source.measures(name)) is not None and where == "watch":
        return Wanted(name, measured, "")
    if name in judges:
        check_options(name, itself, options, ())
        return Wanted(name, itself, name)
    if base not in source.functions or (judge and not judges):
        _refuse(name, source, where)
    if judge:
        require_known(judge, judges, f"{where}.{name}: judges")
    return Wanted(name, _told(_own(source.functions[base], options, name), trainer), judge)


def _refuse(name: str, source: TaskRewards, where: str) -> None:
    if os.path.isdir(name):
        raise UserError(
            f"{where}: {said(name)} is a folder: a reward model is a judge, --judges.NAME sequence_classification "
            "--judges.NAME.path FOLDER, and NAME is the reward (docs/judges.md)"
        )
    measures = source.watched if where == "watch" else ()  # of those that follow a pattern, examples
    known = ", ".join(sorted({*source.functions, *measures})) or "no reward of its own"
    raise UserError(
        f"{where}: expected package.module:function, file.py:function, or of this task {known}; got {name!r}"
    )


def _own(reward: Any, options: Mapping[str, Any], label: str) -> Reward:
    """One of the source's rewards with its options, or what its maker makes of them."""
    make: Any = reward
    if isinstance(reward, Maker):
        make = reward.make
    elif inspect.isclass(reward):
        check_options(label, reward, options, ())
    else:
        return with_options(reward, label, options)
    try:
        return make(**options)
    except (TypeError, ValueError, UserError) as error:
        raise UserError(f"rewards.{label}.options: {error}") from error


def _arguments(reward: Reward) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in _parameters(reward).items() if parameter.kind in kinds]


def _parameters(reward: Reward) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(reward).parameters
    except (TypeError, ValueError):  # of a builtin
        return {}


def _without_none(section: RewardSection) -> RewardSection:
    return dataclasses.replace(section, condition_on=None) if section.condition_on == "none" else section


def _described(section: RewardSection) -> str:
    condition = f" where {section.condition_on} ≥ {section.threshold:g}" if section.condition_on else ""
    return f"{section.called} × {section.weight:g}{condition}"
