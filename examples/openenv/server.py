"""An OpenEnv server of guessing games (`pip install openenv` in an environment of its own).

    python examples/openenv/server.py 8000
    python -m grpo_jax.train --task text --policy.path Qwen/Qwen3-0.6B --data.tools openenv:http://127.0.0.1:8000 \
        --sampling.turns 4 …
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    """Guess the number."""

    number: int


class Hint(Observation):
    """The answer to a guess."""

    text: str


class Game(Environment):
    """A hidden number from 1 to 7."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, **options):
        """Hide the number of a seed."""
        self.number = random.Random(seed).randint(1, 7)
        return Hint(text="Guess a number from 1 to 7.")

    def step(self, action, **options):
        """Reward 1 for the number, which ends the episode."""
        right = action.number == self.number
        hint = "right" if right else "higher" if self.number > action.number else "lower"
        return Hint(text=hint, reward=float(right), done=right)


if __name__ == "__main__":
    app = create_app(Game, Guess, Hint, max_concurrent_envs=128)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
