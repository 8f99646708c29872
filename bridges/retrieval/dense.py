"""Counts over dense vectors in JAX: blocks of items times 64 queries, float32, one compiled shape.

Catalogues of any size take the same code: a scan over blocks, whose scores never exist all at once.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bridges.retrieval.ranking import QUERIES, Counts, Nearest, Scale, check_rows, joined, merge_nearest, nearest_of

_BLOCK = 4096  # items at a time: scores of 64 queries then stay in the processor's cache
_NONE = -1  # fills up lists of excluded rows
_KINDS = (np.int64, np.int64, np.float64, np.float64)  # as `Counts` says


class DenseShard:
    """Rows of a catalogue of dense unit vectors, on one JAX device."""

    def __init__(self, vectors: np.ndarray, *, first: int = 0, device: jax.Device | None = None):
        """Move vectors f32 [N, E], unit or zero, to the device in blocks; NonFiniteScores if one is NaN or infinite.

        `first` is the first vector's row in the whole catalogue, `device` None the CPU.
        """
        self._device = device or _cpu()
        self._first = first
        self._count = len(vectors)
        block = min(_BLOCK, 1 << max(self._count - 1, 0).bit_length())
        blocks = _aligned_zeros((-(-self._count // block), block, vectors.shape[1]))
        rows = blocks.reshape(-1, vectors.shape[1])
        for start in range(0, self._count, block):
            part = vectors[start : start + block]
            check_rows(np.isfinite(part).all(1), first + start)
            rows[start : start + block][: len(part)] = part
        self._blocks = jax.device_put(blocks, self._device)  # on the CPU without a copy, being aligned

    def count(
        self, queries: np.ndarray, targets: np.ndarray, target_vectors: np.ndarray, exclude: np.ndarray, scale: Scale
    ) -> Counts:
        """Count over this shard's items for queries f32 [B, E] and targets i32 [B], their vectors f32 [B, E].

        Targets and the rows `exclude` i32 [B, X], padded with -1, are of the whole catalogue, in this shard or not.
        """
        parts = []
        exclude = np.where(exclude == _NONE, _NONE, exclude - self._first)
        for start in range(0, len(queries), QUERIES):
            rows = slice(start, start + QUERIES)
            count = len(queries[rows])
            arrays = (
                _padded(queries[rows], 0),
                _padded(target_vectors[rows], 0),
                _padded(targets[rows].astype(np.int32) - self._first, _NONE),
                _padded(_widened(exclude[rows]), _NONE),
            )
            counts = _count_dense(
                self._blocks,
                *jax.device_put(arrays, self._device),
                self._count,
                1 / scale.temperature,
                scale.tolerance,
            )
            counted = (np.asarray(array, kind)[:count] for array, kind in zip(counts, _KINDS, strict=True))
            parts.append(Counts(*counted, silent=~queries[rows].any(1)))
        return joined(parts)

    def nearest(self, queries: np.ndarray, exclude: np.ndarray, count: int) -> Nearest:
        """This shard's best for queries f32 [B, E], without the rows `exclude` [B, X] of the whole catalogue."""
        asked, parts = jax.device_put(queries, self._device), []
        for start in range(0, self._count, self._blocks.shape[1]):
            block = self._blocks[start // self._blocks.shape[1]]
            scores = np.array(jnp.matmul(asked, block.T, precision=jax.lax.Precision.HIGHEST))
            there = scores[:, : self._count - start]
            parts.append(nearest_of(there, exclude - self._first - start, count, first=self._first + start))
        return merge_nearest(parts, count)


@jax.jit
def _count_dense(blocks, queries, target_vectors, targets, exclude, count, sharpness, tolerance):
    """Return better i32, level i32, log_sum f32, score f32, each [B], by one pass over blocks [M, block, E]."""
    batch, size = queries.shape[0], blocks.shape[1]
    score = jnp.sum(queries * target_vectors, axis=1)
    above, below = (score + tolerance)[:, None], (score - tolerance)[:, None]
    lines = jnp.arange(batch)[:, None]
    out = jnp.concatenate([targets[:, None], exclude], axis=1)

    def step(carry, block):
        better, level, top, total = carry
        start, vectors = block
        # a GPU's default would round the factors to ten bits, and make ties of what is none
        scores = jnp.matmul(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)
        inside = (out >= start) & (out < start + size)
        scores = scores.at[lines, jnp.where(inside, out - start, size)].set(-jnp.inf, mode="drop")
        scores = jnp.where(start + jnp.arange(size) < count, scores, -jnp.inf)
        higher = jnp.sum(scores > above, axis=1, dtype=jnp.int32)
        level += jnp.sum(scores >= below, axis=1, dtype=jnp.int32) - higher
        # the target's own exponent keeps the maximum finite where a block has nothing to count
        exponents = scores * sharpness
        new_top = jnp.maximum(top, exponents.max(axis=1))
        total = total * jnp.exp(top - new_top) + jnp.exp(exponents - new_top[:, None]).sum(axis=1)
        return (better + higher, level, new_top, total), None

    none = jnp.zeros(batch, jnp.int32)
    start = (none, none, score * sharpness, jnp.zeros(batch, jnp.float32))
    starts = jnp.arange(blocks.shape[0], dtype=jnp.int32) * size
    (better, level, top, total), _ = jax.lax.scan(step, start, (starts, blocks))
    return better, level, top + jnp.log(total), score


def _cpu() -> jax.Device:
    """The CPU, or the default device where JAX_PLATFORMS leaves the CPU out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _aligned_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """float32 zeros that begin at a multiple of 64 bytes, which JAX takes over as they are."""
    size = 4 * int(np.prod(shape))
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(np.float32).reshape(shape)


def _padded(array: np.ndarray, fill: float) -> np.ndarray:
    """Pad the array to QUERIES rows."""
    short = QUERIES - len(array)
    return np.pad(array, [(0, short), *[(0, 0)] * (array.ndim - 1)], constant_values=fill) if short else array


def _widened(exclude: np.ndarray) -> np.ndarray:
    """Pad the lists to 16, 64, 256, … entries: few shapes, few compilations."""
    width = 16
    while width < exclude.shape[1]:
        width *= 4
    return np.pad(exclude, [(0, 0), (0, width - exclude.shape[1])], constant_values=_NONE)
