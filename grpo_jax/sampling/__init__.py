"""How completions are drawn."""
