"""Sampling and seeing pictures in all processes; results are whole, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config import Config
from grpo_jax.core.trie import Trie
from grpo_jax.models.sharding import on_host
from grpo_jax.runs.policy import Policy, make_see
from grpo_jax.runs.several.company import Company
from grpo_jax.sampling.episodes import EpisodeSampler
from grpo_jax.sampling.samplers import Samplers, make_samplers


class Brief(NamedTuple):
    """Sampling choices that follow from the data, for all processes.

    `allowed` is bool [V], or None for all; `listed` is the number of `trie`'s texts in a ranking, 0 for all.
    """

    allowed: np.ndarray | None
    trie: Trie | None
    listed: int
    pictures: bool


def led_samplers(config: Config, policy: Policy, brief: Brief, company: Company) -> Samplers:
    """Make the samplers of training and evaluation."""
    samplers = make_samplers(config.sampling, config.evaluation, policy, brief.allowed, brief.trie, listed=brief.listed)
    if company.processes == 1:
        return samplers
    return Samplers(*(_led(name, sampler, company) for name, sampler in samplers._asdict().items()))


def _led(name: str, sampler: Any, company: Company) -> Any:
    if sampler is None:
        return None
    if isinstance(sampler, EpisodeSampler):
        return EpisodeSampler(*(_led_turn(f"{name}/{turn}", one, company) for turn, one in sampler._asdict().items()))
    return company.lead(name, lambda *given, **shown: on_host(sampler(*given, **shown)))


def _led_turn(name: str, write: Callable[..., Any], company: Company) -> Callable[..., Any]:
    def turn(*given: Any, **shown: Any) -> Any:
        samples, carried = write(*given, **shown)
        return on_host(samples), carried

    return company.lead(name, turn)


def led_see(policy: Policy, brief: Brief, company: Company) -> Callable[..., Any] | None:
    """Make the function that encodes the prompts' pictures (`runs.policy.See`); None where no prompt has any."""
    if not brief.pictures:
        return None
    see = make_see(policy)
    if company.processes == 1:
        return see
    return company.lead("see", lambda variables, pictures: on_host(see(variables, pictures)))
