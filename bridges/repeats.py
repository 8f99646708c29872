"""Pictures that stand in a batch more than once: what looks at them need look once."""

from collections.abc import Iterable

import numpy as np


def distinct(pictures: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Where each picture stands first, and which of these each one is, by its bytes.

    A policy that has learned writes the same text often, and a text's picture is the same for a seed.

    Returns:
        Positions i64[m] of the m different ones, in order, and for each of n pictures its place i64[n] among them.
    """
    places: dict[bytes, int] = {}
    positions, found = [], []
    for position, picture in enumerate(pictures):
        if picture not in places:
            places[picture] = len(places)
            positions.append(position)
        found.append(places[picture])
    return np.array(positions, np.int64), np.array(found, np.int64)
