"""The config of a run: `run.Config`, its sections, and its command line."""
