"""What a run needs, before anything is loaded."""
