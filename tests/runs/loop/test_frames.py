"""The way from the command to the loss is short enough to read."""

import sys
from pathlib import Path

import pytest

import grpo_jax
from grpo_jax.core import losses
from grpo_jax.train import main

MOST_FRAMES = 12  # of ours; those of JAX and of Python do not count
PACKAGE = str(Path(grpo_jax.__file__).parent)


def test_few_frames_lie_between_main_and_the_loss(place, tmp_path, monkeypatch, own_programs):
    found = []

    class Seen(Exception):
        """Ends the run where the loss would be compiled."""

    def looking(*arguments, **options):
        frame, names = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        found.extend(names)
        raise Seen

    monkeypatch.setattr(losses, "grpo_loss", looking)
    monkeypatch.setenv("JUDGE_RUN", str(tmp_path))
    words = [f"--run_dir={tmp_path / 'run'}", "--training.max_steps=1", "--evaluation.every=0", "--data.held_out=0"]
    with pytest.raises(Seen):
        main(["--config", str(place.config), *words])
    outer = found[: found.index("main") + 1]
    assert len(outer) + 1 <= MOST_FRAMES, outer
