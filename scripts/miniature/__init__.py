"""Training and measurement of the miniature of `bridges.miniature`: `python -m scripts.miniature.build`."""
