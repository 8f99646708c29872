"""Completions from a catalogue: sampled, ranked and trained, against an enumeration of all texts."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_decoders import LLAMA
from support.tiny_decoders import drawn as drawn_variables

from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.core.trie import children, make_trie, walk
from grpo_jax.models.policy import Policy
from grpo_jax.sampling import ranking
from grpo_jax.sampling.ranking import levels_of, make_ranker
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward

PAD, EOS, LENGTH = 0, 1, 4
ONE_HEAD = replace(LLAMA, num_kv_heads=1, num_layers=1, windows=(None,))  # tests/tasks/recommendation has several
PROMPTS = np.array([[3, 4, 5], [0, 9, 2]], np.int32)
MASK = np.array([[True, True, True], [False, True, True]])


def catalogue():
    """Texts of one to four tokens; some share their beginnings, and the root has more children than are listed."""
    random = np.random.default_rng(0)
    made = [(*random.integers(2, 5, random.integers(1, 3)), random.integers(5, 9), EOS) for _ in range(9)]
    return [*sorted({tuple(map(int, text)) for text in made}), *[(token,) for token in range(10, 50)]]


TEXTS = catalogue()
NUMBER = {text: number for number, text in enumerate(TEXTS)}


@pytest.fixture(scope="module")
def model():
    policy = Policy(ONE_HEAD)
    return policy, drawn_variables(ONE_HEAD)


@pytest.fixture(scope="module")
def trie():
    return make_trie(TEXTS, vocab_size=LLAMA.vocab_size)


@pytest.fixture(scope="module")
def logits(model):
    """The policy's own before every token of every text, float64 [P, I, T, V]."""
    policy, variables = model
    tokens = np.array([[*text, *[PAD] * (LENGTH - len(text))] for text in TEXTS], np.int32)
    mask = np.array([[True] * len(text) + [False] * (LENGTH - len(text)) for text in TEXTS])
    both = [np.stack([x, x]) for x in (tokens, mask)]
    read = jax.jit(lambda variables: policy.forward_group(variables, PROMPTS, MASK, *both) @ policy.head(variables).T)
    return np.asarray(read(variables), np.float64)


def rivals(text, place):
    """Return the allowed tokens at a place of a text, after the tokens before it."""
    return sorted({other[place] for other in TEXTS if other[:place] == text[:place] and len(other) > place})


@pytest.fixture(scope="module")
def exact(logits):
    """The log-probability of every text after every prompt, float64 [P, I]."""
    return text_logprobs(logits)


def text_logprobs(logits):
    """Sum the log-probabilities of a text's tokens, each over the tokens that may follow."""
    total = np.zeros((2, len(TEXTS)))
    for (p, i), place in itertools.product(np.ndindex(total.shape), range(LENGTH)):
        if place < len(TEXTS[i]):
            row = logits[p, i, place]
            total[p, i] += row[TEXTS[i][place]] - np.log(np.exp(row[rivals(TEXTS[i], place)]).sum())
    np.testing.assert_allclose(np.exp(total).sum(1), 1, rtol=1e-6)
    return total


def keys(seed=0):
    return jax.random.split(jax.random.key(seed), 2)


def numbers(samples):
    """Which text each completion is, [P, G]; fails where one is none."""
    tokens, mask = (np.asarray(x).reshape(-1, LENGTH) for x in (samples.tokens, samples.mask))
    found = [NUMBER[tuple(row[there].tolist())] for row, there in zip(tokens, mask, strict=True)]
    return np.array(found).reshape(samples.tokens.shape[:2])


@pytest.fixture(scope="module")
def drawn(model, trie):
    policy, variables = model
    sample = make_sampler(policy, SamplingParams(3000, LENGTH), eos_ids=(EOS,), pad_id=PAD, trie=trie)
    return sample(variables, PROMPTS, MASK, keys())


def test_every_completion_is_a_text_drawn_as_often_as_it_is_likely(drawn, exact):
    assert not np.asarray(drawn.truncated).any()
    for found, logs in zip(numbers(drawn), exact, strict=True):
        counts, expected = np.bincount(found, minlength=len(TEXTS)), np.exp(logs) * len(found)
        often = expected > 5
        statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
        assert statistic < 2 * often.sum() and often.sum() > 10


