"""Shared rows: the log-probabilities and gradients of separate rows, in the fewest rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_decoders import drawn

from grpo_jax.models.architectures.llama import DecoderConfig
from grpo_jax.models.policy import Policy
from grpo_jax.models.rope import RopeConfig
from grpo_jax.models.variables import VALUE
from grpo_jax.training.batch import Batch, pack, trimmed
from grpo_jax.training.objectives import make_forward

PROMPTS, GROUP, LENGTH, WIDTH = 2, 4, 5, 8
LENGTHS = np.array([[3, 8, 1, 4], [2, 0, 5, 1]])
MASK = np.arange(WIDTH) < LENGTHS[..., None]
SHAPE = dict(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, initializer_range=0.3)
# All that a layer may have of its own: rotations, caps, norms behind what is added.
CONFIG = DecoderConfig(
    **SHAPE,
    **dict(intermediate_size=24, num_kv_heads=1, head_dim=8, windows=(None, 3)),
    **dict(layer_ropes=(RopeConfig(), None), unit_offset=True, norms="both", qk_norm="head"),
    **dict(attention_scale=0.5, attention_softcap=2.0, logit_softcap=3.0, embedding_scale=4.0),
)


def batch():
    random = np.random.default_rng(0)
    prompt_mask = np.arange(LENGTH) >= np.array([[0], [2]])
    prompt_tokens = random.integers(0, 32, (PROMPTS, LENGTH)).astype(np.int32)
    tokens = random.integers(0, 32, MASK.shape).astype(np.int32)
    return Batch(prompt_tokens, prompt_mask, tokens, MASK)


def test_gradients_are_those_of_rows_of_their_own():
    variables, kernel = drawn(CONFIG), np.random.default_rng(1).normal(size=16).astype(np.float32)
    variables[VALUE] = {"kernel": kernel, "bias": np.float32(0.1)}
    forward = make_forward(Policy(CONFIG, remat="none"), temperature=0.7)
    pulls = np.random.default_rng(1).normal(size=(3, *MASK.shape)).astype(np.float32)

    @jax.jit
    def measured(variables, batch):
        def loss(variables):
            seen = jax.tree.map(lambda x: jnp.where(batch.mask, x, 0), forward(variables, batch))
            parts = jax.tree.leaves(seen)
            return sum(jnp.sum(pull * part) for pull, part in zip(pulls, parts, strict=True)), parts

        return jax.value_and_grad(loss, has_aux=True)(variables)

    whole = batch()
    packing = pack(whole.mask, shortest=1)
    assert packing.source.shape == (PROMPTS, 2, WIDTH)  # 8 | 4 3 1, which is half the rows
    (_, expected), slopes = measured(variables, whole)
    (_, got), packed_slopes = measured(variables, whole._replace(packing=packing))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for a, b in zip(jax.tree.leaves(packed_slopes), jax.tree.leaves(slopes), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize("seed", range(2))
def test_every_token_has_a_place_and_long_completions_stay_apart(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 10, (3, 8)).clip(max=WIDTH)
    lengths[:, 0] = 1
    packing = pack(np.arange(WIDTH) < lengths[..., None], shortest=1)
    if packing is None:
        assert (lengths.sum(-1) > 0.6 * 8 * WIDTH).any()
        return
    for source, row in zip(packing.source, lengths, strict=True):
        kept = np.sort(source[source >= 0])
        np.testing.assert_array_equal(kept, [g * WIDTH + t for g in range(8) for t in range(row[g])])


def test_short_rows_are_not_packed():
    mask = np.arange(32) < 3
    assert pack(np.tile(mask[:31], (2, 4, 1))) is None
    assert pack(np.tile(mask, (2, 4, 1))).source.shape == (2, 1, 32)


@pytest.mark.parametrize(("longest", "kept"), [(1, 16), (16, 16), (17, 32), (33, 48), (50, 50)])
def test_trimming_keeps_the_longest_row(longest, kept):
    mask = np.arange(50) < np.array([[longest], [1]])
    array = np.arange(100).reshape(2, 50)
    np.testing.assert_array_equal(trimmed(array, mask), array[:, :kept])
    np.testing.assert_array_equal(trimmed(array, mask[:, ::-1], left=True), array[:, 50 - kept :])
    whole = kept if 50 - kept >= 20 else 50
    np.testing.assert_array_equal(trimmed(array, mask, worth=20), array[:, :whole])
