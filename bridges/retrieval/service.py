"""Retrieval by a service: actors of a Ray cluster, each with the whole catalogue, that share a call's queries."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridges import ray_cluster
from bridges.ray_pool import RayPool, described, start_actors
from bridges.retrieval.encoders import (
    Fingerprint,
    RetrievalError,
    ServiceNotFound,
    cache_folder,
    digest,
    load_encoder,
    load_index,
    load_titles,
    open_index,
)
from bridges.retrieval.ranking import Counts, LocalBackend, Queries
from grpo_jax.config.judge import PoolSection
from grpo_jax.config.sections import RetrievalSection
from grpo_jax.errors import StopRun, UserError

SERVICE = "retrieval"
"""Name of the actors on their cluster, which a number follows."""
TIMEOUT = 600.0
"""Seconds one attempt of a call may take; an actor that died is noticed at once."""


class RankService:
    """Judge of an actor: the index in a folder of `open_index`, where a restart finds it again, and its encoder."""

    def __init__(self, folder: str, encoder: str):
        self._folder, self.encoder = folder, encoder

    def load(self, device: str) -> "RankService":
        """Load the encoder onto "cpu" or "gpu:N", as the actor sees its cards, and the vectors."""
        encoder, index = load_encoder(self.encoder, load_titles(self._folder), device=device), load_index(self._folder)
        if encoder.identity != index.fingerprint.encoder:
            raise UserError(f"encoder {self.encoder} is not the one that {self._folder} was made with")
        self._backend, self.fingerprint = LocalBackend(encoder, index), tuple(index.fingerprint)
        return self

    def count(self, queries: Queries) -> Counts:
        """Count over the catalogue."""
        return self._backend.count([queries])[0]


class RayBackend:
    """A running service, as a `retrieval.Backend`; `actors` are those that were started here, and end with it."""

    def __init__(self, section: RetrievalSection, actors: Sequence[Any] = ()):
        """Wait until the service's actors have loaded; ServiceNotFound if one is dead or missing."""
        self._section, self.actors = section, actors
        self._pool: RayPool | None = _found(section)
        self.encoder, self.fingerprint = self._pool.encoder, Fingerprint(*self._pool.fingerprint)

    def count(self, parts: Sequence[Queries]) -> list[Counts]:
        """Count within the timeout; after a call that failed cluster and actors are looked up again."""
        pool, self._pool = self._pool or _found(self._section), None
        if pool.fingerprint != self.fingerprint:  # it was started again by hand
            raise StopRun(f"the retrieval service was started again with {pool.fingerprint}")
        try:
            counts = pool.run("count", [((part,), {}) for part in parts], TIMEOUT)
        except RetrievalError:  # raised in an actor
            raise
        except ray_cluster.PoolLost as error:
            raise RetrievalError(str(error)) from error
        except Exception as error:
            raise RetrievalError(f"the service failed: {ray_cluster.told(error)}") from error
        self._pool = pool
        return counts


def _found(section: RetrievalSection) -> RayPool:
    """Join the cluster of a service, and find its actors by their names."""
    try:
        if section.address is None and ray_cluster.is_gone():  # Ray would find any cluster
            raise UserError("no cluster is joined without task.retrieval.address")
        ray_cluster.join(section.address)
        actors = list(itertools.takewhile(bool, (_find_actor(number) for number in itertools.count())))
        if not actors:
            raise UserError("the cluster has no actor of that name")
        description = described(actors)
    except (UserError, ray_cluster.ActorLost) as error:  # a dead one has its name until its `serve` ends
        raise ServiceNotFound(
            f"no retrieval service was found ({error}); start it with: python -m bridges.retrieval serve "
            "--catalogue FILE, and give the address that it prints"
        ) from error
    except ray_cluster.PoolLost as error:
        raise RetrievalError(str(error)) from error
    return RayPool(SERVICE, actors, description)


def _find_actor(number: int) -> Any | None:
    import ray

    with suppress(ValueError):
        return ray_cluster.attempt(ray.get_actor, f"{SERVICE}-{number}", namespace=ray_cluster.NAMESPACE)


def connect(titles: Sequence[str], section: RetrievalSection) -> RayBackend:
    """Find a service that was started with `python -m bridges.retrieval serve`; UserError if it serves another run."""
    backend = RayBackend(section)
    ours = (_absolute(section.encoder), f"{len(titles)} titles, {digest(titles)}")
    theirs = (backend.encoder, backend.fingerprint.catalogue)
    if theirs != ours:
        has, wants = (" and ".join(one) for one in (theirs, ours))
        raise UserError(f"the retrieval service has the encoder {has}; this run has {wants}")
    return backend


def start_service(titles: Sequence[str], section: RetrievalSection, pool: PoolSection) -> RayBackend:
    """Make or find the catalogue's vectors in the cache and start the actors that serve them.

    They live as long as this process. UserError if one serves the cluster already, or the cluster has no room for it.
    Every node must see the section's cache (None: `cache_folder()`).
    """
    ray_cluster.join(pool.address, object_store=256 * 2**20)  # only queries and counts pass through it
    if _find_actor(0) is not None:
        raise UserError("a retrieval service runs on this cluster already")
    name = _absolute(section.encoder)
    index = open_index(titles, load_encoder(name, titles), section.cache or cache_folder())
    actors = start_actors(SERVICE, RankService(str(index.folder), name), pool, named=True)
    try:
        return RayBackend(section, actors)
    except RetrievalError as error:
        raise UserError(f"the retrieval service did not start: {error} (see `ray status`)") from error


def _absolute(name: str) -> str:
    """Return an encoder's name, a folder as its absolute path: processes elsewhere have another working directory."""
    return str(Path(name).expanduser().resolve()) if name != "tfidf" and Path(name).expanduser().is_dir() else name
