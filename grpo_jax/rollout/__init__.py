"""Rollouts: from prompts to rewards."""
