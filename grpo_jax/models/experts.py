"""Mixtures of experts: each token runs through the few MLPs that a router picks for it.

Shazeer et al. 2017, arXiv:1701.06538. Tokens are sorted by expert and every expert multiplies its own rows
(`jax.lax.ragged_dot`), however many they are: none is dropped, so a token's state does not depend on who else is in the
batch.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.models.quantised import as_array


class Router(nn.Module):
    """The experts of each token and their weights.

    Attributes:
        experts: X, how many there are.
        chosen: k, how many of them a token runs through.
        normalised: whether the weights of the chosen ones add up to 1.
        dtype: of the computation.
        param_dtype: of the parameters.
    """

    experts: int
    chosen: int
    normalised: bool
    dtype: jax.typing.DTypeLike
    param_dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """States [N, D] to weights [N, k] and experts i32 [N, k]: the largest of softmax(x · embeddingᵀ)."""
        embedding = self.param("embedding", nn.initializers.zeros, (self.experts, x.shape[-1]), self.param_dtype)
        scores = (x @ embedding.astype(self.dtype).T).astype(jnp.float32)
        weights, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), self.chosen)
        weights = weights / weights.sum(axis=-1, keepdims=True) if self.normalised else weights
        return weights.astype(x.dtype), experts


class Experts(nn.Module):
    """The same projection of every expert, without bias.

    Attributes:
        experts: X, how many there are.
        features: width of the result.
        dtype: of the computation.
        param_dtype: of the parameters.
    """

    experts: int
    features: int
    dtype: jax.typing.DTypeLike
    param_dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Rows [M, in], sorted by expert, of which each has sizes i32 [X], to [M, features]."""
        shape = (self.experts, rows.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.zeros, shape, self.param_dtype)
        return jax.lax.ragged_dot(rows, as_array(kernel, self.dtype), sizes)


def sorted_by_expert(x: jax.Array, experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """States [N, D] as rows of experts i32 [N, k]: rows [N·k, D], their old places i32 [N·k], sizes i32 [count]."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    return jnp.take(x, order // experts.shape[-1], axis=0), order, jnp.bincount(flat, length=count)


def mixed(rows: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """The experts' rows [N·k, D], back at their tokens and added up by the weights [N, k], to [N, D]."""
    places = jnp.argsort(order)
    back = jnp.take(rows, places, axis=0).reshape(*weights.shape, -1)
    return jnp.einsum("nkd,nk->nd", back, weights)
