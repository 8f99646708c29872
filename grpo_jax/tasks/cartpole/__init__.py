"""CartPole: the same algorithms where a mistake shows within seconds, all of training in one compiled function."""
