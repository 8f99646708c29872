"""What the files of `bridges.scorers` load, a module for each."""
