"""The sampler against NumPy loops: distributions, ends, buckets, random numbers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from grpo_jax.sampling.decoding import Samples
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams, choose_tokens

VOCABULARY = 300  # more than two blocks of the two-level draw, and no multiple of one
PAD, EOS = 0, 1


@functools.partial(jax.jit, static_argnums=2)
def choose(rows, keys, params):
    """`choose_tokens` for logits [R, V]."""
    return choose_tokens(rows.T, keys, params)


class BigramPrefix(NamedTuple):
    hidden: jax.Array


class Bigram:
    """A policy whose next-token logits are a row of a table: what it should write is known exactly."""

    def __init__(self):
        self.traces = 0

    def prefill(self, variables, tokens, mask):
        self.traces += 1
        return BigramPrefix(jax.nn.one_hot(tokens[:, -1], variables["table"].shape[0]))

    def unstack(self, variables):
        return variables

    def decode_step(self, variables, prefix, tokens, cache):
        return jax.nn.one_hot(tokens, variables["table"].shape[0]), cache + 1

    def init_cache(self, prompts, group, length, dtype=None):
        return jnp.int32(0)

    def head(self, variables):
        return variables["table"].T

    def logits(self, subscripts, *operands):
        return jnp.einsum(subscripts, *operands)


class Counted(Bigram):
    """Remembers how many prompts each step decodes; what calls back is compiled anew by each process."""

    def __init__(self):
        super().__init__()
        self.decoded, self.compiled = [], 0

    def decode_step(self, variables, prefix, tokens, cache):
        self.compiled += 1
        jax.debug.callback(lambda count=len(tokens): self.decoded.append(count))
        return super().decode_step(variables, prefix, tokens, cache)


def table(seed=0, vocabulary=VOCABULARY, spread=2.0):
    return {"table": np.random.default_rng(seed).normal(0, spread, (vocabulary,) * 2).astype(np.float32)}


def prompts(last_tokens, length=3):
    tokens = np.full((len(last_tokens), length), 2, np.int32)
    tokens[:, -1] = last_tokens
    return tokens, np.ones(tokens.shape, bool)


@jax.jit
def folded(prompt_ids, seed):
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(prompt_ids)


def keys_for(prompt_ids, seed=0):
    return folded(np.array(prompt_ids), seed)


def restricted(logits, params, allowed=None):
    """The oracle: sort, cut and normalise one row in float64. Returns (policy, sampler) probabilities."""
    logits = np.asarray(logits, np.float64) / (params.temperature or 1.0)
    if allowed is not None:
        logits = np.where(allowed, logits, -np.inf)
    policy = np.exp(logits - logits.max())
    policy /= policy.sum()
    order = np.argsort(-policy, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    share = policy[kept] / policy[kept].sum()
    kept = kept[: 1 + int(np.sum(np.cumsum(share) < params.top_p))] if params.top_p < 1 else kept
    kept = [i for i in kept if policy[i] >= params.min_p * policy.max()]
    sampler = np.zeros_like(policy)
    sampler[kept] = policy[kept] / policy[kept].sum()
    return policy, sampler


def chi_square(tokens, probabilities):
    """p-value of the counts; tokens expected fewer than five times are put together."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    assert not counts[probabilities == 0].any()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 1e-9:
        observed, expected = observed[:-1], expected[:-1]
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


ALLOWED = np.arange(VOCABULARY) % 3 != 0


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, None),
        ({"top_k": 50, "top_p": 0.7, "min_p": 0.02, "temperature": 1.2}, ALLOWED),
        pytest.param({"top_p": 0.9, "min_p": 0.02, "temperature": 0.8}, ALLOWED, marks=pytest.mark.wide),
    ],
)
def test_frequencies_and_logprobs_match_the_softmax(settings, allowed):
    params = SamplingParams(group_size=20_000, max_new_tokens=1, **settings)
    variables = table()
    sample = make_sampler(Bigram(), params, eos_ids=(EOS,), pad_id=PAD, allowed_tokens=allowed)
    samples = sample(variables, *prompts([7]), keys_for([3]))
    tokens = np.asarray(samples.tokens)[0, :, 0]
    policy, sampler = restricted(variables["table"][7], params, allowed)
    assert chi_square(tokens, sampler) > 1e-3
    # The same counts must be refused when a wrong distribution is expected, or the test has no power.
    wrong = np.where(sampler > 0, sampler**1.1, 0)
    assert chi_square(tokens, wrong / wrong.sum()) < 1e-3
    np.testing.assert_allclose(samples.logprobs[0, :, 0], np.log(policy[tokens]), atol=1e-5)
    np.testing.assert_allclose(samples.sampler_logprobs[0, :, 0], np.log(sampler[tokens]), atol=1e-5)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.999])
