"""Penalised repetitions and forbidden early ends act on what is drawn alone, as transformers' processors do."""

import jax
import numpy as np
import pytest
import torch
from support.tiny_decoders import tiny
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.sampling.episodes import make_episode_sampler
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams

PAD, ENDS = 0, (3, 7, 8, 9, 20, 21, 22)
PENALTY, FEWEST, TEMPERATURE = 1.7, 4, 1.3
PROMPTS = np.array([[0, 0, 9, 10, 11], [0, 0, 0, 12, 13], [14, 15, 16, 17, 18]], np.int32)
KEYS = jax.random.split(jax.random.key(5), len(PROMPTS))
ALLOWED = np.arange(64) != 30


def params(temperature=TEMPERATURE, **changes):
    steered = {"min_new_tokens": FEWEST, "repetition_penalty": PENALTY} | changes
    return SamplingParams(4, 12, temperature, **steered)


def make(make_one, params):
    return make_one(tiny("llama").policy, params, eos_ids=ENDS, pad_id=PAD, allowed_tokens=ALLOWED)


def states(tokens, present):
    """The policy's logits before each token, [P, G, T, V], and log-probabilities [P, G, T] of the trained one."""
    model = tiny("llama")
    hidden = model.policy.forward_group(model.variables, PROMPTS, PROMPTS > 0, tokens, present)
    head = model.policy.head(model.variables)
    logprobs, _ = token_logprobs(hidden, head, tokens, temperature=TEMPERATURE, allowed_tokens=ALLOWED)
    logits = np.where(ALLOWED, np.asarray(hidden) @ np.asarray(head).T, -np.inf)
    return logits, np.asarray(logprobs)


def processed(logits, read, begun):
    """What transformers makes of one row's logits [V] behind the tokens `read`, the first `begun` of them given."""
    scores, ids = torch.tensor(logits)[None], torch.tensor(read)[None]
    scores = RepetitionPenaltyLogitsProcessor(PENALTY)(ids, scores)
    return MinNewTokensLengthLogitsProcessor(int(begun), FEWEST, list(ENDS))(ids, scores)[0].numpy()


def check(samples, tokens, present, before):
    """Of each written token the policy's log-probability, and the sampler's by transformers' processors.

    `before` int [P, G] counts the tokens of the stream in front of the turn that `samples` are.
    """
    logits, logprobs = states(tokens, present)
    mask, penalised = np.asarray(samples.mask), 0
    for p, g in np.ndindex(mask.shape[:2]):
        prompt, skip = PROMPTS[p][PROMPTS[p] > 0], before[p, g]
        for step in range(mask[p, g].sum()):
            at = skip + step
            read = [*prompt, *tokens[p, g, :at]]
            scores = processed(logits[p, g, at], read, len(prompt) + skip) / TEMPERATURE
            token = tokens[p, g, at]
            expected = scores[token] - np.logaddexp.reduce(scores)
            assert samples.sampler_logprobs[p, g, step] == pytest.approx(expected, abs=2e-4)
            assert samples.logprobs[p, g, step] == pytest.approx(logprobs[p, g, at], abs=1e-4)
            penalised += token in read
    assert penalised > 3 and (mask.sum(-1) >= FEWEST).all() and (mask.sum(-1) < 12).any()


def test_the_sampler_draws_from_the_penalised_and_the_policys_log_probability_stays_its_own():
    samples = jax.device_get(make(make_sampler, params())(tiny("llama").variables, PROMPTS, PROMPTS > 0, KEYS))
    check(samples, samples.tokens, samples.mask, np.zeros((3, 4), int))


def test_later_turns_remember_what_was_written_and_said():
    model = tiny("llama")
    play = make(make_episode_sampler, params())
    first, carried = jax.device_get(play.begin(model.variables, PROMPTS, PROMPTS > 0, KEYS))
    rng = np.random.default_rng(0)
    heard = np.arange(6) < rng.integers(1, 7, (3, 4))[..., None]
    said = np.where(heard, rng.integers(30, 60, heard.shape), PAD).astype(np.int32)
    again = jax.random.split(jax.random.key(6), 3)
    second = jax.device_get(play.go_on(model.variables, carried, said, heard, again, np.ones((3, 4), bool))[0])
    parts = [(first.tokens, first.mask), (said, heard), (second.tokens, second.mask)]
    tokens, present = (np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True))
    order = np.argsort(~present, axis=-1, kind="stable")
    tokens, present = (np.take_along_axis(array, order, axis=-1) for array in (tokens, present))
    check(second, tokens, present, first.mask.sum(-1) + heard.sum(-1))


def test_greedy_completions_take_the_likeliest_of_what_is_left():
    greedy = make(make_sampler, params(temperature=0.0))
    samples = jax.device_get(greedy(tiny("llama").variables, PROMPTS, PROMPTS > 0, KEYS))
    logits, _ = states(samples.tokens, samples.mask)
    for p, written in enumerate(samples.mask[:, 0].sum(-1)):
        prompt = PROMPTS[p][PROMPTS[p] > 0]
        for step in range(written):
            row = samples.tokens[p, 0]
            scores = processed(logits[p, 0, step], [*prompt, *row[:step]], len(prompt))
            assert row[step] == scores.argmax()


def test_a_sampler_that_can_write_nothing_is_refused():
    only_ends = np.isin(np.arange(64), ENDS)
    sample = make_sampler(tiny("llama").policy, params(), eos_ids=ENDS, pad_id=PAD, allowed_tokens=only_ends)
    with pytest.raises(ValueError, match="min_new_tokens must be 0 where only"):
        sample(tiny("llama").variables, PROMPTS, PROMPTS > 0, KEYS)
    for wrong in ({"min_new_tokens": 13}, {"repetition_penalty": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            params(**wrong)
