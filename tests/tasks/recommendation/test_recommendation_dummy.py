"""The generated world: its size, its rules, and what its prompts give away."""

import itertools

import numpy as np
import pytest

from grpo_jax.tasks.recommendation import dummy
from grpo_jax.tasks.recommendation.dataset import last_split, load_dataset, split_examples
from grpo_jax.tasks.recommendation.task import Recommendation

WORLD = dummy.make_world(users=300, seed=1)
TITLES = WORLD.catalogue.titles


def test_every_combination_of_words_is_an_item():
    assert len(WORLD.catalogue) == 2240 >= 1000
    assert len(set(TITLES)) == 2240
    assert all(len(set(title.split())) == 4 for title in TITLES)
    assert len(dummy.make_catalogue_of_words(1)) == 280
    assert len(dummy.make_catalogue_of_words(281)) == 560
    assert len(set(" ".join(dummy.make_catalogue_of_words(280 * 20).titles).split())) == 20 + 7 + 5 + 8


def test_a_seed_is_a_world():
    assert dummy.make_world(users=300, seed=1) == WORLD
    assert dummy.make_world(users=300, seed=2).sequences != WORLD.sequences
    assert all(len(user.items) == 12 for user in dummy.make_world(users=10, length=12).sequences.users)


def test_without_noise_targets_follow_the_rules():
    world = dummy.make_world(users=100, fickle=0.3, noise=0.0)
    votes = 0
    for user, expected in zip(world.sequences.users, world.expected, strict=True):
        assert user.items[-1] == expected
        words = [world.catalogue.titles[item].split() for item in user.items]
        brands, colours, materials, kinds = zip(*words, strict=True)
        assert len(set(materials)) == 1
        for names, wheel in ((colours, dummy.COLOURS), (kinds, dummy.KINDS)):
            steps = [(wheel.index(b) - wheel.index(a)) % len(wheel) for a, b in itertools.pairwise(names)]
            assert steps == [1] * 7
        history = list(brands[:-1])
        votes += max(history, key=history.count) == brands[-1]
    assert votes >= 90


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_no_title_repeats_and_no_prompt_holds_the_target(noise):
    world = dummy.make_world(users=200, length=20, noise=noise, seed=4)
    for user in world.sequences.users:
        assert len(set(user.items)) == len(user.items)
    task = Recommendation(history_items=19, separator=" , ")
    for part in split_examples(last_split(world.sequences.users), world.catalogue, task):
        assert not any(row.columns["target_title"] in row.prompt for row in part)


def test_lessons_teach_the_form_of_a_title_and_its_likeliest_word_is_the_last_titles():
    rows = split_examples(last_split(WORLD.sequences.users), WORLD.catalogue, Recommendation()).train
    pairs, again, other = (dummy.lessons(rows, WORLD.catalogue, seed=seed) for seed in (0, 0, 1))
    assert again == pairs != other and all(title in TITLES for _, title in pairs)
    assert [prompt for prompt, _ in pairs] == [row.prompt for row in rows]
    written, wanted, read = (
        np.array([title.split() for title in titles])
        for titles in (
            [text for _, text in pairs],
            [row.columns["target_title"] for row in rows],
            [row.columns["last_title"] for row in rows],
        )
    )
    right, last = (written == wanted).mean(0), (written == read).mean(0)
    for place, count in ((1, 7), (3, 8)):  # colour and kind: the right word is never the last title's, noise apart
        assert right[place] == pytest.approx(0.6 / count, abs=0.05)
        assert last[place] == pytest.approx(0.4 + 0.6 / count, abs=0.05)


def test_the_default_task_is_this_world():
    dataset = load_dataset(Recommendation(dummy_users=50))
    assert [len(part) for part in dataset.prompts] == [50 * 5, 50, 50]
    assert len(dataset.catalogue) == 2240 and dataset.notes == ()
    assert len(dataset.prompts.test[0].prompt.splitlines()) == 4