def test_top_p_without_sorting_keeps_the_tokens_that_sorting_keeps(top_p):
    rows = np.random.default_rng(1).normal(0, 3, (40, VOCABULARY)).astype(np.float32)
    params = SamplingParams(1, 1, top_p=top_p)
    choice = choose(rows, keys_for(range(40)), params)
    for row, token, logprob in zip(rows, *jax.device_get((choice.tokens, choice.sampler_logprobs)), strict=True):
        _, sampler = restricted(row, params)
        assert sampler[token] > 0
        np.testing.assert_allclose(logprob, np.log(sampler[token]), atol=1e-5)


def test_top_p_keeps_ties_together_and_one_token_at_least():
    logits = np.log(np.float32([[0.2, 0.4, 0.2, 0.2], [0.9, 0.04, 0.03, 0.03]]))
    keys = jax.random.split(jax.random.key(0), (200, 2))
    draws = jax.device_get(jax.vmap(lambda k: choose(logits, k, SamplingParams(1, 1, top_p=0.5)))(keys))
    assert set(np.unique(draws.tokens[:, 0])) == {0, 1, 2, 3}
    assert set(np.unique(draws.tokens[:, 1])) == {0}
    np.testing.assert_array_equal(draws.sampler_logprobs[:, 1], 0)


def test_tokens_of_zero_probability_are_never_drawn():
    logits = np.full((4000, 257), -np.inf, np.float32)
    logits[:, 128], logits[:, 256] = 0, -1
    choice = choose(logits, jax.random.split(jax.random.key(0), 4000), SamplingParams(1, 1))
    assert set(np.unique(choice.tokens)) == {128, 256}
    assert np.isfinite(choice.logprobs).all()


def test_what_comes_after_any_of_several_ends_is_padding():
    # A wrong sampler honours the first id only, or leaves the end itself out of the mask.
    ends = (EOS, 4, 250)
    params = SamplingParams(group_size=16, max_new_tokens=12)
    variables = table(seed=3, spread=1.0)
    variables["table"][:, list(ends)] += 3
    sample = make_sampler(Bigram(), params, eos_ids=ends, pad_id=PAD)
    samples = jax.tree.map(np.asarray, sample(variables, *prompts([5, 9, 11]), keys_for([0, 1, 2])))
    seen = set()
    for tokens, mask, logprobs, sampler, truncated in zip(
        *(x.reshape(48, *x.shape[2:]) for x in samples[:5]), strict=True
    ):
        where = [t for t, token in enumerate(tokens[mask]) if token in ends]
        assert mask.sum() == (where[0] + 1 if where else 12)
        assert mask[: mask.sum()].all()
        assert truncated == (not where)
        assert (tokens[~mask] == PAD).all() and (logprobs[~mask] == 0).all() and (sampler[~mask] == 0).all()
        assert (logprobs[mask] < 0).all()
        seen |= {int(tokens[t]) for t in where}
    assert seen == set(ends)
    assert 0 < samples.truncated.sum() < 48


def test_decoding_stops_when_every_completion_has_ended():
    policy = Counted()
    variables = {"table": np.float32(50) * np.tile(np.arange(8) == EOS, (8, 1))}
    sample = make_sampler(policy, SamplingParams(4, 100), eos_ids=(EOS,), pad_id=PAD)
    samples = sample(variables, *prompts([3] * 9), keys_for(range(9)))  # 9 prompts: one row of the bucket is padding
    jax.effects_barrier()
    np.testing.assert_array_equal(np.asarray(samples.mask).sum(-1), 1)
    assert policy.decoded == []
    assert policy.compiled == 1  # neither for a larger cache nor for fewer rows


