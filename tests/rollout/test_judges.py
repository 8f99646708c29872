"""Judges in a rollout: true baselines, and judges that fail."""

import numpy as np
import pytest
import torch
from support import tiny_models
from support.rollouts import single_turns

from bridges.diffusion import RenderError
from bridges.judges.open_clip import OpenClip
from bridges.judges.stable_diffusion_3 import StableDiffusion3
from grpo_jax.config.run import make_config
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.reward_registry import ResolvedReward, bind
from grpo_jax.rollout.rewards import Score
from grpo_jax.tasks.pictures import Faithfulness, alignment, alignment_gain, make_render

ROWS = [Row(3, "a red dog"), Row(8, "a blue cat")]
CONFIG = make_config(task="prompt_enhancement")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads the judges of a config: a tiny pipeline with a picture cache of some megabytes, and a tiny CLIP."""
    folder = tmp_path_factory.mktemp("models")
    renderer = str(tiny_models.stable_diffusion_3(folder / "renderer"))
    scorer = OpenClip(model=str(tiny_models.clip(folder / "scorer")))
    small = {"size": 16, "steps": 2, "eval_steps": 3, "guidance": 3.0, "eval_guidance": 1.0, "batch_size": 3}

    def judges(cache_megabytes):
        section = StableDiffusion3(path=renderer, cache_megabytes=cache_megabytes, **small)
        return {"renderer": section.load("cpu"), "scorer": scorer.load("cpu")}

    return judges


def test_a_rewrite_that_changes_nothing_gains_exactly_nothing(load):
    """Rewrites and the unchanged prompt are drawn from one noise: with the same words, the same picture."""
    judges = load(16)
    render = make_render(judges, CONFIG, baselines=True)
    score = Score({"gain": bind(ResolvedReward("gain", alignment_gain), judges)}, {}, missing=False)
    texts = [[row.prompt, f"{row.prompt}, painted in oil, dog of red", row.prompt] for row in ROWS]
    pictures = render(ROWS, texts, 5, False)
    rewards, watched = score(ROWS, single_turns(texts), pictures)
    assert rewards.shape == (2, 3, 1) and watched.shape == (2, 3, 0)
    np.testing.assert_array_equal(rewards[:, ::2], 0)
    assert (np.abs(rewards[:, 1]) > 1e-6).all()
    # The noise is the prompt's own and, in training, fresh at each visit.
    again = render(ROWS, texts, 6, False)
    assert not torch.equal(again.images, pictures.images)


def test_a_picture_that_cannot_be_drawn_is_missing_or_an_error(load):
    """Never a black picture, never a silent 0: rewards of texts stay."""
    judges = load(0)
    with torch.no_grad():
        judges["renderer"].pipeline.transformer.proj_out.weight.fill_(float("nan"))
    texts = [[row.prompt] for row in ROWS]
    with pytest.raises(RenderError):
        make_render(judges, CONFIG, baselines=False)(ROWS, texts, 0, False)
    lenient = CONFIG.replace(on_judge_error="missing")
    pictures = make_render(judges, lenient, baselines=True)(ROWS, texts, 0, False)
    rewards = {"alignment": alignment, "faithfulness": Faithfulness()}
    bound = {name: bind(ResolvedReward(name, reward), judges) for name, reward in rewards.items()}
    score = Score(bound, {"seen": bound["alignment"]}, missing=True)
    rewards, watched = score(ROWS, single_turns(texts), pictures)
    assert np.isnan(rewards[..., 0]).all() and np.isnan(watched).all()
    np.testing.assert_array_equal(rewards[..., 1], 0)  # the prompt itself is as faithful as can be
