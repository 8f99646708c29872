"""Tasks: data and pure rewards. Judges (renderers, scorers, checkers) come as arguments."""
