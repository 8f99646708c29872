"""A value for each token, read off the policy's hidden states: PPO's baseline, and all that PPO adds to a policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

VALUE = "value"
"""The collection of variables that holds the head; the policy's own functions do not know it."""


def init_value_head(width: int) -> dict[str, jax.Array]:
    """A head of zeros, {"kernel": f32 [D], "bias": f32 []}: every value starts at 0 and the policy is untouched."""
    return {"kernel": jnp.zeros((width,), jnp.float32), "bias": jnp.zeros((), jnp.float32)}


def token_values(head: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
    """Values hidden · kernel + bias, f32 [.., T], of the states [.., T, D] that predict each token.

    The value of a token's state is thus what is expected before the token is drawn.
    """
    return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), head["kernel"], precision="highest") + head["bias"]
