"""A world of nine places as an environment class: walk to the goal, one step per turn.

python -m grpo_jax.train --config examples/grid/grid.yaml --run_dir runs/grid
"""

import random

MOVES = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}


class Grid:
    """Three rows of three places; a new policy of these words (policy.path "new") learns to walk."""

    words = (*MOVES, "at", "goal", "1", "2", "3")

    def reset(self, seed):
        """Return the prompt: the position and the goal."""
        places = [(row, column) for row in (1, 2, 3) for column in (1, 2, 3)]
        self.here, self.goal = random.Random(seed).sample(places, 2)
        return self._seen()

    def step(self, text):
        """Reward 1 at the goal, which ends the episode, and 0.5 for a step nearer; an invalid move has no effect."""
        before = self._distance()
        row, column = (place + move for place, move in zip(self.here, MOVES.get(text, (0, 0)), strict=True))
        if row in (1, 2, 3) and column in (1, 2, 3):
            self.here = row, column
        if self.here == self.goal:
            return None, 1.0, True
        return self._seen(), 0.5 * (self._distance() < before), False

    def _seen(self):
        return "at {} {} goal {} {}".format(*self.here, *self.goal)

    def _distance(self):
        return sum(abs(here - goal) for here, goal in zip(self.here, self.goal, strict=True))
