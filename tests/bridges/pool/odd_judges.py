"""Judges for pools, in a file outside the import path: they pause, fail, hang or die as files of a folder tell them."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import numpy as np

from grpo_jax.config.judge import Judge
from grpo_jax.errors import StopRun


def taken(file):
    """Take a file away; False if another actor was first."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


class Odd(Judge):
    """Leaves a number of each copy in `folder`, and finds there what is to go wrong."""

    folder: str = ""
    batch_size: int = 4

    def load(self, device):
        if (Path(self.folder) / "broken").exists():
            raise ValueError("no such weights")
        number = 0
        while True:
            try:
                (Path(self.folder) / f"copy{number}").mkdir()
                return Loaded(Path(self.folder), number, device)
            except FileExistsError:
                number += 1


class Loaded:
    window = 77

    def __init__(self, folder, number, device):
        self.folder, self.number, self.device, self.hidden = folder, number, device, object()

    def __str__(self):
        return "an odd judge"

    def lengths(self, texts, *, times=1):
        return [len(text) * times for text in texts]

    def squares(self, numbers):
        return numbers**2

    def corners(self, images):
        return images[:, 0, 0, 0]

    def sizes(self, texts, place_in_group=()):
        return [len(texts)] * len(texts)

    def copies(self, texts):
        """Number of the copy; each first call of a copy takes as long as a file of the folder says."""
        for pause in self.folder.glob("pause.*"):
            if taken(pause):
                time.sleep(float(pause.suffix))
        return [self.number for _ in texts]

    def cards(self, texts):
        return [f"{self.device} of {os.environ.get('CUDA_VISIBLE_DEVICES')}"] * len(texts)

    def fails(self, texts):
        raise KeyError("no such word")

    def stops(self, texts):
        raise StopRun("the licence has expired")

    def draw(self, texts, seeds):
        return np.array([[ord(text) + seed, len(texts)] for text, seed in zip(texts, seeds, strict=True)], np.float32)

    def harmed(self, texts):
        """Harms its own process in the way that a file of the folder says, and takes that file away."""
        for harm in self.folder.glob("harm.*"):
            if taken(harm):
                if harm.suffix == ".exit":
                    os._exit(137)
                os.kill(os.getpid(), getattr(signal, harm.suffix.removeprefix(".")))
        return self.lengths(texts)

    def total(self, texts):
        return sum(map(len, texts))

    def holds(self, texts):
        """Hold the interpreter's lock for ever over one text: nothing else in the process runs on."""
        if "poison" in texts:
            re.match("(a+)+b", "a" * 64)
        return self.lengths(texts)

    async def __call__(self, prompts, completions, *, wish, **columns):
        await asyncio.sleep(0.01)
        return [text.count(letter) if letter else None for text, letter in zip(completions, wish, strict=True)]


def letters(prompts, completions, wish, **columns):
    """Share of letters; more for the letter that is wished for."""
    return [sum(c.isalpha() for c in text) / 8 + text.count(w) for text, w in zip(completions, wish, strict=True)]


def deadly(prompts, completions, wish, folder, **columns):
    """The same by a judge that dies once."""
    if taken(Path(folder) / "death"):
        os.kill(os.getpid(), signal.SIGKILL)
    return letters(prompts, completions, wish)


def talkative(completions, log_metric=None, **columns):
    log_metric("length", len(completions))
    return [len(completion[0]["content"]) for completion in completions]


def patient(prompts, completions, wish, **columns):
    """The same by a judge that takes its time."""
    time.sleep(0.5)
    return letters(prompts, completions, wish)


class Versioned(Judge):
    """Judges texts by a package that another judge needs in another version."""

    def load(self, device):
        import little

        return little
