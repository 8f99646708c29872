"""Losses, advantages and their kin: pure functions of arrays, on JAX alone."""
