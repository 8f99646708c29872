"""The guessing game as an environment class, with hints: one environment of examples/grid/with_guess.yaml."""

import random

LARGEST = 7


class Guess:
    """A hidden number from 1 to 7; a policy made of these words (policy.path "new") learns to halve what is left."""

    words = ("guess", "to", *map(str, range(1, LARGEST + 1)))

    def reset(self, seed):
        """What is left: all numbers."""
        self.number = random.Random(seed).randint(1, LARGEST)
        self.low, self.high = 1, LARGEST
        return self._left()

    def step(self, text):
        """1 for the number, where it ends; for another that can be it half of the share that it rules out at least."""
        guess = int(text) if text.isdigit() else 0
        if guess == self.number:
            return None, 1.0, True
        if not self.low <= guess <= self.high:
            return self._left(), 0.0, False
        count = self.high - self.low + 1
        worth = 0.5 * (1 - max(guess - self.low, self.high - guess) / count)
        if guess < self.number:
            self.low = guess + 1
        else:
            self.high = guess - 1
        return self._left(), worth, False

    def _left(self):
        return f"guess {self.low} to {self.high}"
