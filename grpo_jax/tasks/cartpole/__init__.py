"""CartPole: the same algorithms on a task that shows a mistake within seconds, compiled as one function."""
