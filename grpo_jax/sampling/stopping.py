"""Stop strings as an automaton over tokens: where a text stands is one number, which the next token moves on.

Over bytes it is that of Aho and Corasick (1975): a state is the longest beginning of a stop string that the text ends
with. A token is several steps of it at once, so a table [states, V] is all that the decoding loop needs.
"""

from collections.abc import Sequence

import numpy as np

START = 0
"""The state of a text without a token; tokenizers may write a text's first token otherwise than later ones."""


def stop_table(stops: Sequence[str], first: Sequence[bytes], later: Sequence[bytes]) -> np.ndarray:
    """The state that a token leads to: int32 [S, V], from `START` for a text that is empty.

    The state S, which has no row, is reached by the token that completes a stop string.

    Args:
        stops: At least one, none of them empty.
        first: What each of V tokens adds to a text that is empty, in bytes; b"" for nothing.
        later: What each adds to any other.

    Raises:
        ValueError: There is no stop string, or an empty one.
    """
    if not stops or not all(stops):
        raise ValueError(f"stops: expected texts that are not empty, got {list(stops)}")
    moves, found = _byte_moves([stop.encode() for stop in stops])
    ended = len(found)
    moves = np.vstack([np.where(found[moves], ended, moves), np.full(256, ended)])  # what follows changes nothing
    begun, going = _token_moves(moves, np.zeros(1, int), first), _token_moves(moves, np.arange(ended), later)
    begun[:, [not piece for piece in first]] = START - 1  # the text is still empty
    return np.concatenate([begun, going]).astype(np.int32) + 1  # a row for START before those of the bytes' states


def _byte_moves(stops: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The automaton over bytes: next state int [S, 256], and bool [S], true where a stop string has just ended."""
    children: list[dict[int, int]] = [{}]
    found = [False]
    for stop in stops:
        state = 0
        for byte in stop:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                found.append(False)
            state = children[state][byte]
        found[state] = True
    moves, shorter = np.zeros((len(children), 256), int), [0] * len(children)
    waiting = [0]
    for state in waiting:  # breadth first: the state of a shorter ending is complete before it is asked
        if state:
            moves[state] = moves[shorter[state]]
        for byte, child in children[state].items():
            shorter[child] = moves[shorter[state], byte] if state else 0
            found[child] |= found[shorter[child]]
            moves[state, byte] = child
            waiting.append(child)
    return moves, np.array(found)


def _token_moves(moves: np.ndarray, states: np.ndarray, pieces: Sequence[bytes]) -> np.ndarray:
    """Where each token leads from each state: int [states, V]."""
    reached = np.repeat(states[:, None], len(pieces), axis=1)
    lengths = np.array([len(piece) for piece in pieces])
    for place in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > place).tolist()
        step = np.array([pieces[token][place] for token in longer])
        reached[:, longer] = moves[reached[:, longer], step]
    return reached
