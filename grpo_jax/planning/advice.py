"""What to change in a config whose plan does not fit, tried out rather than guessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_jax.config import Config, MeshSection

_WORTH = 2**26  # bytes: what saves less is not worth a word


class Change(NamedTuple):
    """A config that takes less, and the words of the command line that make it."""

    words: str
    config: Config


class Step(NamedTuple):
    """A way to save memory.

    Attributes:
        part: Whose memory: "policy" or "renderer".
        work: Whether it is activations that it saves, rather than weights and what goes with them.
        change: change(config) → Change, or None where that is done already.
    """

    part: str
    work: bool
    change: Callable[[Config], Change | None]


def steps(cards: int) -> list[Step]:
    """What can be done, in the order in which it is tried: what changes nothing that is learned comes first.

    Args:
        cards: That there are; with three or more the policy may have all but the last.
    """

    def a_prompt_at_a_time(given: Config) -> Change | None:
        prompts = given.training.prompts_per_batch // given.training.minibatches
        return _changed(given, "training", accumulation=max(prompts // given.policy.mesh.fsdp, 1))

    def smaller_group(given: Config) -> Change | None:
        return _changed(given, "sampling", group_size=max(given.sampling.group_size // 2, 2))

    return [
        Step("policy", True, lambda given: _changed(given, "policy", remat="layer")),
        Step("policy", True, a_prompt_at_a_time),
        Step("policy", True, lambda given: _changed(given, "training", chunk_prompts=1)),
        Step("renderer", True, lambda given: _changed(given, "renderer", batch_size=1)),
        Step("renderer", False, lambda given: _changed(given, "renderer", dtype="bfloat16")),
        Step("renderer", False, lambda given: _changed(given, "renderer", use_t5=False)),
        Step("policy", False, _adapters),
        Step("policy", False, _narrow_base),
        Step("policy", True, lambda given: _changed(given, "policy", compute_dtype="bfloat16")),
        Step("policy", False, lambda given: _mesh(given, cards - 1)),
        Step("policy", True, smaller_group),
    ]


def _changed(given: Config, section: str, **fields: Any) -> Change | None:
    before = getattr(given, section)
    fields = {name: value for name, value in fields.items() if getattr(before, name) != value}
    if not fields:
        return None
    after = dataclasses.replace(given, **{section: dataclasses.replace(before, **fields)})
    return Change(" ".join(f"--{section}.{name} {_word(value)}" for name, value in fields.items()), after)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _adapters(given: Config) -> Change | None:
    if given.policy.lora.rank:
        return None
    policy = dataclasses.replace(given.policy, lora=dataclasses.replace(given.policy.lora, rank=16))
    return Change("--policy.lora.rank 16", dataclasses.replace(given, policy=policy))


def _narrow_base(given: Config) -> Change | None:
    return (
        _changed(given, "policy", frozen_dtype="bfloat16", compute_dtype="bfloat16") if given.policy.lora.rank else None
    )


def _mesh(given: Config, parts: int) -> Change | None:
    prompts = given.training.prompts_per_batch // given.training.minibatches
    if given.policy.mesh.size > 1 or parts < 2 or prompts % parts:
        return None
    # A micro-batch must have a prompt for each part.
    training = dataclasses.replace(given.training, accumulation=min(given.training.accumulation, prompts // parts))
    policy = dataclasses.replace(given.policy, mesh=MeshSection(fsdp=parts))
    words = f"--policy.mesh.fsdp {parts}"
    if training != given.training:
        words += f" --training.accumulation {training.accumulation}"
    return Change(words, dataclasses.replace(given, policy=policy, training=training))


class Excess(NamedTuple):
    """How much too much a config takes: bytes over all devices, the parts on full ones, and whether work matters.

    Attributes:
        bytes: 0 if it fits.
        parts: "policy", "renderer" where their device is full.
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
        for step in steps(cards):
            if not left.bytes:
                return words, left
            hopeless = step.part == "policy" and step.work and left.weights
            change = None if hopeless or step.part not in left.parts else step.change(config)
            after = left if change is None else excess(change.config)
            if change is not None and after.bytes < left.bytes - _WORTH:
                words, config, left = [*words, change.words], change.config, after
    return words, left
