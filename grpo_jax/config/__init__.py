"""The config of a run: `run.Config`, its sections, and the command line that reads them."""
