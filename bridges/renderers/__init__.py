"""Renderers: a file for each, which holds one frozen dataclass.

Its fields are the judge's config (`judges.NAME.FIELD`), each with a help line; `load(device)` gives a renderer:
`draw(texts, seeds, *, evaluation) → float [B, 3, H, W] in [0, 1]`, `device`, `count_tokens(texts)`, `window` (tokens of
a text that reach the picture). `grpo_jax.config.judge` is the protocol. A module here imports nothing heavy before
`load`.
"""
