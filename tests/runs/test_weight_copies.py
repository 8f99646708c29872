"""How often the weights lie in memory while a run trains: once, twice as moments, and once more as a reference."""

import gc

import jax
import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.errors import UserError
from grpo_jax.train import run


def copies(shape) -> int:
    """Places in memory that hold an array of this shape now; what Orbax saves are views of the same places."""
    gc.collect()
    return len({array.unsafe_buffer_pointer() for array in jax.live_arrays() if array.shape == shape})


class Probe:
    """A reward that counts, before each update, how often embeddings and head lie in memory; it may fail at one."""

    def __init__(self, fails_at: int = 0):
        self.counts, self.fails_at = [], fails_at
        self.before = copies((272, 32))  # of other tests

    def __call__(self, prompts, completions, **columns):
        if len(completions) == 16:
            self.counts.append((copies((272, 32)) - self.before) / 2)
            if len(self.counts) == self.fails_at:
                raise RuntimeError("the reward is away")
        return [float(len(text)) for text in completions]


@pytest.mark.wide  # that an update frees what it replaces is shown in tests/training/test_trainer.py
def test_a_run_and_its_resumption_hold_no_copy_too_many(place, tmp_path):
    arguments = [f"--config={place.config}", f"--run_dir={tmp_path / 'run'}", "--evaluation.every=0"]
    arguments += [
        "--data.held_out=0",
        "--training.max_steps=3",
        "--algorithm.kl_coef=0.1",
        "--algorithm.update_ref_every=1",
    ]
    config = parse(arguments).replace(rewards=())

    first = Probe(fails_at=2)
    with pytest.raises(UserError, match="the reward is away"):
        run(config, rewards=[first])
    assert first.counts == [4] * 2

    second = Probe()
    run(config.replace(resume=True), rewards=[second])
    assert second.counts == [4] * 2
