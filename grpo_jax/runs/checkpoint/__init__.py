"""What a run goes on from: states on disk, each whole or not there, each checked when it is read."""

from grpo_jax.runs.checkpoint.checkpoints import Checkpoints, restore_params

__all__ = ["Checkpoints", "restore_params"]
