"""The rewards and watched measures that a config names: found and checked before any judge or weight is loaded."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config import Config, RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.rewards import Reward, check_options, load_reward, with_options
from grpo_jax.tasks.prompt_enhancement import rewards as image_rewards

DEFAULT_REWARDS = (RewardSection("alignment"), RewardSection("faithfulness", 0.5), RewardSection("length", 0.2))

Judges = Callable[[str], Any]
"""judges(name) → what a built-in reward takes from them: "scorer", "head", "count_tokens", "window"."""

Make = Callable[[Judges], Reward]

_BUILT_IN: dict[str, Callable[..., Reward]] = {
    "alignment": image_rewards.alignment,
    "alignment_gain": image_rewards.alignment_gain,
    "faithfulness": image_rewards.faithfulness,
    "length": image_rewards.length,
    "quality": image_rewards.quality,
}
_UNLOADED = {"scorer": None, "head": None, "count_tokens": None, "window": 2**31}


class Chosen(NamedTuple):
    """What judges the completions of a run.

    Attributes:
        sections: The rewards, every condition said.
        rewards: make(judges) → reward, for each of them.
        watch_names: Measures that are logged beside them.
        watch: make(judges) → measure, for each of them.
    """

    sections: tuple[RewardSection, ...]
    rewards: tuple[Make, ...]
    watch_names: tuple[str, ...]
    watch: tuple[Make, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What metrics call the rewards."""
        return tuple(section.label for section in self.sections)

    def describe(self) -> str:
        """Name, weight and condition of each reward."""
        return ", ".join(_describe(section) for section in self.sections)


def choose(
    config: Config, prompt_set: Any, given: Mapping[str, Reward], bridges: Callable[[], Callable[[str], Any]]
) -> Chosen:
    """The rewards of a task that judges texts or pictures.

    Args:
        config: The run.
        prompt_set: The data.
        given: Functions in place of what the config names, by label.
        bridges: Imports the bridges package; called for the miniature's checker alone.

    Raises:
        UserError: A name is unknown, a function is not found, or an option is not one of it.
    """
    sections = tuple(config.rewards)
    if not sections and config.task == "text":
        raise UserError("rewards: a text task needs at least one, such as my_rewards.py:function")
    sections = resolve_conditions(sections or DEFAULT_REWARDS)
    rewards = tuple(_make(section, config, given) for section in sections)
    watch = [
        _pixels(prompt_set, bridges) if name == "pixel_accuracy" else _make(RewardSection(name), config, {})
        for name in config.watch
    ]
    return Chosen(sections, rewards, tuple(config.watch), tuple(watch))


def ready(reward: Reward) -> Make:
    """A reward that needs no judge."""
    return lambda _: reward


def own_reward(section: RewardSection, given: Mapping[str, Reward]) -> Reward | None:
    """The user's own reward, given in Python or named by import path, its options fixed; None for a built-in one."""
    if section.label not in given and ":" not in section.name:
        return None
    function = given[section.label] if section.label in given else load_reward(section.name)
    return with_options(function, section.label, section.options)


def resolve_conditions(sections: Sequence[RewardSection]) -> tuple[RewardSection, ...]:
    """The sections with every condition said: a reward's default one filled in, "none" as no condition.

    Raises:
        UserError: A reward that must not be earned alone (quality) has nothing to be conditioned on.
    """
    names = [section.name for section in sections]
    resolved = []
    for section in sections:
        if section.condition_on == "none":
            section = dataclasses.replace(section, condition_on=None)
        elif section.condition_on is None and section.name == "quality":
            condition = image_rewards.default_condition(section.name, names)
            if condition is None:
                raise UserError(
                    "rewards.quality: a pretty picture of something else would earn it; list alignment or "
                    "alignment_gain among the rewards, or say condition_on: none"
                )
            section = dataclasses.replace(section, condition_on=condition[0], threshold=condition[1])
        resolved.append(section)
    return tuple(resolved)


def _make(section: RewardSection, config: Config, given: Mapping[str, Reward]) -> Make:
    own = own_reward(section, given)
    if own is not None:
        return ready(own)
    name, options = section.name, section.options
    if config.task == "text":
        raise UserError(f"rewards.{name}: a text task takes rewards by import path, as package.module:function")
    if name not in _BUILT_IN:
        raise UserError(
            f"rewards.name: expected {', '.join(_BUILT_IN)}, package.module:function or file.py:function, got {name!r}"
        )
    build, head = _BUILT_IN[name], config.scorer.quality_head
    if name == "quality" and (head is None or not Path(head).is_file()):
        raise UserError(
            f"rewards.quality: expected scorer.quality_head to name a safetensors file, got {head or 'none'}"
        )
    check_options(name, build, options, _UNLOADED)
    wanted = [argument for argument in inspect.signature(build).parameters if argument in _UNLOADED]
    try:
        build(**{argument: _UNLOADED[argument] for argument in wanted}, **options)  # bad values speak up now
    except (TypeError, ValueError) as error:
        raise UserError(f"rewards.{name}.options: {error}") from error
    return lambda judges: build(**{argument: judges(argument) for argument in wanted}, **options)


def _pixels(prompt_set: Any, bridges: Callable[[], Callable[[str], Any]]) -> Make:
    if any("requested" not in row.columns for row in prompt_set.train[:1]):
        raise UserError('watch.pixel_accuracy: expected the miniature\'s prompts (data.prompts "miniature")')
    return ready(image_rewards.pixel_accuracy(bridges()("miniature.world").pixel_accuracy))


def _describe(section: RewardSection) -> str:
    condition = f" where {section.condition_on} ≥ {section.threshold:g}" if section.condition_on else ""
    return f"{section.label} × {section.weight:g}{condition}"
