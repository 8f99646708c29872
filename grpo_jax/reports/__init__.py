"""Terminal output, metrics and report pages of a run."""
