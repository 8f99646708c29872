"""Tasks of a policy, one module or folder each. No other package refers to a task by name."""
