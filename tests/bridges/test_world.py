"""The miniature world: its checker, its two languages, and its held-out combinations."""

import dataclasses
import gzip

import numpy as np
import pytest

from bridges.miniature import world
from scripts.miniature import speech, speech_scenes

vocabulary = pytest.importorskip("scripts.miniature.vocabulary")
drawing = pytest.importorskip("scripts.miniature.drawing")


@pytest.mark.parametrize(("count", "noise"), [(150, 0), (50, 0.03)])
def test_checker_reads_true_pictures(count, noise):
    rng = np.random.default_rng(3)
    rows = speech.sample_indices(np.random.default_rng(0), count)
    pictures = np.clip(drawing.draw(rows, rng) + rng.normal(0, noise, (count, 3, 32, 32)), 0, 1)
    assert (world.read(pictures) == rows).mean(axis=0).min() >= 0.99


def test_checker_refuses_what_shows_no_shape():
    plain = np.full((3, 32, 32), 0.97)
    assert world.read(plain[None])[0].tolist() == [-1, -1, -1, -1, world.VALUES["background"].index("white"), -1]
    noise = np.random.default_rng(0).random((20, 3, 32, 32))
    assert (world.read(noise)[:, 0] == -1).all()


def test_pixel_accuracy_counts_requested_attributes_only():
    scene = speech.Scene("ring", "cyan", "small", "left", "black", "sharp")
    pictures = drawing.draw(np.stack([drawing.indices(scene)] * 3))
    wanted = [
        {"shape": "ring", "colour": "cyan"},
        {"shape": "star", "colour": "cyan"},
        {**dataclasses.asdict(scene), "size": "large", "sharpness": None},
    ]
    np.testing.assert_allclose(world.pixel_accuracy(pictures, wanted), [1.0, 0.5, 0.8])


def test_languages_share_no_attribute_word():
    values = {value for values in world.VALUES.values() for value in values}
    assert not vocabulary.casual_words() & vocabulary.canonical_words()
    assert not vocabulary.casual_words() & vocabulary.filler_words()
    assert speech.SYNONYMS.keys() == values and len(vocabulary.casual_words()) == 2 * len(values)
    assert not any(set(row["prompt"].split()) & values for row in speech.prompts("train", 300))


@pytest.mark.parametrize(("name", "make"), [("world", speech.prompts), ("scenes", speech_scenes.prompts)])
def test_shipped_requests_are_what_the_script_makes(name, make):
    shipped = gzip.decompress((speech.FOLDER / f"{name}_prompts.jsonl.gz").read_bytes())
    assert shipped.decode() == speech.lines(make)


def test_oracle_says_everything_requested_in_canonical_words():
    for row in speech.prompts("test", 300):
        words = row["oracle"].split()
        assert set(words) <= vocabulary.canonical_words()
        assert all(word in words for word in row["requested"].values())
        scene = speech.complete(row["requested"])
        assert row["oracle"] == speech.canonical_caption(scene)
        assert {k: getattr(scene, k) for k in row["requested"]} == row["requested"]
    assert speech.complete({"shape": "star", "colour": "white"}).background == "black"


def test_splits_share_no_shape_and_colour_but_every_word():
    requests = {split: [row["requested"] for row in speech.prompts(split, 600)] for split in speech.SPLITS}
    pairs = {split: {(wanted["shape"], wanted["colour"]) for wanted in rows} for split, rows in requests.items()}
    assert [len(pairs[split]) for split in speech.SPLITS] == [30, 6, 12]
    assert not pairs["train"] & pairs["test"] and not pairs["train"] & pairs["validation"]
    assert not pairs["validation"] & pairs["test"]
    assert {shape for shape, _ in pairs["train"]} == set(world.VALUES["shape"])
    assert {colour for _, colour in pairs["train"]} == set(world.PALETTE)
