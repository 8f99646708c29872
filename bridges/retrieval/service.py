"""Retrieval service: actors of a Ray cluster, each with the whole catalogue, share a call's queries."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridges import ray_cluster
from bridges.ray_pool import RayPool, described
from bridges.retrieval import encoders
from bridges.retrieval.ranking import Counts, LocalBackend, Queries
from grpo_jax.config.sections import RetrievalSection
from grpo_jax.errors import StopRun, UserError

SERVICE = "retrieval"  # name of the actors on their cluster, which a number follows
TIMEOUT = 600.0  # seconds that an attempt of a call may take; a dead actor is noticed at once


class RankService:
    """Judge of an actor: the encoder, and the index in a folder of `open_index`, which a restart loads again."""

    def __init__(self, folder: str, encoder: str):
        self._folder, self.encoder = folder, encoder

    def load(self, device: str) -> "RankService":
        """Load the encoder onto "cpu" or "gpu:N" of the actor's GPUs, and the vectors."""
        index = encoders.load_index(self._folder)
        encoder = encoders.load_encoder(self.encoder, index.titles, device=device)
        if encoder.identity != index.fingerprint.encoder:
            raise UserError(f"encoder {self.encoder} is not the one that {self._folder} was made with")
        self._backend, self.fingerprint = LocalBackend(encoder, index), tuple(index.fingerprint)
        return self

    def count(self, queries: Queries) -> Counts:
        """Count over the catalogue."""
        return self._backend.count([queries])[0]


class RayBackend:
    """A running service as a `retrieval.Backend`; it ends the `actors` that were started here."""

    def __init__(self, address: str | None, actors: Sequence[Any] = ()):
        """Wait until the service's actors have loaded; ServiceNotFound if one is dead or missing."""
        self._address, self.actors = address, actors
        self._pool: RayPool | None = _find(address)
        self.encoder, self.fingerprint = self._pool.encoder, encoders.Fingerprint(*self._pool.fingerprint)

    def count(self, parts: Sequence[Queries]) -> list[Counts]:
        """Count within the timeout; after a failed call, look up cluster and actors again."""
        pool, self._pool = self._pool or _find(self._address), None
        if pool.fingerprint != self.fingerprint:  # somebody has restarted it
            raise StopRun(f"the retrieval service was started again with {pool.fingerprint}")
        try:
            counts = pool.run("count", [((part,), {}) for part in parts], TIMEOUT)
        except Exception as error:
            raise encoders.RetrievalError(f"the service failed: {ray_cluster.told(error)}") from error
        self._pool = pool
        return counts


def _find(address: str | None) -> RayPool:
    """Join the cluster of a service, and find its actors by their names."""
    try:
        if address is None and ray_cluster.is_gone():  # Ray would join any cluster
            raise UserError("no cluster is joined without task.retrieval.address")
        ray_cluster.join(address)
        actors = list(itertools.takewhile(bool, map(find_actor, itertools.count())))
        if not actors:
            raise UserError("the cluster has no such actor")
        return RayPool(SERVICE, actors, described(actors))
    except UserError as error:  # a dead actor keeps its name until its `serve` ends
        raise encoders.ServiceNotFound(
            f"no retrieval service was found ({error}); start it with: python -m bridges.retrieval serve "
            "--catalogue FILE, and give the address that it prints"
        ) from error


def find_actor(number: int) -> Any | None:
    """Return an actor of a service on the joined cluster; None if there is none."""
    import ray

    with suppress(ValueError):
        return ray_cluster.attempt(ray.get_actor, f"{SERVICE}-{number}", namespace=ray_cluster.NAMESPACE)


def connect(titles: Sequence[str], section: RetrievalSection) -> RayBackend:
    """Find the service at an address; UserError if it serves another run."""
    backend = RayBackend(section.address)
    ours = f"{absolute(section.encoder)} and {encoders.catalogue_identity(titles)}"
    theirs = f"{backend.encoder} and {backend.fingerprint.catalogue}"
    if theirs != ours:
        raise UserError(f"the retrieval service has the encoder {theirs}; this run has {ours}")
    return backend


def absolute(name: str) -> str:
    """Return an encoder's name, a folder as an absolute path: other processes have other working directories."""
    return str(Path(name).expanduser().resolve()) if name != "tfidf" and Path(name).expanduser().is_dir() else name
