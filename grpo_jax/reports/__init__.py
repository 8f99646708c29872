"""What a run tells: terminal, metrics, page."""
