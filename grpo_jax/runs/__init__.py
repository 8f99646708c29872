"""Runs: loading, training loop, evaluation, checkpoints and run directory."""
