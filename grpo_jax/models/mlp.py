"""A multilayer perceptron for small observations, such as CartPole's four numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

PyTree = Any
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"tanh": jnp.tanh, "relu": nn.relu}


class MLP(nn.Module):
    """Hidden layers with an activation, then one linear output that is squeezed: `[.., F]` → `[..]`.

    Attributes:
        hidden: width of each hidden layer; none makes it linear.
        activation: "tanh" or "relu".
        output_scale: gain of the last layer's orthogonal start; small, so that a policy starts near uniform.
    """

    hidden: Sequence[int] = (64,)
    activation: str = "tanh"
    output_scale: float = 0.01

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Observations `[.., F]` to one number each, `[..]`."""
        for width in self.hidden:
            x = ACTIVATIONS[self.activation](nn.Dense(width, kernel_init=nn.initializers.orthogonal(math.sqrt(2)))(x))
        return nn.Dense(1, kernel_init=nn.initializers.orthogonal(self.output_scale))(x)[..., 0]


class Network(NamedTuple):
    """A network as pure functions.

    Attributes:
        init: init(key) → parameters.
        apply: apply(parameters, observations `[.., F]`) → `[..]`.
    """

    init: Callable[[jax.Array], PyTree]
    apply: Callable[[PyTree, jax.Array], jax.Array]


def make_mlp(
    features: int, *, hidden: Sequence[int] = (64,), activation: str = "tanh", output_scale: float = 0.01
) -> Network:
    """Makes a perceptron with one output: the log-odds of one of two actions, or a value.

    Orthogonal start with gain √2 in the hidden layers and zero biases, as PPO's reference code has it
    (https://arxiv.org/abs/2005.12729, table 1).

    Args:
        features: F, length of an observation.
        hidden: width of each hidden layer.
        activation: "tanh" or "relu".
        output_scale: gain of the last layer's start.

    Raises:
        ValueError: a width below 1 or an unknown activation.
    """
    if features < 1 or any(width < 1 for width in hidden):
        raise ValueError(f"features, hidden: expected widths of at least 1, got {features}, {tuple(hidden)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {sorted(ACTIVATIONS)}, got {activation!r}")
    module = MLP(tuple(hidden), activation, output_scale)

    def init(key: jax.Array) -> PyTree:
        return module.init(key, jnp.zeros((1, features)))["params"]

    def apply(params: PyTree, observations: jax.Array) -> jax.Array:
        # As one matrix: on CPU a product with several leading axes, batched over seeds, takes four times as long.
        rows = observations.reshape(-1, features)
        return module.apply({"params": params}, rows).reshape(observations.shape[:-1])

    return Network(init, apply)


def count_parameters(params: PyTree) -> int:
    """Number of scalars in a tree of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
