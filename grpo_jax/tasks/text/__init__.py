"""Text: any policy, any prompts, rewards of the user's own."""
