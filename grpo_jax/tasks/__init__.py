"""Tasks of a policy, a module or folder for each. Nothing outside knows one by name."""
