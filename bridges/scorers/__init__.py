"""Scorers: a file for each, which holds one frozen dataclass.

Its fields are the judge's config (`judges.NAME.FIELD`), each with a help line; `load(device)` gives the object that
rewards get as the argument NAME, with a `summary` for a line of the run's opening. `memory()` is what `--plan`
counts, as (name, bytes, note). `check()` refuses what is not there before any weight is read. A module here imports
nothing heavy before `load`.
"""
