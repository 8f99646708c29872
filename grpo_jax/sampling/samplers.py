"""The samplers that a config names: what a run trains and measures with, and what `predict` writes with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.fields import require
from grpo_jax.config.sections import EvaluationSection, SamplingSection
from grpo_jax.core.trie import Trie, text_count
from grpo_jax.errors import UserError, one_line
from grpo_jax.models.hf.tokens import special_ids, token_pieces
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import gather
from grpo_jax.sampling.beams import make_beam_sampler
from grpo_jax.sampling.episodes import EpisodeSampler, make_episode_sampler
from grpo_jax.sampling.ranking import Ranking, make_ranker
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.stopping import stop_table
from grpo_jax.sampling.token_choice import SamplingParams


class Samplers(NamedTuple):
    """What draws completions: those of a group in training; in evaluation a greedy one, and k sampled.

    Functions as of `make_sampler`; for episodes of several turns `EpisodeSampler`s. Where a task lists what may be
    written, `rank` lists the best of it, as of `ranking.make_ranker`; None elsewhere.
    """

    training: Any
    greedy: Any
    sampled: Any
    rank: Callable[..., Ranking] | None = None


def sampling_params(section: SamplingSection, group_size: int, temperature: float) -> SamplingParams:
    """How completions are drawn as a config says; greedy ones (temperature 0) need no restriction."""
    restrict = {"top_k": section.top_k, "top_p": section.top_p, "min_p": section.min_p} if temperature else {}
    return SamplingParams(
        group_size,
        section.max_new_tokens,
        temperature,
        min_new_tokens=section.min_new_tokens,
        repetition_penalty=section.repetition_penalty,
        **restrict,
    )


def measured_section(section: SamplingSection, evaluation: EvaluationSection) -> SamplingSection:
    """How the sampled completions of an evaluation are drawn: k of each prompt, one by one, else as in training."""
    given = {name: getattr(evaluation, name) for name in ("temperature", "top_k", "top_p")}
    own = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(section, group="samples", group_size=evaluation.samples, keep_prompt=0, **own)


def make_samplers(
    section: SamplingSection,
    evaluation: EvaluationSection,
    policy: Policy,
    allowed: np.ndarray | None,
    trie: Trie | None = None,
    *,
    listed: int = 0,
) -> Samplers:
    """The samplers of training and evaluation; what they give lies whole on the host's side of a mesh.

    Args:
        section: How completions are drawn.
        evaluation: How those are drawn that are measured.
        policy: Of `load_policy`.
        allowed: bool [V], the tokens that may be written; None for every token.
        trie: The texts of which each completion is one, where the task lists them.
        listed: How many of them a ranking has; 0 for all, scored exactly.

    Raises:
        UserError: A stop string cannot be told from the policy's tokens.
    """
    ends = named_ends(section, policy.folder, allowed)
    if trie is not None:
        return _over_texts(section, evaluation, policy, trie, ends, listed)

    def sampler(section: SamplingSection, group_size: int, temperature: float) -> Any:
        params = sampling_params(section, group_size, temperature)
        if section.turns == 1:
            return _gathered(make_sampler(policy, params, **ends), policy.mesh)
        begin, go_on = make_episode_sampler(policy, params, **ends)
        return EpisodeSampler(_gathered_turn(begin, policy.mesh), _gathered_turn(go_on, policy.mesh))

    measured = measured_section(section, evaluation)
    return Samplers(
        sampler(section, section.written_completions, section.temperature),
        sampler(section, 1, 0.0),
        sampler(measured, measured.group_size, measured.temperature),
    )


def _over_texts(
    section: SamplingSection, evaluation: EvaluationSection, policy: Any, trie: Trie, ends: dict[str, Any], listed: int
) -> Samplers:
    """Samplers of one text each, where a task lists them."""
    pad_id, most = ends["pad_id"], f"at most {text_count(trie)}, the texts that may be written"
    require(section.turns == 1, "sampling.turns", "1: the task lists what may be written", section.turns)
    few = section.group == "samples" or section.written_completions <= text_count(trie)
    require(few, "sampling.group_size", most, section.group_size)
    require(listed <= text_count(trie), "task.listed", most, listed)

    def sampler(section: SamplingSection, group_size: int, temperature: float) -> Any:
        params = sampling_params(section, group_size, temperature)
        if group_size == 1 or section.group == "samples":
            return _gathered(make_sampler(policy, params, **ends, trie=trie), policy.mesh)
        drawn = section.group == "distinct"
        beams = make_beam_sampler(policy, params, pad_id=pad_id, trie=trie, without_replacement=drawn)
        return _gathered(beams, policy.mesh)

    measured = measured_section(section, evaluation)
    ranked = _gathered(make_ranker(policy, listed, pad_id=pad_id, trie=trie), policy.mesh)
    return Samplers(
        sampler(section, section.written_completions, section.temperature),
        sampler(section, 1, 0.0),
        sampler(measured, measured.group_size, measured.temperature),
        ranked,
    )


def named_ends(section: SamplingSection, loaded: Any, allowed: np.ndarray | None) -> dict[str, Any]:
    """What completions may hold and what ends them: keyword arguments of `make_sampler`."""
    return {
        "eos_ids": loaded.eos_ids,
        "pad_id": loaded.pad_id,
        "allowed_tokens": allowed,
        "stops": stops_of(section.stop, loaded.tokenizer, loaded.config.vocab_size),
    }


def stops_of(stops: list[str], tokenizer: Any, vocab_size: int) -> np.ndarray | None:
    """The `stop_table` of sampling.stop; None without any.

    Args:
        stops: The stop strings.
        tokenizer: The policy's.
        vocab_size: V, the model's.

    Raises:
        UserError: One holds a special token, which no text shows; or the tokenizer's texts are not those of its tokens
            one after another.
    """
    if not stops:
        return None
    marks = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
    for stop in stops:
        held = [mark for mark in marks if mark in stop]
        if held:
            raise UserError(
                f"sampling.stop: {one_line(repr(stop), 60)} holds the special token {held[0]}, which no text shows: "
                "leave it out, or make it an eos_token_id of the policy's folder"
            )
    pieces = token_pieces(tokenizer, vocab_size)
    if pieces is None:
        raise UserError(
            "sampling.stop: expected none, for this policy's tokenizer does not write texts token by token; got "
            f"{one_line(repr(stops), 60)}"
        )
    return stop_table(stops, pieces.first, pieces.later)


def _gathered(sample: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    return lambda *arguments, **shown: gather(sample(*arguments, **shown), mesh)


def _gathered_turn(turn: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """One of an episode sampler's functions: what is carried stays where it is."""

    def gathered(*arguments: Any, **shown: Any) -> Any:
        samples, carried = turn(*arguments, **shown)
        return gather(samples, mesh), carried

    return gathered
