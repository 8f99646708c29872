"""Renderers: a file for each, which holds one frozen dataclass.

Its fields are the judge's config (`judges.NAME.FIELD`), each with a help line; `load(device)` gives a renderer:
`draw(texts, seeds, *, evaluation) → float [B, 3, H, W] in [0, 1]`, `device`, `count_tokens(texts)`, `window` (tokens of
a text that reach the picture), `summary` for a line of the run's opening. `memory()` is what `--plan` counts, as (name,
bytes, note); `savings()` are changes of fields that take less, the mildest first. `check()` refuses what is not there
before any weight is read. A module here imports nothing heavy before `load`.
"""
