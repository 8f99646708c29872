"""Whole models with pictures in prompts against transformers: positions, logits, gradients, texts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support import torch_reference as reference  # noqa: E402
from support.vision import tiny_pictures as tiny  # noqa: E402

from grpo_jax.core.logprobs import token_logprobs  # noqa: E402
from grpo_jax.core.losses import Clip, KLPenalty, grpo_loss  # noqa: E402
from grpo_jax.models.policy import Policy  # noqa: E402
from grpo_jax.models.positions import find_places  # noqa: E402
from grpo_jax.models.variables import with_tower  # noqa: E402
from grpo_jax.models.vision.pictures import PictureStates  # noqa: E402
from grpo_jax.sampling.sampler import SamplingParams, make_sampler  # noqa: E402

# Two pictures with text between them, one that is long, none.
GRIDS = (((4, 6), (2, 2)), ((10, 4),), ())
GROUP, STEPS, WRITTEN = 2, 5, 12
MARKS = (90, 91, 92, 93)  # image, video, vision start, vision end
ENDS = (5, 7)


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def world(request, tmp_path_factory):
    # Behind the last layer nobody reads a picture's states: two of deepstack need a third.
    return tiny.seeing(tmp_path_factory.mktemp(request.param), request.param, num_hidden_layers=3)


@pytest.fixture(scope="module")
def policy(world):
    return Policy(world.loaded.config)


def prompts(grids=GRIDS, seed: int = 0):
    """Left-padded prompts: text, and for each picture its marks and placeholders, then text."""
    rng = np.random.default_rng(seed)

    def text(count):
        return rng.integers(1, 90, count).tolist()

    rows = []
    for i, row in enumerate(grids):
        ids = text(2 + i)
        for height, width in row:
            ids += [92, *[90] * (height * width // 4), 93, *text(2)]
        rows.append(ids)
    length = max(map(len, rows)) + 1
    tokens, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for i, ids in enumerate(rows):
        tokens[i, length - len(ids) :], mask[i, length - len(ids) :] = ids, True
    return tokens, mask


def make_batch(seed: int = 0):
    """Prompts with completions that end at different steps."""
    rng = np.random.default_rng(seed + 1)
    tokens, mask = prompts(seed=seed)
    completions = rng.integers(1, 90, (len(tokens), GROUP, STEPS)).astype(np.int32)
    ends = rng.integers(1, STEPS + 1, completions.shape[:2])
    ends[0, 0] = STEPS
    return tokens, mask, completions, np.arange(STEPS) < ends[..., None]


def of_torch(rows, repeats: int = 1):
    """The pictures of rows, each row's repeated for its group, as transformers takes them."""
    everything = [picture for row in rows for _ in range(repeats) for picture in row]
    return {
        "pixel_values": torch.tensor(np.concatenate([picture.patches for picture in everything])),
        "image_grid_thw": torch.tensor([[1, *picture.grid] for picture in everything]),
    }


def test_positions_are_those_of_get_rope_index(world):
    tokens, mask = prompts()
    rows = tiny.draw(world.config, GRIDS)
    pictures = tiny.packed(rows, world.config)
    states = PictureStates(np.zeros((*pictures.grid.shape[:-1], 16, 1), np.float32), np.asarray(pictures.grid) // 2)
    found = jax.jit(partial(find_places, world.config))(tokens, mask, states)
    ids = torch.tensor(tokens, dtype=torch.long)
    expected, deltas = world.torch.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == 90).int(),
        image_grid_thw=of_torch(rows)["image_grid_thw"],
        attention_mask=torch.tensor(mask).long(),
    )
    ours = np.moveaxis(np.asarray(found.positions), -1, 0)
    np.testing.assert_array_equal(ours[:, mask], expected.numpy()[:, mask])
    # What is written next stands behind the longer side of every picture.
    if world.config.model_type != "qwen3_vl":  # which counts padding there
        np.testing.assert_array_equal(found.advance, mask.sum(1) + deltas[:, 0].numpy())


