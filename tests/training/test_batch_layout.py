"""The layout of a batch has no effect: trimmed, packed, split or padded, each preset makes the same update."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.config.sections import AlgorithmSection, TrainingSection
from grpo_jax.models.policy import Policy
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.sampling.decoding import Samples
from grpo_jax.training.batch import Batch, make_batch
from grpo_jax.training.estimators import make_objectives
from grpo_jax.training.objectives import make_forward
from grpo_jax.training.state import init_state
from grpo_jax.training.update import make_update

PROMPTS, GROUP, LENGTH, BUDGET, VOCABULARY, WIDTH = 4, 4, 6, 64, 32, 8
LENGTHS = np.array([[20, 3, 5, 4], [9, 17, 2, 1], [12, 4, 4, 6], [1, 2, 19, 8]])


class OneTokenBack(Policy):
    """A policy that sees one token back: small enough to compile for every preset."""

    def forward_group(self, variables, prompt_tokens, prompt_mask, tokens, mask, steps=None):
        first = jnp.broadcast_to(prompt_tokens[:, -1, None, None], (*tokens.shape[:2], 1))
        before = jnp.concatenate([first, tokens[..., :-1]], -1)
        before = before if steps is None else jnp.where(steps == 0, first, before)
        return jnp.tanh(variables["params"]["table"][before])

    def head(self, variables):
        return variables["params"]["head"]


POLICY = OneTokenBack(SimpleNamespace(logit_softcap=None))
RANDOM = np.random.default_rng(0)
VARIABLES = {"params": {name: RANDOM.normal(size=(VOCABULARY, WIDTH)).astype("f") for name in ("table", "head")}}


def updated(batch, section, reference=None, **training):
    """The state after plain gradient descent on the batch, against a reference if one is given, and the report."""
    training, optimizer = TrainingSection(prompts_per_batch=PROMPTS, **training), optax.sgd(1.0)
    update = make_update(POLICY, optimizer, section, training, temperature=1.0, max_new_tokens=BUDGET)
    state = init_state(VARIABLES, optimizer, keep_reference=False)._replace(reference=reference)
    return update(state, batch, jax.random.key(2))


@pytest.fixture(scope="module")
def rollout():
    """Completions far shorter than their budget, as a sampler a little off the policy writes them down."""
    random = np.random.default_rng(1)
    shape = (PROMPTS, GROUP, BUDGET)
    mask = np.arange(BUDGET) < LENGTHS[..., None]
    tokens = np.where(mask, random.integers(0, VOCABULARY, shape), 0).astype(np.int32)
    prompts = random.integers(0, VOCABULARY, (PROMPTS, LENGTH)).astype(np.int32)
    prompt_mask = np.ones(prompts.shape, bool)
    rows = Batch(prompts, prompt_mask, tokens, mask)
    logprobs = jax.jit(make_forward(POLICY, temperature=1.0))(VARIABLES, rows).logprobs
    logprobs = np.where(mask, logprobs + 0.2 * random.normal(size=shape), 0).astype(np.float32)
    rewards = random.normal(size=(PROMPTS, GROUP, 1)).astype(np.float32)
    samples = Samples(tokens, mask, logprobs, 2 * logprobs, np.zeros(shape[:2], bool))
    return Rollout([], [], rewards[:, :, None], rewards[:, :, None], samples, prompts, prompt_mask)


def made(rollout, section):
    """The batch that the loop makes of it."""
    judged, lengths = rollout.rewards[:, :, 0], rollout.samples.mask.sum(-1)
    objectives = make_objectives(judged, lengths, section, weights={"a": 1.0}, max_new_tokens=BUDGET)
    return make_batch(rollout, objectives, section)


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dapo", "gspo"])  # aggregations and ratios
def test_an_update_is_the_same_cut_and_packed_and_split_or_as_wide_as_its_budget(rollout, preset):
    section = AlgorithmSection(preset=preset, advantage="grpo", entropy_coef=0.05)
    batch = made(rollout, section)
    assert batch.tokens.shape[-1] == 32 and batch.packing.source.shape[1] < GROUP
    np.testing.assert_array_equal(batch.rollout_logprobs, rollout.samples.logprobs[..., :32])
    # ratios away from 1, so that surrogates and clips say what they have to say
    batch, samples = batch._replace(old_logprobs=batch.rollout_logprobs), rollout.samples
    wide = Batch(rollout.prompt_tokens, rollout.prompt_mask, samples.tokens, samples.mask, batch.advantages)
    expected, report = updated(jax.device_put(wide._replace(old_logprobs=samples.logprobs)), section)
    came, other = updated(batch, section, grad_accumulation_steps=2)
    assert other["loss"] == pytest.approx(report["loss"], rel=1e-4, abs=1e-7)
    assert other["grad_norm"] == pytest.approx(report["grad_norm"], rel=1e-4)
    for a, b in zip(jax.tree.leaves(came.variables), jax.tree.leaves(expected.variables), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.wide  # of the test above, dr_grpo compares a batch of width 32 with one as wide as its budget
def test_dr_grpo_divides_by_the_budget_whatever_the_longest_completion_is(rollout):
    """A longer completion that pulls at nothing must not shrink the gradient of all others."""
    section, norms = AlgorithmSection(preset="dr_grpo", advantage="grpo"), {}
    for longest, width in ((20, 32), (33, 48)):
        mask = rollout.samples.mask.copy()
        mask[0, 0] = np.arange(BUDGET) < longest
        batch = made(rollout._replace(samples=rollout.samples._replace(mask=mask)), section)
        assert batch.tokens.shape[-1] == width
        batch = batch._replace(advantages=batch.advantages.at[0, 0].set(0.0))
        norms[width] = updated(batch, section)[1]["grad_norm"]
    assert norms[32] == pytest.approx(norms[48], rel=1e-5)


@pytest.mark.parametrize(("written", "longest", "width"), [("full", 50, 80), ("full", 5, 20), ("short", 50, 60)])
def test_a_prompt_is_cut_where_that_saves_a_share_of_what_its_group_reads(rollout, written, longest, width):
    """Twice the group reads 512 tokens at most, of which 1/16 are 32, or shares few rows."""
    samples = jax.tree.map(lambda array: np.concatenate([array] * 2, axis=1), rollout.samples)
    if written == "full":
        samples = samples._replace(mask=np.ones_like(samples.mask))
    prompt_mask = np.tile(np.arange(80) >= 80 - longest, (PROMPTS, 1))
    prompts = np.where(prompt_mask, np.arange(80), 0).astype(np.int32), prompt_mask
    rewards = np.concatenate([rollout.rewards] * 2, axis=1)
    batch = made(Rollout([], [], rewards, rewards, samples, *prompts), AlgorithmSection(advantage="grpo"))
    assert batch.prompt_tokens.shape == batch.prompt_mask.shape == (PROMPTS, width)
    np.testing.assert_array_equal(batch.prompt_tokens, prompts[0][:, 80 - width :])
    assert (np.asarray(batch.prompt_mask).sum(-1) == longest).all()
