"""CartPole with GRPO, GDPO and PPO: the pure core alone, in a training function that jits and vmaps over seeds."""
