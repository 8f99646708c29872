"""Several processes, one mesh: process 0 runs the run, the others make the same calls on their devices.

    process 0    f(state, batch) ─► send name and arguments ─► barrier ─► f(state, batch)
    the others                           receive them       ─► barrier ─► f(state, batch)

Only process 0 has prompts, judges, files and a terminal. Its work on arrays on the mesh goes through `lead`: they
stay where they are and a message has their numbers; other arguments travel through the coordinator of
`jax.distributed`. At the barrier, on the host, every process has received the call: collectives begin together,
however long a judge took before them.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[..., Any]
_END = ""  # the name of the last message


class Channel(Protocol):
    """Transport of messages from process 0 to the others, each of them once and in order."""

    def tell(self, message: bytes, patience: float | None = None) -> None:
        """Send a message to all; returns when all have it, or after `patience` seconds."""
        ...

    def hear(self) -> bytes:
        """Return the next message, once there is one and all have it."""
        ...


class Company(Protocol):
    """The processes of a run."""

    @property
    def processes(self) -> int:
        """Number of processes."""
        ...

    def lead(self, name: str, function: Function) -> Function:
        """Return the function as all processes call it, each with its own of that name."""
        ...


class Alone(NamedTuple):
    """A run of one process."""

    processes: int = 1

    def lead(self, name: str, function: Function) -> Function:
        """Return the function itself."""
        return function


ALONE = Alone()


@dataclass(frozen=True)
class _Number:
    number: int


@dataclass(frozen=True)
class _Local:
    """An array of JAX on no mesh, or of typed random keys."""

    data: np.ndarray
    keys: str | None = None


class _Message(NamedTuple):
    """A call, with its arguments ready to travel.

    Attributes:
        first: The number of the first array it returns; the others follow in the order of the tree's leaves.
        deleted: Numbers of arrays whose memory process 0 has freed since the last call.
        dropped: Numbers that are used no more.
    """

    name: str
    given: Any
    first: int
    deleted: list[int]
    dropped: list[int]


class Leader:
    """Process 0's side."""

    def __init__(self, processes: int, channel: Channel):
        self.processes = processes
        self._channel, self._lock = channel, threading.Lock()
        self._arrays: dict[int, weakref.ref[jax.Array]] = {}
        self._freed: set[int] = set()  # reported as deleted, and still known by shape
        self._renamed: list[int] = []
        self._next = 0

    def lead(self, name: str, function: Function) -> Function:
        """Return the function, called in all processes; calls from several threads take turns."""

        def led(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                known = self._known()
                given = jax.tree.map(lambda leaf: _outgoing(leaf, known), (arguments, named))
                deleted, dropped = self._gone()
                self._channel.tell(pickle.dumps(_Message(name, given, self._next, deleted, dropped)))
                arguments, named = jax.tree.map(lambda leaf: _incoming(leaf, self._array), given)
                result = function(*arguments, **named)
                self._number(_arrays_of(result))
                return result

        return led

    def end(self, result: Any, patience: float | None = None) -> None:
        """Let the others go: `Follower.follow` returns `result` there. None waits for them as long as it takes."""
        message = pickle.dumps(_Message(_END, result, self._next, [], []))
        self._channel.tell(message, patience)  # no call is waited for: it may never end

    def _array(self, number: int) -> jax.Array:
        array = self._arrays[number]()
        assert array is not None  # an argument is
        return array

    def _known(self) -> dict[int, int]:
        return {id(array): number for number, known in self._arrays.items() if (array := known()) is not None}

    def _number(self, arrays: list[jax.Array]) -> None:
        known = self._known()
        for array in arrays:
            if (before := known.get(id(array))) is not None:  # given back as it was
                del self._arrays[before]
                self._renamed.append(before)
            self._arrays[self._next], known[id(array)] = weakref.ref(array), self._next
            self._next += 1

    def _gone(self) -> tuple[list[int], list[int]]:
        """Return the arrays freed, and those no longer referred to here, since the last call."""
        deleted, dropped, self._renamed = [], self._renamed, []
        for number, known in list(self._arrays.items()):
            array = known()
            if array is None:
                dropped.append(number)
                del self._arrays[number]
                self._freed.discard(number)
            elif array.is_deleted() and number not in self._freed:
                deleted.append(number)
                self._freed.add(number)
        return deleted, dropped


class Follower:
    """Any other process's side: it makes the calls of process 0."""

    def __init__(self, processes: int, channel: Channel):
        self.processes, self._channel = processes, channel
        self._functions: dict[str, Function] = {}
        self._arrays: dict[int, jax.Array] = {}

    def lead(self, name: str, function: Function) -> Function:
        """Keep the function for process 0's calls."""
        self._functions[name] = function
        return function

    def follow(self) -> Any:
        """Make the calls until the last, and return process 0's result; raises what a function raised."""
        while True:
            message: _Message = pickle.loads(self._channel.hear())
            if message.name == _END:
                return message.given
            for number in message.deleted:
                self._arrays[number].delete()
            for number in message.dropped:
                del self._arrays[number]
            arguments, named = jax.tree.map(lambda leaf: _incoming(leaf, self._arrays.__getitem__), message.given)
            result = self._functions[message.name](*arguments, **named)
            del arguments, named
            for place, leaf in enumerate(_arrays_of(result)):
                self._arrays[message.first + place] = leaf


def _outgoing(leaf: Any, known: dict[int, int]) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if id(leaf) in known:
        return _Number(known[id(leaf)])
    if not leaf.is_fully_addressable:
        raise ValueError(f"an array {leaf.shape} over several processes was made by process 0 alone")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _Local(np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf)))
    return _Local(np.asarray(leaf))


def _incoming(leaf: Any, array: Callable[[int], jax.Array]) -> Any:
    """Return an argument that has travelled, in process 0 too: all make the call with the same."""
    if isinstance(leaf, _Number):
        return array(leaf.number)
    if not isinstance(leaf, _Local):
        return leaf
    data = jnp.asarray(leaf.data)
    return data if leaf.keys is None else jax.random.wrap_key_data(data, impl=leaf.keys)


def _arrays_of(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
