"""Episodes: turns with answers of unequal length between them, against the same tokens in one pass."""

import jax
import numpy as np
from support.tiny_decoders import tiny

from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.sampling.episodes import make_episode_sampler
from grpo_jax.sampling.token_choice import SamplingParams

EOS, PAD = 3, 0
PARAMS = SamplingParams(4, 7, 1.0)
KEYS = jax.random.split(jax.random.key(5), 3)
PROMPTS = np.array([[0, 0, 9, 10, 11], [0, 0, 0, 12, 13], [14, 15, 16, 17, 18]], np.int32)


def answers(rng, most):
    """Random answers of unequal length for each completion, padded on the right."""
    lengths = rng.integers(1, most + 1, (3, 4))
    mask = np.arange(most) < lengths[..., None]
    return np.where(mask, rng.integers(4, 60, mask.shape), PAD).astype(np.int32), mask


def stream(parts):
    """(tokens, what exists, what the policy wrote, its log-probability) of all turns without what is between them."""
    tokens, present, written, logprobs = (np.concatenate([part[i] for part in parts], axis=-1) for i in range(4))
    order = np.argsort(~present, axis=-1, kind="stable")
    return [np.take_along_axis(array, order, axis=-1) for array in (tokens, present, written, logprobs)]


def play(model, turns):
    """An episode of so many turns; completion (0, 1) ends after its first."""
    sampler = make_episode_sampler(model.policy, PARAMS, eos_ids=(EOS, 7, 8, 9), pad_id=PAD)
    samples, carried = sampler.begin(model.variables, PROMPTS, PROMPTS > 0, KEYS)
    rng, parts, active = np.random.default_rng(3), [], np.ones((3, 4), bool)
    active[0, 1] = False
    for turn in range(turns):
        mask = np.asarray(samples.mask)
        parts.append((np.asarray(samples.tokens), mask, mask, np.asarray(samples.logprobs)))
        if turn + 1 < turns:
            said, heard = answers(rng, (5, 11)[turn % 2])
            heard &= active[..., None]
            parts.append((said, heard, np.zeros_like(heard), np.zeros(heard.shape, np.float32)))
            keys = jax.random.split(jax.random.key(turn), 3)
            samples, carried = sampler.go_on(model.variables, carried, said, heard, keys, active)
    return parts, stream(parts)


def test_an_episodes_logprobs_are_those_of_its_tokens_in_one_pass():
    """With learned positions; tests/turns has rotations."""
    model = tiny("gpt2")
    parts, (tokens, present, written, logprobs) = play(model, 2)
    assert len(set(present.sum(-1).ravel())) > 3  # unequal ends and answers
    for part in parts[2::2]:
        assert not part[1][0, 1].any() and part[1].sum() > 10
    policy = model.policy
    hidden = policy.forward_group(model.variables, PROMPTS, PROMPTS > 0, tokens, present)
    expected, _ = token_logprobs(hidden, policy.head(model.variables), tokens)
    np.testing.assert_allclose(logprobs[written], np.asarray(expected)[written], atol=2e-5)
