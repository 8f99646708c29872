"""From a judged batch to a better policy."""
