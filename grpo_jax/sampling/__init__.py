"""Sampling of completions."""
