"""The generated world: its rules, and what its prompts give away."""

import itertools

import pytest

from grpo_jax.tasks.recommendation import dataset
from grpo_jax.tasks.recommendation.dataset import last_split, load_dataset, split_examples
from grpo_jax.tasks.recommendation.task import Recommendation


def test_without_noise_targets_follow_the_rules():
    world = dataset.make_world(users=100, fickle=0.3, noise=0.0)
    votes = 0
    for user in world.sequences.users:
        words = [world.catalogue.titles[item].split() for item in user.items]
        brands, colours, materials, kinds = zip(*words, strict=True)
        assert len(set(materials)) == 1
        for names, wheel in ((colours, dataset.COLOURS), (kinds, dataset.KINDS)):
            steps = [(wheel.index(b) - wheel.index(a)) % len(wheel) for a, b in itertools.pairwise(names)]
            assert steps == [1] * 7
        history = list(brands[:-1])
        votes += max(history, key=history.count) == brands[-1]
    assert votes >= 90


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_no_title_repeats_and_no_prompt_holds_the_target(noise):
    world = dataset.make_world(users=200, length=20, noise=noise, seed=4)
    for user in world.sequences.users:
        assert len(set(user.items)) == len(user.items)
    task = Recommendation(history_items=19, separator=" , ")
    for part in split_examples(last_split(world.sequences.users), world.catalogue, task):
        assert not any(row.columns["target_title"] in row.prompt for row in part)


def test_the_default_task_is_this_world():
    dataset = load_dataset(Recommendation(dummy_users=50))
    assert [len(part) for part in dataset.prompts] == [50 * 5, 50, 50]
    assert len(dataset.catalogue) == 2240 and dataset.notes == ()
    assert len(dataset.prompts.test[0].prompt.splitlines()) == 4
