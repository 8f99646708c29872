"""Texts of a form, as an automaton over tokens: what `core.trie` is for texts that are listed.

From each state only those tokens exist that lead to another one; a text is whole in the last state, which none leaves.
A text has T tokens at most, and tokens behind which it could not be ended in time do not exist: each one is whole. A
node is a state and the tokens written so far. Axes: S states, V vocabulary, K kinds of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


class Form(NamedTuple):
    """An automaton over tokens; a pytree of arrays. The node of a state behind t tokens is state · (T + 1) + t.

    Attributes:
        moves: int32 [S, K], the state that a kind of token leads to from each state; -1 where it does not exist.
        kind: int32 [V], the kind of each token; those of a kind lead to the same states.
        far: int32 [S], the fewest tokens from each state to the end.
        text: int32 [S · (T + 1)], 0 at nodes where a text is whole and -1 elsewhere, as of a trie.
    """

    moves: jax.Array
    kind: jax.Array
    far: jax.Array
    text: jax.Array

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.kind)

    def children(self, nodes: jax.Array) -> jax.Array:
        """The tokens that may follow at some nodes: int [..] → bool [.., V]; none at a node below 0."""
        state, written = self._parts(nodes)
        to = self.moves[state]
        ends_in_time = self.far[to] + written[..., None] < self._width - 1
        return ((to >= 0) & ends_in_time & (nodes >= 0)[..., None])[..., self.kind]

    def follow(self, nodes: ArrayLike, tokens: ArrayLike) -> jax.Array:
        """The node that a token leads to: int32 [..], [..] → int32 [..]; -1 where it does not exist."""
        nodes = jnp.asarray(nodes)
        state, written = self._parts(nodes)
        to = self.moves[state, self.kind[jnp.asarray(tokens)]]
        exists = (to >= 0) & (self.far[to] + written < self._width - 1) & (nodes >= 0)
        return jnp.where(exists, to * self._width + written + 1, -1)

    @property
    def _width(self) -> int:
        return len(self.text) // len(self.far)

    def _parts(self, nodes: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.divmod(jnp.maximum(nodes, 0), self._width)


def make_form(table: np.ndarray, length: int) -> Form:
    """The form of a table int [S, V] of the state that each token leads to, -1 for none, and of at most T tokens.

    A text begins in the first state and is whole in the last. ValueError where none can be written in T tokens.
    """
    states = len(table)
    far = np.full(states + 1, length + 1)  # -1 is the entry behind the states
    far[states - 1] = 0
    while True:
        nearer = np.minimum(far[:-1], 1 + far[table].min(axis=1))
        if (nearer == far[:-1]).all():
            break
        far[:-1] = nearer
    if far[0] > length:
        raise ValueError(f"no text can be written in {length} tokens")
    # Tokens whose columns are alike are one kind.
    columns = np.ascontiguousarray(table.T.astype(np.int32))
    _, first, kind = np.unique(columns.view(f"V{4 * states}")[:, 0], return_index=True, return_inverse=True)
    text = np.repeat(np.where(np.arange(states) == states - 1, 0, -1), length + 1)
    return Form(*(jnp.asarray(x, jnp.int32) for x in (columns[first].T, kind, far[:-1], text)))


# An answer as JSON, byte by byte

DEAD = -1
_WHOLE = frozenset({b""})
# What may follow the first byte of a character in UTF-8, beside the last bytes (Unicode 16, table 3-7): range of first
# bytes, range of the second, bytes after that.
_UTF8 = (
    *((0xC2, 0xDF, 0x80, 0xBF, 0), (0xE0, 0xE0, 0xA0, 0xBF, 1), (0xE1, 0xEC, 0x80, 0xBF, 1)),
    *((0xED, 0xED, 0x80, 0x9F, 1), (0xEE, 0xEF, 0x80, 0xBF, 1), (0xF0, 0xF0, 0x90, 0xBF, 2)),
    *((0xF1, 0xF3, 0x80, 0xBF, 2), (0xF4, 0xF4, 0x80, 0x8F, 2)),
)


def json_moves(fields: Sequence[tuple[str, Sequence[str] | None]]) -> np.ndarray:
    r"""The bytes of a JSON object with these fields, in their order: the next state int [S, 256], -1 for none.

    A field is a name and the texts that its value may be, or None for any string. Strings are UTF-8 without control
    characters; `\"`, `\\` and `\/` are escaped. The object is written as `json.dumps` does, `{"prompt": "a fox",
    "steps": 20}`. It begins in state 0 and is whole in the last.
    """
    moves: list[dict[int, int]] = [{}]

    def new() -> int:
        moves.append({})
        return len(moves) - 1

    def literal(state: int, text: str) -> int:
        for byte in text.encode():
            moves[state][byte] = new()
            state = moves[state][byte]
        return state

    def string(state: int) -> int:
        """Any string from behind its opening quote."""
        last = [state]  # where a character goes on that has so many bytes left
        for _ in range(3):
            last.append(new())
            moves[last[-1]] = dict.fromkeys(range(0x80, 0xC0), last[-2])
        moves[state] = dict.fromkeys(set(range(0x20, 0x7F)) - set(b'"\\'), state)
        for low, high, second, limit, after in _UTF8:
            begun = new()
            moves[begun] = dict.fromkeys(range(second, limit + 1), last[after])
            moves[state] |= dict.fromkeys(range(low, high + 1), begun)
        escaped = literal(state, "\\")
        moves[escaped] = dict.fromkeys(b'"\\/', state)
        return literal(state, '"')

    def listed(state: int, texts: Sequence[str], end: str) -> int:
        """One of some texts; those that end alike share states."""
        known = {_WHOLE: new()}

        def leads(state: int, rests: frozenset[bytes]) -> int:
            known[rests] = state
            for byte in {rest[0] for rest in rests}:
                behind = frozenset(rest[1:] for rest in rests if rest[0] == byte)
                moves[state][byte] = known[behind] if behind in known else leads(new(), behind)
            return state

        leads(state, frozenset(f"{text}{end}".encode() for text in texts))
        return known[_WHOLE]

    state = literal(0, "{")
    for place, (name, texts) in enumerate(fields):
        end = "," if place + 1 < len(fields) else "}"
        state = literal(state, f'{" " if place else ""}"{name}": ')
        state = listed(state, texts, end) if texts is not None else literal(string(literal(state, '"')), end)
    order = [*range(state), *range(state + 1, len(moves)), state]
    number = {old: place for place, old in enumerate(order)}
    table = np.full((len(moves), 256), DEAD)
    for old, row in enumerate(moves):
        for byte, to in row.items():
            table[number[old], byte] = number[to]
    return table
