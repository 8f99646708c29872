"""Functions of the core, each compiled as a whole rather than operation by operation."""

import functools

import jax
import numpy as np


def compiled(function):
    """The same function; arguments and options of arrays are traced, all other options are constants of the program."""

    @functools.partial(jax.jit, static_argnums=0)
    def program(constants, arguments, arrays):
        return function(*arguments, **dict(constants), **arrays)

    def call(*arguments, **options):
        arrays = {name: value for name, value in options.items() if any(map(is_array, jax.tree.leaves(value)))}
        constants = tuple(item for item in options.items() if item[0] not in arrays)
        return program(constants, arguments, arrays)

    return call


def is_array(leaf):
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))
