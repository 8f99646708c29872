"""Completions that are lists of different tokens: none twice, none of the prompt, alike in sampler and update."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_decoders import LLAMA

from grpo_jax.core.logprobs import taken_before, token_logprobs
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.policy import make_policy
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward

PAD, LENGTH, GROUP = 0, 2, 4000
ITEMS = (3, 4, 5, 6, 7, 8, 9)
PROMPTS = np.array([[3, 4, 5], [0, 9, 2]], np.int32)
MASK = np.array([[True, True, True], [False, True, True]])
ALLOWED = np.isin(np.arange(LLAMA.vocab_size), ITEMS)


@pytest.fixture(scope="module")
def model():
    return make_policy(LLAMA), init_variables(LLAMA, jax.random.key(0))


@pytest.fixture(scope="module")
def exact(model):
    """The log-probability of every list after every prompt, {list: value} [P], each token over what is left."""
    policy, variables = model
    pairs = np.array(list(itertools.product(ITEMS, repeat=LENGTH)), np.int32)
    tokens = np.stack([pairs, pairs])
    hidden = policy.forward_group(variables, PROMPTS, MASK, tokens, np.ones(tokens.shape, bool))
    logits = np.asarray(hidden @ policy.head(variables).T, np.float64)
    found = []
    for p, (prompt, there) in enumerate(zip(PROMPTS, MASK, strict=True)):
        logs = {}
        for i, pair in enumerate(pairs.tolist()):
            left = [item for item in ITEMS if item not in prompt[there]]
            if len({*pair}) < LENGTH or not {*pair} <= {*left}:
                continue
            total = 0.0
            for place, token in enumerate(pair):
                may = [item for item in left if item not in pair[:place]]
                total += logits[p, i, place, token] - np.log(np.exp(logits[p, i, place, may]).sum())
            logs[tuple(pair)] = total
        assert sum(map(np.exp, logs.values())) == pytest.approx(1)
        found.append(logs)
    return found


def draw(model, params):
    policy, variables = model
    sample = make_sampler(policy, params, eos_ids=(), pad_id=PAD, allowed_tokens=ALLOWED, no_repeats=True)
    return jax.device_get(sample(variables, PROMPTS, MASK, jax.random.split(jax.random.key(0), 2)))


@pytest.fixture(scope="module")
def drawn(model):
    return draw(model, SamplingParams(GROUP, LENGTH))


def test_lists_are_drawn_as_often_as_they_are_likely(drawn, exact):
    assert drawn.mask.all() and not drawn.truncated.any()
    for lists, logs in zip(drawn.tokens.tolist(), exact, strict=True):
        counts = {pair: lists.count(list(pair)) for pair in logs}
        assert sum(counts.values()) == GROUP  # no other list
        expected = {pair: GROUP * np.exp(value) for pair, value in logs.items()}
        assert sum((counts[pair] - often) ** 2 / often for pair, often in expected.items()) < 2 * len(logs)


def test_sampler_and_update_have_the_log_probabilities_of_what_is_left(model, drawn, exact):
    policy, variables = model
    tokens = drawn.tokens[:, :50]
    expected = [[logs[tuple(pair)] for pair in lists.tolist()] for lists, logs in zip(tokens, exact, strict=True)]
    np.testing.assert_allclose(drawn.logprobs[:, :50].sum(-1), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(drawn.sampler_logprobs, drawn.logprobs, atol=1e-5)
    batch = Batch(PROMPTS, MASK, tokens, np.ones(tokens.shape, bool), np.zeros(tokens.shape[:2], np.float32))
    forward = make_forward(policy, temperature=1.0, allowed_tokens=jnp.asarray(ALLOWED), no_repeats=True)
    passed = jax.jit(forward)(variables, batch)
    np.testing.assert_allclose(passed.logprobs, drawn.logprobs[:, :50], rtol=1e-4, atol=1e-5)
    assert np.isfinite(passed.entropy).all()


def test_a_greedy_list_takes_the_likeliest_of_what_is_left_at_every_place(model, exact):
    greedy = draw(model, SamplingParams(1, 4, temperature=0.0)).tokens[:, 0]
    for row, logs in zip(greedy.tolist(), exact, strict=True):
        first = {}
        for (one, _), value in logs.items():
            first[one] = first.get(one, 0.0) + np.exp(value)
        assert row[0] == max(first, key=first.get) and len({*row}) == 4
        assert row[1] == max((pair for pair in logs if pair[0] == row[0]), key=logs.get)[1]


def test_restrictions_hold_among_what_is_left(model):
    lists = draw(model, SamplingParams(50, 4, top_k=1)).tokens
    assert (lists == lists[:, :1]).all() and (lists == draw(model, SamplingParams(1, 4, temperature=0.0)).tokens).all()


def test_logprobs_and_gradients_are_those_of_the_plain_formula(x64):
    random = np.random.default_rng(0)
    tokens = np.stack([random.permutation((6, 7, 8)) for _ in range(6)]).reshape(2, 3, 3).astype(np.int32)
    hidden, head = random.normal(size=(*tokens.shape, 6)), random.normal(size=(12, 6))
    taken = taken_before(jnp.asarray(PROMPTS), jnp.asarray(MASK), jnp.asarray(tokens))
    may = np.zeros((*tokens.shape, 12), bool)
    for p, g, t in np.ndindex(tokens.shape):
        may[p, g, t, [*{*ITEMS} - {*PROMPTS[p][MASK[p]].tolist()} - {*tokens[p, g, :t].tolist()}]] = True

    def plain(hidden, head):
        logs = jax.nn.log_softmax(jnp.where(may, hidden @ head.T / 0.8, -1e30))
        entropy = -jnp.sum(jnp.where(may, jnp.exp(logs) * logs, 0), axis=-1)
        return jnp.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0], entropy

    def chunked(hidden, head):
        options = {"temperature": 0.8, "allowed_tokens": ALLOWED[:12], "taken": taken, "chunk_size": 5}
        return token_logprobs(hidden, head, tokens, **options)

    def pulled(function, hidden, head):
        weights = jnp.cos(jnp.arange(tokens.size)).reshape(tokens.shape)
        logprobs, entropy = function(hidden, head)
        return (weights * (logprobs + entropy**2)).sum()

    for got, expected in zip(chunked(hidden, head), plain(hidden, head), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
    got, expected = (jax.jit(jax.grad(partial(pulled, f), (0, 1)))(hidden, head) for f in (chunked, plain))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11), got, expected)


@pytest.mark.parametrize("more", [{"eos_ids": (1,)}, {"stops": np.zeros((1, LLAMA.vocab_size), np.int32)}])
def test_a_list_has_no_other_end(model, more):
    policy, variables = model
    sample = make_sampler(policy, SamplingParams(2, 2), **{"eos_ids": (), "pad_id": PAD, "no_repeats": True, **more})
    with pytest.raises(ValueError, match="no_repeats writes lists"):
        sample(variables, PROMPTS, MASK, jax.random.split(jax.random.key(0), 2))
