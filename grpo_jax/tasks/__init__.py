"""Tasks: what a policy is to learn, a folder for each. Nothing outside knows one by name."""
