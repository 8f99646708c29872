"""What to change in a config whose plan does not fit, tried out rather than guessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from grpo_jax.config.policy import MeshSection
from grpo_jax.config.run import POLICY, Config

_WORTH = 2**26  # bytes: what saves less is not worth a word


class Change(NamedTuple):
    """A config that takes less, and the words of the command line that make it."""

    words: str
    config: Config


class Step(NamedTuple):
    """A way to save memory.

    Attributes:
        part: Whose memory: "policy", or a judge's name.
        work: Whether it is activations that it saves, rather than weights and what goes with them.
        change: change(config) → Change, or None where that is done already.
    """

    part: str
    work: bool
    change: Callable[[Config], Change | None]


def steps(config: Config, cards: int) -> list[Step]:
    """What can be done, in the order in which it is tried: what changes nothing that is learned comes first.

    Args:
        config: Its judges say themselves what can be saved (`savings`).
        cards: That there are; with three or more the policy may have all but the last.
    """

    def a_prompt_at_a_time(config: Config) -> Change | None:
        prompts = config.training.prompts_per_batch // config.training.minibatches
        return _changed(config, "training", accumulation=max(prompts // config.policy.mesh.fsdp, 1))

    def smaller_group(config: Config) -> Change | None:
        return _changed(config, "sampling", group_size=max(config.sampling.group_size // 2, 2))

    return [
        Step(POLICY, True, lambda config: _changed(config, "policy", remat="layer")),
        Step(POLICY, True, a_prompt_at_a_time),
        Step(POLICY, True, lambda config: _changed(config, "training", chunk_prompts=1)),
        *(
            Step(name, False, partial(_judge_changed, name, fields))
            for name, judge in config.judges.items()
            for fields in getattr(judge, "savings", list)()
        ),
        Step(POLICY, False, _adapters),
        Step(POLICY, False, _narrow_base),
        Step(POLICY, True, lambda config: _changed(config, "policy", compute_dtype="bfloat16")),
        Step(POLICY, False, lambda config: _mesh(config, cards - 1)),
        Step(POLICY, True, smaller_group),
    ]


def _changed(config: Config, section: str, **fields: Any) -> Change | None:
    before = getattr(config, section)
    fields = {name: value for name, value in fields.items() if getattr(before, name) != value}
    if not fields:
        return None
    after = dataclasses.replace(config, **{section: dataclasses.replace(before, **fields)})
    return Change(" ".join(f"--{section}.{name} {_word(value)}" for name, value in fields.items()), after)


def _judge_changed(name: str, fields: dict[str, Any], config: Config) -> Change | None:
    before = config.judges[name]
    fields = {field: value for field, value in fields.items() if getattr(before, field) != value}
    if not fields:
        return None
    judges = {**config.judges, name: dataclasses.replace(before, **fields)}
    words = " ".join(f"--judges.{name}.{field} {_word(value)}" for field, value in fields.items())
    return Change(words, dataclasses.replace(config, judges=judges))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _adapters(config: Config) -> Change | None:
    if config.policy.lora.used:
        return None
    policy = dataclasses.replace(config.policy, lora=dataclasses.replace(config.policy.lora, rank=16))
    return Change("--policy.lora.rank 16", dataclasses.replace(config, policy=policy))


def _narrow_base(config: Config) -> Change | None:
    return (
        _changed(config, "policy", frozen_dtype="bfloat16", compute_dtype="bfloat16")
        if config.policy.lora.used
        else None
    )


def _mesh(config: Config, parts: int) -> Change | None:
    prompts = config.training.prompts_per_batch // config.training.minibatches
    if config.policy.mesh.size > 1 or parts < 2 or prompts % parts:
        return None
    # A micro-batch must have a prompt for each part.
    training = dataclasses.replace(config.training, accumulation=min(config.training.accumulation, prompts // parts))
    policy = dataclasses.replace(config.policy, mesh=MeshSection(fsdp=parts))
    words = f"--policy.mesh.fsdp {parts}"
    if training != config.training:
        words += f" --training.accumulation {training.accumulation}"
    return Change(words, dataclasses.replace(config, policy=policy, training=training))


class Excess(NamedTuple):
    """How much too much a config takes: bytes over all devices, the parts on full ones, and whether work matters.

    Attributes:
        bytes: 0 if it fits.
        parts: "policy" and judges whose device is full.
        weights: Whether the policy's weights alone are too much, so that saving activations cannot help.
    """

    bytes: int
    parts: frozenset[str]
    weights: bool


def changes_that_fit(config: Config, cards: int, excess: Callable[[Config], Excess]) -> tuple[list[str], Excess]:
    """Changes, one on top of the other, until everything fits or nothing more helps.

    Args:
        config: That does not fit.
        cards: Devices that there are.
        excess: Of a config.

    Returns:
        The changes' words, and the excess that is left.
    """
    words: list[str] = []
    left = excess(config)
    for _ in range(2):  # what could not help before the weights fitted may help now
        for step in steps(config, cards):
            if not left.bytes:
                return words, left
            hopeless = step.part == POLICY and step.work and left.weights
            change = None if hopeless or step.part not in left.parts else step.change(config)
            after = left if change is None else excess(change.config)
            if change is not None and after.bytes < left.bytes - _WORTH:
                words, config, left = [*words, change.words], change.config, after
    return words, left
