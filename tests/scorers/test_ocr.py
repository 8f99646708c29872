"""Text that is asked for in quotes and read in the picture, with the models that RapidOCR's package brings along."""

import functools
import random

import numpy as np
import pytest

from bridges.scorers.ocr import Ocr, edits, likeness, quoted
from grpo_jax.config import make_config

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('a sign that says "OPEN 24 HOURS"', "OPEN 24 HOURS"),
        ("“Café” above a door and 'TEA' on the window", "Café TEA"),
        ("a dog's bed, the dogs' bowl", ""),
        ("a fox", ""),
    ],
)
def test_what_stands_in_quotes_is_asked_for(prompt, text):
    assert quoted(prompt) == text


def test_edits_are_those_of_the_recursion():
    @functools.cache
    def slow(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    rng = random.Random(0)
    for _ in range(100):
        a, b = ("".join(rng.choices("abc", k=rng.randrange(7))) for _ in range(2))
        assert edits(a, b) == slow(a, b)
    assert likeness("xopeny", "open") == 1 and likeness("opon", "open") == 0.75 and likeness("", "open") == 0


def drawn(text, size=256):
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (size, size), (225, 215, 190))
    draw = ImageDraw.Draw(picture)
    draw.multiline_text((size // 12, size // 4), text, font=ImageFont.load_default(size=size // 8), fill=(120, 20, 30))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255


def test_pictures_with_the_text_earn_more_than_those_with_another():
    pytest.importorskip("rapidocr_onnxruntime")
    judge = Ocr().load("cpu")
    texts = ["HELLO", "Open\n24 hours", "HELP", "", "no matter"]
    prompts = ['a sign "Hello"', "a door, 'OPEN 24 HOURS' on it", 'a sign "Hello"', 'a sign "Hello"', "a sign"]
    images = torch.stack(list(map(drawn, texts)))
    assert "".join(judge.read(images[:1])) == "HELLO"
    rewards = judge(prompts, prompts, images=images)
    assert rewards[:2] == [1, 1] and 0 < rewards[2] < 1 and rewards[3:] == [0, None]
    assert judge(["a fox"], ["a fox"], images=images[:1]) == [None]


def test_a_config_names_it():
    config = make_config(task="prompt_enhancement", judges={"text": "ocr"}, rewards=["alignment", "text"])
    assert isinstance(config.judges["text"], Ocr) and config.judges["text"].memory()