@pytest.mark.parametrize("world", [pytest.param("qwen2_5_vl", marks=pytest.mark.wide), "qwen3_vl"], indirect=True)
def test_logprobs_and_gradients_of_grpo_are_those_of_torch(world, policy):
    """Prompt and pictures once for the group here, a copy per completion there; decoder, merger and tower trained."""
    batch, rows = make_batch(), tiny.draw(world.config, GRIDS)
    pictures = tiny.packed(rows, world.config)
    advantages = np.random.default_rng(1).normal(size=batch[2].shape[:2]).astype(np.float32)
    noise = np.random.default_rng(2).normal(size=(2, *batch[2].shape)).astype(np.float32) * 0.3
    world.torch.zero_grad()
    expected = reference.completion_logits(world.torch, batch, **of_torch(rows, GROUP))
    logprobs, loss = reference.grpo(expected, batch, advantages, noise)
    old, ref = (logprobs.detach().numpy() + n for n in noise)

    def objective(params):
        variables = {"params": params}
        hidden = policy.forward_group(variables, *batch, pictures=policy.encode_images(variables, pictures))
        got, _ = token_logprobs(hidden, policy.head(variables), jnp.asarray(batch[2]), temperature=0.8)
        surrogate, kl = Clip(low=0.2, high=0.3), KLPenalty(0.1)
        value, _ = grpo_loss(got, old, advantages, batch[3], surrogate=surrogate, kl=kl, ref_logprobs=ref)
        return value, (got, hidden @ policy.head(variables).T)

    params = with_tower({"params": world.loaded.params}, world.loaded.visual, trained=True)["params"]
    (value, (got, logits)), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    mask = batch[3]
    np.testing.assert_allclose(logits[mask], expected.detach().numpy()[mask], atol=1e-4)
    np.testing.assert_allclose(got[mask], logprobs.detach().numpy()[mask], atol=1e-4)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-4)
    reference.assert_gradients_agree(world.torch, world.loaded.config, grads)


@pytest.mark.parametrize("world", ["qwen2_vl", pytest.param("qwen3_vl", marks=pytest.mark.wide)], indirect=True)
def test_the_same_words_are_written(world, policy):
    """Greedily, a dozen tokens behind each prompt; placeholders, marks and ends are forbidden to both."""
    tokens, mask = prompts(seed=5)
    rows = tiny.draw(world.config, GRIDS, seed=5)
    allowed = ~np.isin(np.arange(world.loaded.config.vocab_size), MARKS + ENDS)
    sample = make_sampler(policy, SamplingParams(1, WRITTEN, 0.0), eos_ids=(), pad_id=0, allowed_tokens=allowed)
    pictures = jax.jit(policy.encode_images)(world.variables, tiny.packed(rows, world.config))
    keys = jax.random.split(jax.random.key(0), len(tokens))
    samples = sample(world.variables, tokens, mask, keys, pictures)
    assert samples.tokens.shape[-1] == WRITTEN and not np.isin(samples.tokens, MARKS + ENDS).any()
    for i, row in enumerate(rows):
        ids = torch.tensor(tokens[i : i + 1, mask[i]], dtype=torch.long)
        seen = of_torch([row]) | {"mm_token_type_ids": (ids == 90).int()} if row else {}
        with torch.no_grad():
            written = world.torch.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=WRITTEN,
                min_new_tokens=WRITTEN,
                do_sample=False,
                suppress_tokens=list(MARKS + ENDS),
                **seen,
            )
            images = of_torch([row]) if row else {}
            logits = reference.logits(world.torch, written.numpy(), np.ones(written.shape), **images)[
                0, -WRITTEN - 1 : -1
            ]
        words = written[0, -WRITTEN:]
        np.testing.assert_array_equal(samples.tokens[i, 0], words)
        logits[:, MARKS + ENDS] = -torch.inf
        np.testing.assert_allclose(samples.logprobs[i, 0], logits.log_softmax(-1)[np.arange(WRITTEN), words], atol=1e-4)
