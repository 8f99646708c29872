"""The hidden lens: visible in pictures, unknown from words, and undone by other words."""

import itertools

import numpy as np
import pytest

from bridges.miniature import world
from scripts.miniature import speech

drawing = pytest.importorskip("scripts.miniature.drawing")

CANONICAL = {"a", "at", "the", "on", *itertools.chain.from_iterable(world.VALUES.values())}
EVERY = [world.Lens(turn, mirrored) for turn in range(4) for mirrored in (False, True)]


def values_of(caption):
    """The six words of a caption by what they say, which may be of one colour and no scene."""
    _, sharpness, size, colour, shape, _, _, position, _, background = caption.split()
    return dict(zip(world.ATTRIBUTES, (shape, colour, size, position, background, sharpness), strict=True))


def rows_of(some):
    return np.array([[world.VALUES[name].index(word) for name, word in values_of(one).items()] for one in some])


def drawn(some, seed=0):
    return drawing.draw(rows_of(some), np.random.default_rng(seed))


def test_a_seed_has_one_lens_and_all_lenses_are_as_likely():
    seeds = np.random.default_rng(0).integers(0, 2**63, 4000).tolist()
    found = [world.lens_of(seed) for seed in seeds]
    assert found == [world.lens_of(seed) for seed in seeds]
    counts = np.array([found.count(one) for one in EVERY])
    assert counts.sum() == 4000 and counts.min() > 400 and counts.max() < 600


def test_the_checker_reads_what_a_lens_makes_of_a_scene():
    rows = speech.sample_indices(np.random.default_rng(0), 240)
    some = [speech.canonical_caption(speech.scene_of(row)) for row in rows]
    lenses = [EVERY[i % 8] for i in range(240)]
    found = world.read(world.look(drawn(some), lenses))
    expected = rows_of([world.seen(caption, one) for caption, one in zip(some, lenses, strict=True)])
    for one in EVERY:
        of = [glass == one for glass in lenses]
        assert (found[of] == expected[of]).mean(0).min() >= 0.95, one
    assert (found == expected).mean() >= 0.99


def test_the_oracle_gets_what_was_asked_for_out_of_the_lens():
    rows = speech.prompts("test", 64)
    lenses = [EVERY[i % 8] for i in range(64)]
    for row, one in zip(rows, lenses, strict=True):
        assert row["oracle"] == speech.canonical_caption(speech.complete(row["requested"]))
        assert set(world.undone(row["oracle"], one).split()) <= CANONICAL
    told = [world.undone(row["oracle"], one) for row, one in zip(rows, lenses, strict=True)]
    out = world.look(drawn(told), lenses)
    assert world.pixel_accuracy(out, [row["requested"] for row in rows]).mean() >= 0.99


def test_the_renderer_shows_all_pictures_of_a_seed_through_one_lens():
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from bridges.judges.hidden_lens import HiddenLens

    renderer = HiddenLens(steps=1, batch_size=4).load("cpu")
    seeds = [seed for seed in range(40) if world.lens_of(seed).turn][:4]
    out = renderer.draw(["a"] * 4, seeds, evaluation=False)
    plain = renderer.render(["a"] * 4, seeds, renderer.training)
    expected = world.look(plain, [world.lens_of(seed) for seed in seeds])
    assert torch.equal(out, expected) and not torch.equal(out, plain)
    assert "miniature: Stable Diffusion 3 behind hidden lenses, 1 step" in str(renderer)
