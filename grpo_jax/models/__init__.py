"""Language policies: the only package that uses Flax for them."""
