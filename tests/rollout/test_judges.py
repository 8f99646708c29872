"""How judges become the environment: conditions by default, honest baselines, judges that fail."""

import dataclasses

import numpy as np
import pytest
import torch
from grpo_jax.rollout.chosen import resolve_conditions
from support import tiny_models

from bridges.clip import load_scorer
from bridges.diffusion import RenderError, load_renderer
from grpo_jax.config import Config, RendererSection, RewardSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.environment import make_render, make_score
from grpo_jax.rollout.pipeline import Stage, StageError, run_pipeline
from grpo_jax.runs.parts import guarded
from grpo_jax.tasks.prompt_enhancement import rewards as image_rewards

ROWS = [Row(3, "a red dog"), Row(8, "a blue cat")]
CONFIG = Config(renderer=RendererSection(size=16, steps=2, eval_steps=3, guidance=3.0, batch_size=3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return tiny_models.stable_diffusion_3(folder / "renderer"), tiny_models.clip(folder / "scorer")


def test_quality_goes_with_alignment_unless_told_otherwise():
    alignment, gain, quality = RewardSection("alignment"), RewardSection("alignment_gain"), RewardSection("quality")
    assert resolve_conditions([alignment, quality])[1] == RewardSection("quality", 1.0, "alignment", 0.25)
    assert resolve_conditions([quality, alignment, gain])[0] == RewardSection("quality", 1.0, "alignment_gain", 0.0)
    explicit = RewardSection("quality", 0.5, "alignment", 0.1)
    assert resolve_conditions([alignment, explicit]) == (alignment, explicit)
    alone = RewardSection("quality", condition_on="none")
    assert resolve_conditions([alone, alignment]) == (quality, alignment)
    with pytest.raises(UserError, match="list alignment or alignment_gain"):
        resolve_conditions([quality, RewardSection("length")])


def test_condition_on_takes_none_and_the_other_rewards():
    rewards = [RewardSection("alignment"), RewardSection("quality", condition_on="none")]
    assert Config(rewards=rewards).rewards == rewards
    with pytest.raises(UserError, match=r"rewards.quality.condition_on: expected one of \['alignment'\], got 'beauty'"):
        Config(rewards=[rewards[0], RewardSection("quality", condition_on="beauty")])


@pytest.mark.parametrize("cache_bytes", [0, 2**24], ids=["no cache", "cache"])
@pytest.mark.parametrize("evaluation", [False, True])
def test_a_rewrite_that_changes_nothing_gains_exactly_nothing(folders, cache_bytes, evaluation):
    """Rewrites and the unchanged prompt are drawn from one noise: with the same words, the same picture."""
    renderer, scorer = load_renderer(folders[0], cache_bytes=cache_bytes), load_scorer(folders[1])
    gain = image_rewards.alignment_gain(scorer)
    render = make_render(renderer, scorer.device, CONFIG, baselines=True)
    score = make_score(["gain"], [gain], [], [], missing=False)
    texts = [[row.prompt, f"{row.prompt}, painted in oil, dog of red", row.prompt] for row in ROWS]
    pictures = render(ROWS, texts, 5, evaluation)
    rewards, watched = score(ROWS, texts, pictures)
    assert rewards.shape == (2, 3, 1) and watched.shape == (2, 3, 0)
    np.testing.assert_array_equal(rewards[:, ::2], 0)
    assert (np.abs(rewards[:, 1]) > 1e-6).all()
    # The noise is the prompt's own and, in training, fresh at each visit.
    assert len(set(pictures.seeds)) == 2
    again = render(ROWS, texts, 6, evaluation)
    assert (again.seeds == pictures.seeds) == evaluation
    assert torch.equal(again.images, pictures.images) == evaluation


def test_a_picture_that_cannot_be_drawn_is_missing_or_an_error(folders):
    """Never a black picture, never a silent 0: rewards of texts stay."""
    renderer, scorer = load_renderer(folders[0], cache_bytes=0), load_scorer(folders[1])
    with torch.no_grad():
        renderer.pipeline.transformer.proj_out.weight.fill_(float("nan"))
    functions = [image_rewards.alignment(scorer), image_rewards.faithfulness(scorer)]
    texts = [[row.prompt] for row in ROWS]
    with pytest.raises(RenderError):
        make_render(renderer, scorer.device, CONFIG, baselines=False)(ROWS, texts, 0, False)
    lenient = dataclasses.replace(CONFIG, on_judge_error="missing")
    pictures = make_render(renderer, scorer.device, lenient, baselines=True)(ROWS, texts, 0, False)
    score = make_score(["alignment", "faithfulness"], functions, ["seen"], functions[:1], missing=True)
    rewards, watched = score(ROWS, texts, pictures)
    assert np.isnan(rewards[..., 0]).all() and np.isnan(watched).all()
    np.testing.assert_array_equal(rewards[..., 1], 0)  # the prompt itself is as faithful as can be


def test_a_failed_judge_ends_a_command_with_one_line(capsys):
    def fail(_):
        raise RuntimeError("the judge is away")

    assert guarded(lambda: run_pipeline([1], [Stage("score", fail)])) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: stage 'score'") and "the judge is away" in written and written.count("\n") == 1
    with pytest.raises(StageError):
        guarded(lambda: run_pipeline([1], [Stage("score", fail)]), debug=True)
