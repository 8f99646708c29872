"""Gives the policy that sees in the miniature's harder world its start: that of `train_policy_vl`, of scenes."""

from __future__ import annotations

from pathlib import Path

from scripts.miniature import lessons, train_policy_vl


def train(folder: Path, *, steps: int = 2500) -> None:
    """Train the start and write its Hugging Face folder."""
    train_policy_vl.train(folder, steps=steps, subject=lessons.TWO)