def test_restrictions_hold_among_the_tokens_that_may_follow(model, trie, logits):
    """Top-k, top-p and min-p, each of which leaves something out here."""
    policy, variables = model
    params = SamplingParams(100, LENGTH, 0.5, top_k=12, top_p=0.8, min_p=0.7)
    sample = make_sampler(policy, params, eos_ids=(EOS,), pad_id=PAD, trie=trie)
    samples = jax.device_get(sample(variables, PROMPTS, MASK, keys()))
    left_out = np.zeros(3, int)
    for (p, g), i in np.ndenumerate(numbers(samples)):
        for place, token in enumerate(TEXTS[i]):
            row, may = logits[p, i, place].copy(), rivals(TEXTS[i], place)
            best = sorted(may, key=lambda token, row=row: -row[token])[:12]
            share = np.exp(row[best] / 0.5) / np.exp(row[best] / 0.5).sum()
            within = np.cumsum(share) - share < 0.8
            likely = share >= 0.7 * share[0]
            left_out += [len(may) - len(best), (~within).sum(), (within & ~likely).sum()]
            drawn = {token: value for token, value, here in zip(best, share, within & likely, strict=True) if here}
            expected = np.log(drawn[token] / sum(drawn.values()))
            assert samples.sampler_logprobs[p, g, place] == pytest.approx(expected, abs=2e-4)
    assert (left_out > 0).all()


def test_the_update_has_the_sampler_s_log_probabilities(model, trie, drawn, exact):
    policy, variables = model
    few = jax.tree.map(lambda x: x[:, :40], jax.device_get(drawn))
    np.testing.assert_allclose(
        np.asarray(few.logprobs).sum(-1), np.take_along_axis(exact, numbers(few), axis=1), rtol=1e-4, atol=1e-5
    )
    zeros = np.zeros(few.tokens.shape[:2], np.float32)
    batch = Batch(PROMPTS, MASK, np.asarray(few.tokens), np.asarray(few.mask), zeros)
    seen = jax.jit(make_forward(policy, temperature=1.0, trie=trie))(variables, batch)
    np.testing.assert_allclose(np.where(few.mask, seen.logprobs, 0), few.logprobs, rtol=1e-4, atol=1e-5)
    short = np.array([len(text) == 1 for text in TEXTS])[numbers(few)]
    assert (
        short.any() and (np.asarray(seen.entropy)[..., 1][short] == 0).all()
    )  # behind a whole text nothing may follow


def test_logprobs_and_gradients_are_those_of_the_plain_formula(trie, x64):
    random = np.random.default_rng(0)
    tokens = np.array([[*text, *[PAD] * (LENGTH - len(text))] for text in TEXTS], np.int32)
    hidden, head = random.normal(size=(*tokens.shape, 6)), random.normal(size=(LLAMA.vocab_size, 6))
    nodes, mask = walk(trie, tokens), tokens != PAD
    may = np.asarray(children(trie, nodes))

    def plain(hidden, head):
        logs = jax.nn.log_softmax(jnp.where(may, hidden @ head.T / 0.8, -1e30))
        entropy = -jnp.sum(jnp.where(may, jnp.exp(logs) * logs, 0), axis=-1)
        return jnp.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0], entropy

    def chunked(hidden, head):
        return token_logprobs(hidden, head, tokens, temperature=0.8, allowed_tokens=(trie, nodes), chunk_size=7)

    def pulled(function, hidden, head):
        logprobs, entropy = function(hidden, head)
        return sum(
            jnp.where(mask, jnp.cos(jnp.arange(mask.size)).reshape(mask.shape) * x, 0).sum()
            for x in (logprobs, entropy**2)
        )

    def both(function):
        """Values and gradients."""
        slopes = jax.grad(partial(pulled, function), (0, 1))
        return jax.jit(lambda *given: (function(*given), slopes(*given)))(hidden, head)

    (values, came), (wanted, expected) = both(chunked), both(plain)
    for got, value in zip(values, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got)[mask], np.asarray(value)[mask], rtol=1e-10, atol=1e-12)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11), came, expected)


def test_a_ranking_of_all_texts_has_the_score_of_every_text_alone(model, trie, logits, monkeypatch):
    """At training's temperature, and with numbers that are no text's, as titles of the same tokens leave them."""
    policy, variables = model
    gaps = trie._replace(text=jnp.where(trie.text >= 0, 2 * trie.text + 1, -1))
    monkeypatch.setattr(ranking, "_MOST_NUMBERS", 1)
    exact = text_logprobs(logits / 0.5)
    found = make_ranker(policy, pad_id=PAD, trie=gaps, temperature=0.5)(variables, PROMPTS, MASK)
    assert found.texts.shape == found.scores.shape == (2, len(TEXTS))
    best = np.argsort(-exact, axis=1)
    np.testing.assert_allclose(found.scores, np.take_along_axis(exact, best, 1), rtol=1e-4, atol=1e-5)
    assert (np.asarray(found.texts) == 2 * best + 1).all()


def test_what_is_certain_is_not_decoded():
    levels = levels_of(make_trie([(2, 3, 4, 5), (2, 6, 4), (3, 3, 3, 3)], vocab_size=9))
    assert [level.token.tolist() for level in levels] == [[2, 3], [3, 6]]
    assert [level.texts.tolist() for level in levels] == [[-1, 2], [0, 1]]
