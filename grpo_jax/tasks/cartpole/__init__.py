"""CartPole: the same algorithms on a small task, which shows a bug within seconds, compiled as one function."""
