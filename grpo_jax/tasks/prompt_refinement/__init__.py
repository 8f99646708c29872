"""Prompt refinement: a prompt, a look at the picture that came of it, and a better prompt."""
