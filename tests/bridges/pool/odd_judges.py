"""Judges for pools, in a file that nothing can import: they pause, fail, hang and die as their fields say."""

import asyncio
import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np

from grpo_jax.config.judge import Judge
from grpo_jax.errors import StopRun


class Odd(Judge):
    """Leaves a number of each copy in `folder`, and finds there what is to go wrong; the first takes `slow` seconds."""

    folder: str = ""
    slow: float = 0.0
    batch_size: int = 4

    def load(self, device):
        if (Path(self.folder) / "broken").exists():
            raise ValueError("no such weights")
        number = 0
        while True:
            try:
                (Path(self.folder) / f"copy{number}").mkdir()
                return Loaded(self, number, device)
            except FileExistsError:
                number += 1


class Loaded:
    window = 77

    def __str__(self):
        return "an odd judge"

    def __init__(self, judge, number, device):
        self.judge, self.number, self.device, self.hidden = judge, number, device, object()

    def lengths(self, texts, *, times=1):
        return [len(text) * times for text in texts]

    def squares(self, numbers):
        return numbers**2

    def sizes(self, texts):
        return [len(texts)] * len(texts)

    def copies(self, texts):
        if self.number == 0:
            time.sleep(self.judge.slow)
        return [self.number for _ in texts]

    def cards(self, texts):
        return [f"{self.device} of {os.environ.get('CUDA_VISIBLE_DEVICES')}"] * len(texts)

    def fails(self, texts):
        raise KeyError("no such word")

    def stops(self, texts):
        raise StopRun("the licence has expired")

    def draw(self, texts, seeds):
        return np.array([[ord(text) + seed, len(texts)] for text, seed in zip(texts, seeds, strict=True)], np.float32)

    def runs_out(self, texts):
        raise MemoryError("no room for pictures")

    def harmed(self, texts):
        """Harms its own process in the way that a file of the folder says, and takes that file away."""
        for harm in Path(self.judge.folder).glob("harm.*"):
            try:
                harm.unlink()
            except FileNotFoundError:  # another actor was first
                continue
            if harm.suffix == ".exit":
                os._exit(137)
            os.kill(os.getpid(), getattr(signal, harm.suffix.removeprefix(".")))
        return self.lengths(texts)

    def total(self, texts):
        return sum(map(len, texts))

    def dies(self, texts):
        if "poison" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.lengths(texts)

    async def __call__(self, prompts, completions, *, wish, **columns):
        await asyncio.sleep(0.01)
        return [text.count(letter) if letter else None for text, letter in zip(completions, wish, strict=True)]


def letters(prompts, completions, wish, **columns):
    """Share of letters; more for the letter that is wished for."""
    return [sum(c.isalpha() for c in text) / 8 + text.count(w) for text, w in zip(completions, wish, strict=True)]


def deadly(prompts, completions, wish, folder, **columns):
    """The same by a judge that dies in the middle of every second batch or so, as long as there are deaths left."""
    for death in sorted(Path(folder).glob("death*"))[:1]:
        if random.random() < 0.5:
            death.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
    return letters(prompts, completions, wish)


def holds(prompts, completions, **columns):
    """Holds the interpreter's lock for ever: nothing else in the process runs on."""
    return [re.match("(a+)+b", "a" * 64) for _ in completions]


def patient(prompts, completions, wish, **columns):
    """The same by a judge that takes its time."""
    time.sleep(0.5)
    return letters(prompts, completions, wish)


class Versioned(Judge):
    """Judges texts by a package that another judge needs in another version."""

    def load(self, device):
        import little

        return little
