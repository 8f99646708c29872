"""Rewards of pictures, with a judge whose space allows calculation by hand."""

import functools

import numpy as np
import pytest

from grpo_jax.errors import UserError
from grpo_jax.tasks import pictures as image_rewards


class Judge:
    """A scorer whose space is simple: a picture's features are its channel means, a text's count r, g and b."""

    def image_features(self, images):
        return np.asarray(images, np.float64).mean((2, 3))

    def text_features(self, texts):
        return np.array([[1e-3 + text.count(letter) for letter in "rgb"] for text in texts])

    def cosine(self, a, b):
        return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))

    def image_text(self, images, texts):
        return self.cosine(self.image_features(images), self.text_features(texts))

    def text_text(self, a, b):
        return self.cosine(self.text_features(a), self.text_features(b))


@pytest.fixture
def pictures():
    return np.random.default_rng(0).random((2, 4, 3, 2, 2)).astype(np.float32)


PROMPTS, REWRITES = ["rr g", "rr g", "b", "b"], ["rg", "rr g", "r", "bbb"]


def test_alignment_is_against_the_users_prompt(pictures):
    """Scored against the rewrite, writing what the picture shows anyway would pay."""
    judge, images = Judge(), pictures[0]
    rewards = image_rewards.alignment(PROMPTS, images=images, scorer=judge)
    for i, reward in enumerate(rewards):
        a = np.array([images[i, c].mean(dtype=np.float64) for c in range(3)])
        b = np.array([PROMPTS[i].count(letter) + 1e-3 for letter in "rgb"])
        assert reward == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)))


def test_gain_is_over_the_unchanged_prompts_picture(pictures):
    judge, (images, baseline) = Judge(), pictures
    align, gain = (
        functools.partial(reward, scorer=judge) for reward in (image_rewards.alignment, image_rewards.alignment_gain)
    )
    expected = np.subtract(align(PROMPTS, images=images), align(PROMPTS, images=baseline))
    np.testing.assert_allclose(gain(PROMPTS, images=images, baseline_images=baseline), expected)
    assert not gain(PROMPTS, images=images, baseline_images=images).any()


def test_faithfulness_is_a_hinge():
    judge = Judge()
    rewards = image_rewards.Faithfulness(margin=0.9)(PROMPTS, REWRITES, scorer=judge)
    similarity = judge.text_text(REWRITES, PROMPTS)
    assert rewards.tolist() == [0.0 if s >= 0.9 else pytest.approx(s - 0.9) for s in similarity]
    assert rewards[1] == rewards[3] == 0.0 and rewards[2] < -0.8
    with pytest.raises(UserError, match="margin"):
        image_rewards.Faithfulness(margin=80)


class Counter:
    """A renderer, as far as the length of a text goes."""

    window = 10

    def count_tokens(self, texts):
        return [len(text.split()) for text in texts]


def test_length_costs_beyond_the_target():
    texts = ["a " * n for n in (1, 6, 7, 10, 20)]
    assert image_rewards.Length(target=6)(texts, renderer=Counter()) == pytest.approx([0, 0, -0.1, -0.4, -1.4])
    assert image_rewards.Length()(texts, renderer=Counter()) == pytest.approx([0, 0, 0, 0, -1.0])
    with pytest.raises(UserError, match="target"):
        image_rewards.Length(target=11)(texts, renderer=Counter())
    with pytest.raises(UserError, match="target"):
        image_rewards.Length(target=0)
