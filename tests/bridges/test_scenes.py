"""The miniature's harder world: its checker, its two languages, its held-out combinations, and a renderer that errs."""

import json

import numpy as np
import pytest

from bridges.miniature import scenes, world
from scripts.miniature import speech, speech_scenes

vocabulary = pytest.importorskip("scripts.miniature.vocabulary")
drawing = pytest.importorskip("scripts.miniature.drawing")


def true_pictures(kind, count, noise):
    """Pictures that show what casual prompts of a kind ask for, all else by chance, and the requests."""
    fill_in = pytest.importorskip("scripts.miniature.train_scorer_scenes").fill_in
    rng = np.random.default_rng(3)
    requests = [speech_scenes.casual_prompt(rng, kind)[1] for _ in range(count)]
    pictures = drawing.draw_scenes(np.stack([fill_in(rng, requested) for requested in requests]), rng)
    return np.clip(pictures + rng.normal(0, noise, pictures.shape), 0, 1), requests


@pytest.mark.parametrize("noise", [0, 0.05])
@pytest.mark.parametrize("kind", scenes.KINDS)
def test_checker_reads_true_pictures(kind, noise):
    assert scenes.pixel_accuracy(*true_pictures(kind, 100, noise)).mean() >= 0.99


@pytest.mark.parametrize(
    ("objects", "place", "right"),
    [
        ([["ring", "cyan"], ["star", "red"]], "left", True),
        ([["star", "red"], ["ring", "cyan"]], "right", True),
        ([["ring", "cyan"], ["star", "red"]], "above", False),
        ([["ring", "red"], ["star", "cyan"]], None, False),
        ([["ring", None], ["star", None]], None, True),
        ([["ring", None]], None, False),
        ([["ring", None], ["ring", None]], None, False),
    ],
)
def test_all_that_is_asked_for_and_nothing_else(objects, place, right):
    names = scenes.LAYOUTS, scenes.SHAPES, scenes.COLOURS, scenes.SHAPES, scenes.COLOURS
    words = "left", "ring", "cyan", "star", "red"
    picture = drawing.draw_scenes(np.array([[values.index(word) for values, word in zip(names, words, strict=True)]]))
    assert scenes.pixel_accuracy(picture, [{"objects": objects, "place": place}]).tolist() == [right]


def test_checker_sees_no_objects_where_there_are_none():
    assert scenes.read(np.full((3, 32, 32), 0.97)) == []
    requested = [{"objects": [["ring", None]], "place": None}]
    noise = np.random.default_rng(0).random((20, 3, 32, 32))
    assert not scenes.pixel_accuracy(noise, requested * 20).any()


def test_languages_share_no_word():
    casual = {word for pair in speech_scenes.SYNONYMS.values() for word in pair}
    assert len(casual) == 2 * len(speech_scenes.SYNONYMS) and not casual & speech_scenes.SYNONYMS.keys()
    for row in speech_scenes.prompts("train", 300):
        assert not set(row["prompt"].split()) & speech_scenes.SYNONYMS.keys()
        assert set(row["oracle"].split()) <= {"a", *speech_scenes.SYNONYMS}
    tokenizer = vocabulary.clip_tokenizer(vocabulary.scene_words())
    texts = [
        text for split in speech.SPLITS for row in speech_scenes.prompts(split, 200) for text in row["prompt"].split()
    ]
    assert all(len(tokenizer(word).input_ids) == 3 for word in {*texts, *speech_scenes.SYNONYMS})


def test_oracle_asks_for_what_is_requested():
    rows = drawing.sample_scenes(np.random.default_rng(0), 60_000)
    every = {speech_scenes.canonical_caption(drawing.request_of(row)): row for row in np.unique(rows, axis=0)}
    for split in speech.SPLITS:
        for row in speech_scenes.prompts(split, 60):
            assert scenes.pixel_accuracy(drawing.draw_scenes(every[row["oracle"]]), [row["requested"]]) == [1], row


def test_no_combination_that_is_held_out_is_trained_on():
    combinations = {}
    for split in speech.SPLITS:
        rows = speech_scenes.prompts(split, 600)
        assert [row["kind"] for row in rows[:12]] == [*scenes.KINDS] * 2
        words = {word for row in rows for word in row["oracle"].split()}
        assert split != "train" or words == {"a", *speech_scenes.SYNONYMS}
        of = combinations[split] = {"pair": set(), "number": set(), "colour": set(), "text": set()}
        for row in rows:
            objects, kind = row["requested"]["objects"], row["kind"]
            if kind in ("two_objects", "position") or (kind == "binding" and split == "train"):
                of["pair"].add(frozenset(shape for shape, _ in objects))
            if kind == "counting":
                of["number"].add((len(objects), objects[0][0]))
            if kind == "colour" or (kind == "binding" and split == "train"):
                of["colour"].update(map(tuple, objects))
            of["text"].add(row["prompt"])
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        for name, seen in combinations[one].items():
            assert seen and not seen & combinations[other][name], (one, other, name)


def test_the_noise_decides_whether_a_canonical_caption_is_drawn_right():
    pytest.importorskip("diffusers")
    build = pytest.importorskip("scripts.miniature.build")
    sd3 = pytest.importorskip("bridges.judges.stable_diffusion_3")
    figures = json.loads((build.WEIGHTS / "figures.json").read_text())
    assert all(figures["valid"].values()) and figures["erring"].keys() == figures["scenes"].keys()
    rows = world.prompts("erring", "test", 48)
    assert {row["kind"] for row in rows} == set(world.ERRING_KINDS)
    renderer = sd3.StableDiffusion3(path="miniature_erring", steps=4, batch_size=32).load("cpu")
    captions, seeds = [row["oracle"] for row in rows] * 2, list(range(96))
    pictures = renderer.draw(captions, seeds, evaluation=False).numpy()
    right = scenes.pixel_accuracy(pictures, [row["requested"] for row in rows] * 2).reshape(2, 48)
    assert 0.5 <= right.mean() <= 0.7
    assert np.mean(right.min(0) < right.max(0)) > 0.25  # the same caption, right and wrong
