"""Common parts of the oracles: a case runs our function and another library's on the same random numbers.

The tests assert that the two agree; docs/make_oracles.py tabulates by how much they differ.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental
import numpy as np

# A context manager of jax's own name in newer versions, of jax.experimental in older ones.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

Pair = tuple[np.ndarray, np.ndarray]


class Compared(NamedTuple):
    """(ours, theirs) of the value, and of the gradient where the oracle has one."""

    value: Pair
    gradient: Pair | None = None


class Case(NamedTuple):
    """One function of ours against one oracle.

    Attributes:
        function: the public name of ours.
        setting: what is switched on, in words.
        oracle: what is called instead.
        run: (seed, dtype) → Compared. Inputs are rounded to the dtype, then both get the same numbers; ours
            computes in that dtype, the oracle in float64 where it can.
    """

    function: str
    setting: str
    oracle: str
    run: Callable[[int, type], Compared]

    @property
    def id(self) -> str:
        return f"{self.function}-{self.setting}".replace(" ", "_")


def difference(pair: Pair) -> float:
    """Largest absolute difference; NaN on one side alone is infinite."""
    ours, theirs = (np.asarray(x, np.float64) for x in pair)
    assert ours.shape == theirs.shape, f"shapes differ: {ours.shape} and {theirs.shape}"
    assert (np.isnan(ours) == np.isnan(theirs)).all(), "NaN in different places"
    return float(np.max(np.abs(np.nan_to_num(ours) - np.nan_to_num(theirs)), initial=0.0))


def run(case: Case, seed: int, dtype=np.float64) -> tuple[float, float | None]:
    """The case's largest differences: of the value, and of the gradient."""
    with enable_x64(True):
        compared = case.run(seed, dtype)
        return difference(compared.value), None if compared.gradient is None else difference(compared.gradient)


def policy_batch(seed: int, dtype=np.float64, *, rows: int = 6, length: int = 5, spread: float = 0.4) -> dict:
    """Random log-probabilities, entropies and advantages of rows of random lengths, at least one token each."""
    random = np.random.default_rng(seed)
    logprobs = -random.exponential(size=(rows, length)) - 0.05
    lengths = random.integers(1, length + 1, rows)
    parts = {
        "logprobs": logprobs,
        "old": logprobs + spread * random.normal(size=(rows, length)),
        "ref": logprobs + spread * random.normal(size=(rows, length)),
        "sampler": logprobs + spread * random.normal(size=(rows, length)),
        "entropy": random.exponential(size=(rows, length)).astype(np.float32),  # ties must stay ties in float32
        "advantages": random.normal(size=rows),
    }
    mask = np.arange(length) < lengths[:, None]
    return {name: part.astype(dtype) for name, part in parts.items()} | {"mask": mask}