def test_rows_leave_the_batch_as_completions_end():
    """Decode all 32 rows, a quarter once at most 8 continue, and a sixteenth once at most 2 continue."""
    logits = np.full((VOCABULARY, VOCABULARY), -100, np.float32)
    logits[np.arange(VOCABULARY), np.maximum(np.arange(VOCABULARY) - 1, EOS)] = 0  # counts down to the end
    policy = Counted()
    sample = make_sampler(policy, SamplingParams(2, 70), eos_ids=(EOS,), pad_id=PAD)
    lengths = [20, 60, *[5] * 12, 90, 45]
    given, variables = (*prompts(np.array(lengths) + 1), keys_for(range(16))), {"table": logits}
    samples = sample(variables, *given)
    jax.effects_barrier()
    np.testing.assert_array_equal(np.asarray(samples.mask).sum(-1), [[min(n, 70)] * 2 for n in lengths])
    np.testing.assert_array_equal(samples.truncated, [[n > 70] * 2 for n in lengths])
    assert policy.decoded == [32 // 2] * 4 + [8] * 55 + [2] * 10  # the first token of each comes from the prompt
    jax.tree.map(np.testing.assert_array_equal, samples, jax.jit(lambda tree: sample(tree, *given))(variables))


def test_random_numbers_do_not_depend_on_the_other_prompts():
    sample = make_sampler(Bigram(), SamplingParams(3, 5), eos_ids=(EOS,), pad_id=PAD)
    variables = table(seed=4)
    together = sample(variables, *prompts([5, 6, 7, 8, 9], length=20), keys_for([10, 11, 12, 13, 14]))
    alone = sample(variables, *prompts([7]), keys_for([12]))
    np.testing.assert_array_equal(together.tokens[2:3], alone.tokens)
    np.testing.assert_array_equal(together.mask[2:3], alone.mask)


def test_completions_prompts_steps_and_keys_draw_differently():
    sample = make_sampler(Bigram(), SamplingParams(4, 8), eos_ids=(), pad_id=PAD)
    variables = {"table": np.zeros((VOCABULARY, VOCABULARY), np.float32)}
    first = sample(variables, *prompts([5, 5]), keys_for([0, 1]))
    again = sample(variables, *prompts([5, 5]), keys_for([0, 1]))
    later = sample(variables, *prompts([5, 5]), keys_for([0, 1], seed=1))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert len(np.unique(np.asarray(first.tokens))) > 40  # 64 uniform draws of 300: about 57 distinct
    assert (np.asarray(first.tokens) == np.asarray(later.tokens)).mean() < 0.1


def test_one_bucket_compiles_once():
    policy = Bigram()
    sample = make_sampler(policy, SamplingParams(2, 3), eos_ids=(EOS,), pad_id=PAD)
    shapes = [(10, 9), (10, 16), (9, 12), (10, 9)]  # (prompts, length), all of the bucket (10, 16)
    for count, length in shapes:
        samples = sample(table(), *prompts([5] * count, length=length), keys_for(range(count)))
        assert isinstance(samples, Samples) and samples.tokens.shape == (count, 2, 3)
    assert policy.traces == 1
    sample(table(), *prompts([5] * 10, length=17), keys_for(range(10)))
    assert policy.traces == 2


def test_wrong_input_is_named():
    tokens, mask = prompts([5, 6])
    keys = keys_for([0, 1])
    sample = make_sampler(Bigram(), SamplingParams(2, 2), eos_ids=(EOS,), pad_id=PAD)
    right_padded = mask.copy()
    right_padded[0, -1] = False
    others = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    for bad in ((right_padded, keys), (mask[:1], keys), (mask, keys[:1]), (mask, others)):
        with pytest.raises(ValueError, match="padded on the left, with a token and a typed threefry key each"):
            sample(table(), tokens, *bad)
