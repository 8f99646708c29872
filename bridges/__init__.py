"""The PyTorch side: image generation, CLIP scores, device placement, and arrays handed over by dlpack.

Another distribution installs a top-level package of this name. Commands therefore look for `__grpo_jax__`
before they use it, and say which path was imported if it is missing. Importing this package imports neither
torch nor jax; its modules do.
"""

__grpo_jax__ = True
