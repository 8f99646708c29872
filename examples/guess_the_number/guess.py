"""The guessing game as an environment class, with hints: one environment of examples/grid/with_guess.yaml."""

import random

LARGEST = 7


class Guess:
    """A hidden number from 1 to 7; a new policy of these words (policy.path "new") learns to halve the range."""

    words = ("guess", "to", *map(str, range(1, LARGEST + 1)))

    def reset(self, seed):
        """Return the prompt: all numbers are possible."""
        self.number = random.Random(seed).randint(1, LARGEST)
        self.low, self.high = 1, LARGEST
        return self._left()

    def step(self, text):
        """Reward 1 for the number, which ends the episode; for another possible one half of the excluded share."""
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
