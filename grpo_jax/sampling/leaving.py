"""Completions that have ended leave: those that go on are gathered into a smaller batch, whose steps cost less.

The longest of a batch whose lengths are exponential is several times as long as the mean. In places for half, then for
a quarter of the completions, two to four times as many of the rows that a step computes are of use.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from grpo_jax.models import cache as caches

_SHORT = 32  # tokens up to which completions end at times that hardly differ
_PARTS = (2, 4)  # what fits into a half, then into a quarter, goes on there


class Narrower(NamedTuple):
    """A smaller batch.

    Attributes:
        places: How many prompts, or completions, it holds.
        apart: Whether it holds single completions, each beside a copy of what its prompt left to be read; else whole
            groups.
    """

    places: int
    apart: bool


def narrowers(prompts: int, group: int, prompt_length: int, length: int) -> tuple[Narrower, ...]:
    """The smaller batches for P prompts of L tokens, and G completions of up to T tokens each.

    Completions leave one by one where copies of their prompts take no more than their own keys and values; where
    prompts are longer than completions, half of the prompts go on once the others' groups have ended. None where
    completions are short: each batch compiles the step once more.

    >>> narrowers(8, 8, 32, 64)
    (Narrower(places=32, apart=True), Narrower(places=16, apart=True))
    >>> narrowers(8, 8, 512, 64), narrowers(8, 8, 32, 16), narrowers(1, 2, 32, 64)
    ((Narrower(places=4, apart=False),), (), (Narrower(places=1, apart=True),))
    """
    if length <= _SHORT:
        return ()
    apart = prompt_length <= length
    rows = prompts * group if apart else prompts
    return tuple(Narrower(rows // part, apart) for part in (_PARTS if apart else _PARTS[:1]) if rows >= part)


def run(step: Callable, loop, until: int | jax.Array, smaller: tuple[Narrower, ...]):
    """Step until so many tokens are written or nothing is left to write, in ever smaller batches.

    Args:
        step: Loop → Loop of a batch of any size.
        loop: `writing.Loop`.
        until: Tokens.
        smaller: The batches that are left to go on in.
    """
    narrower = smaller[0] if smaller else Narrower(0, apart=True)
    loop = lax.while_loop(lambda loop: (loop.step < until) & (_going_on(loop, narrower) > narrower.places), step, loop)
    if not smaller:
        return loop
    places = _places(loop, narrower)
    # Where it does not fit, `until` is reached, and nothing is done in the smaller batch.
    part = run(
        step, _taken(loop, places), jnp.where(_going_on(loop, narrower) > narrower.places, 0, until), smaller[1:]
    )
    return _put_back(loop, places, part)


def _going_on(loop, narrower: Narrower) -> jax.Array:
    """Completions, or prompts with one, that go on: i32 scalar."""
    done = loop.done if narrower.apart else jnp.all(loop.done, axis=1)
    return jnp.sum(~done)


def _places(loop, narrower: Narrower) -> caches.Places:
    """Where in the batch those stand that go on, and some that have ended beside them."""
    done = loop.done.reshape(-1) if narrower.apart else jnp.all(loop.done, axis=1)
    order = jnp.argsort(done, stable=True)[: narrower.places]
    return caches.Places(*jnp.divmod(order, loop.done.shape[1])) if narrower.apart else caches.Places(order)


def _taken(loop, places: caches.Places):
    """The smaller batch: of single completions each is a prompt's only one."""
    part = {name: jax.tree.map(places.take, tree) for name, tree in _of_completions(loop).items()}
    prefix = jax.tree.map(lambda x: x[places.prompts], loop.prefix)
    return loop._replace(prefix=prefix, cache=caches.take(loop.cache, places), **part)


def _put_back(loop, places: caches.Places, part):
    """The batch with what the smaller one has written; nobody writes to the prompts."""
    mine, theirs = _of_completions(loop), _of_completions(part)
    written = {name: jax.tree.map(places.put, mine[name], theirs[name]) for name in mine}
    return loop._replace(step=part.step, cache=caches.put(loop.cache, places, part.cache), **written)


def _of_completions(loop) -> dict[str, jax.Array]:
    """The fields [P, G, ..]."""
    others = ("step", "prefix", "cache")
    return {name: tree for name, tree in loop._asdict().items() if name not in others and tree is not None}
