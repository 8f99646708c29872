"""A policy that ranks the catalogue itself: how it writes items, what is added to its ranking, and asking it."""
