"""Language policies: the only place that knows Flax."""
