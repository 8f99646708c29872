"""How far the policy gradient points from the true one where the completions of a group are no independent draws."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.core.advantages import group_advantages

ITEMS, POLICIES = 7, 12
PAGE = (Path(__file__).parents[2] / "docs/recommendation.md").read_text("utf-8")


def policies(spread):
    """Probabilities and rewards of so many random policies over a few items."""
    random = np.random.default_rng(0)
    logits, rewards = spread * random.normal(size=(POLICIES, ITEMS)), random.normal(size=(POLICIES, ITEMS))
    likely = np.exp(logits)
    return likely / likely.sum(1, keepdims=True), rewards


def drawn_sets(likely, group):
    """Every set of so many items, [S, G], and how likely each is drawn without replacement."""
    sets = np.array(list(itertools.combinations(range(ITEMS), group)))
    orders = likely[sets[:, list(itertools.permutations(range(group)))]]  # [S, G!, G]
    left = 1 - np.cumsum(orders, axis=-1) + orders
    return sets, np.prod(orders / left, axis=-1).sum(-1)


def gradient(likely, rewards, sets):
    """Of each set, [S, I]: the mean over its items of advantage · ∇ log π."""
    advantages = np.asarray(group_advantages(rewards[sets], scale="none"), np.float64)
    scores = np.eye(ITEMS)[sets] - likely
    return np.mean(advantages[..., None] * scores, axis=1)


def cosine(one, other):
    return one @ other / np.linalg.norm(one) / np.linalg.norm(other)


@pytest.mark.parametrize(("spread", "row"), [(1, "flat"), (2, "peaked")])
def test_the_page_says_how_biased_the_policy_gradient_is(spread, row):
    """Exactly, over all groups that there are; mean over the policies."""
    found = {"distinct": [], "beams": []}
    for group in (2, 3, 5):
        of_group = {"distinct": [], "beams": []}
        for likely, rewards in zip(*policies(spread), strict=True):
            true = likely * (rewards - likely @ rewards)
            sets, chances = drawn_sets(likely, group)
            of_group["distinct"].append(cosine(chances @ gradient(likely, rewards, sets), true))
            best = np.argsort(-likely)[None, :group]
            of_group["beams"].append(cosine(gradient(likely, rewards, best)[0], true))
        for made, cosines in of_group.items():
            found[made].append(f"{np.mean(cosines):.3f}"[1:])
    for made, cosines in found.items():
        (line,) = re.findall(rf"^\| `{made}`, {row} .*$", PAGE, re.MULTILINE)
        assert re.findall(r"\.\d+", line) == cosines
