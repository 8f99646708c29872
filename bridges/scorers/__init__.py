"""Scorers: a file for each, which holds one frozen dataclass.

Its fields are the judge's config (`judges.NAME.FIELD`), each with a help line; `load(device)` gives the object that
rewards get as the argument NAME. `grpo_jax.config.judge` is the protocol. A module here imports nothing heavy before
`load`.
"""
