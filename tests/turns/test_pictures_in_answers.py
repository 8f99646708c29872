"""Episodes with pictures in observations: sampler and update see the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.rollouts import drawn
from support.vision.folders import picture, seeing_folder

from grpo_jax.config.run import make_config
from grpo_jax.errors import StageError
from grpo_jax.models.vision.pictures import PictureStates
from grpo_jax.rollout.prompts import make_prompt_set
from grpo_jax.runs.loading import load
from grpo_jax.training.objectives import make_forward

ENVIRONMENT = """
import torch
from grpo_jax import Observation
from support.vision.folders import picture

def step(rows, episodes):
    \"\"\"Drawn in torch for one row, of Pillow and two of them for another, a text alone for the rest.\"\"\"
    observations = []
    for place, (row, episode) in enumerate(zip(rows, episodes)):
        seed = row.id * 7 + place * 3 + len(episode.turns)
        if row.id % 3 == 0:
            drawn = torch.rand(3, 16, 24, generator=torch.Generator().manual_seed(seed))
            observations.append(Observation("mend", (drawn,)))
        elif row.id % 3 == 1:
            observations.append(Observation("both", (picture(seed), picture(seed + 1, 12, 28))))
        else:
            observations.append(Observation("again"))
    return observations

def drawn(rows, episodes):
    return [Observation("mend", (torch.rand(3, 16, 24),)) for row in rows]

def length(completions):
    return [float(len(text)) for text in completions]
"""
RECORDS = [{"prompt": "one", "image": picture(50)}, {"prompt": "two", "images": []}, {"prompt": "three"}]


def configured(folder, turns=3, **task):
    (folder / "mine.py").write_text(ENVIRONMENT)
    return make_config(
        task={"kind": "text", "environment": f"{folder}/mine.py:step", **task},
        policy={"path": str(folder / "policy")},
        sampling={"turns": turns, "group_size": 2, "max_new_tokens": 6, "max_observation_tokens": 80},
        training={"prompts_per_batch": 3, "max_steps": 1},
        data={"max_prompt_tokens": 160, "prompts": "given"},
        rewards=[{"name": f"{folder}/mine.py:length"}],
        run_dir=str(folder / "run"),
    )


@pytest.fixture(scope="module", params=["qwen2_vl", pytest.param("qwen3_vl", marks=pytest.mark.wide)])
def played(request, tmp_path_factory):
    """A batch of three turns, and all that it was made with."""
    folder = tmp_path_factory.mktemp(request.param)
    seeing_folder(folder / "policy", request.param)
    ctx = load(configured(folder), lambda *_: None, prompts=make_prompt_set(RECORDS))

    def moved(leaf):
        return jnp.asarray(leaf + 0.02 * np.cos(np.arange(leaf.size)).reshape(leaf.shape), leaf.dtype)

    variables = jax.tree.map(moved, jax.device_get(ctx.policy.variables))
    return ctx, variables, *drawn(ctx, variables)


def test_pictures_stand_in_the_stream_as_their_tokens(played):
    ctx, _, episodes, batch = played
    image = ctx.policy.config.vision.image_token
    samples = episodes.samples
    for p, row in enumerate(episodes.rows):
        for g in range(2):
            grid = np.asarray(batch.pictures["observations"].grid)[p, g].reshape(-1, 2)
            assert (samples.tokens[p, g] == image).sum() == grid.prod(-1).sum()
            assert (grid.prod(-1) > 0).sum() == {0: 2, 1: 4, 2: 0}[row.id % 3]
            assert not samples.mask[p, g][samples.tokens[p, g] == image].any()
    assert batch.packing is None and isinstance(batch.pictures["observations"], PictureStates)


def test_the_updates_logprobs_are_the_samplers(played):
    ctx, variables, _, batch = played
    mask = np.asarray(batch.mask)
    allowed = np.asarray(ctx.allowed_tokens)
    forward = jax.jit(make_forward(ctx.policy, temperature=1.0, allowed_tokens=jnp.asarray(allowed)))
    came = np.asarray(forward(variables, batch).logprobs)
    np.testing.assert_allclose(came[mask], np.asarray(batch.rollout_logprobs)[mask], atol=5e-5)
    other = batch._replace(
        pictures=batch.pictures
        | {"observations": jax.tree.map(lambda array: array[:, ::-1], batch.pictures["observations"])}
    )
    moved = np.abs(np.where(mask, np.asarray(forward(variables, other).logprobs), 0) - np.where(mask, came, 0))
    later = mask & (np.asarray(batch.turn) > 0)
    pictured = np.array([row.id % 3 != 2 for row in played[2].rows])
    assert (moved * later).max(axis=(1, 2))[pictured].min() > 1e-3  # what the other completion saw says something else
    assert (moved * (mask & ~later)).max() == 0


@pytest.mark.wide
def test_pictures_without_a_vision_tower_are_refused(tmp_path):
    """A policy whose tower is not loaded, for no prompt has a picture, must not answer blindly."""
    seeing_folder(tmp_path / "policy", "qwen2_vl")
    prompts = make_prompt_set([{"prompt": word} for word in ("one", "two", "three")])

    def loaded(**task):
        config = configured(tmp_path, turns=2, environment=f"{tmp_path}/mine.py:drawn", **task)
        return load(config, lambda *_: None, prompts=prompts)

    ctx = loaded()
    with pytest.raises(StageError, match=r"no vision tower is loaded \(a vision policy with task.pictures\)"):
        drawn(ctx, ctx.policy.variables)
    assert "visual" not in ctx.policy.variables and "visual" in loaded(pictures=True).policy.variables
