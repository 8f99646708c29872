"""Retrieval by a service: actors of a Ray cluster, each with the whole catalogue, that share a call's queries.

Failures that a pool cannot fix arrive here as typed errors. `serve` leaves its cluster's address in a file that only
the user can write: Ray's own ways to find a cluster (RAY_ADDRESS, "auto") find anybody's.
"""

import itertools
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from bridges import ray_pool
from bridges.ray_pool import START_SECONDS, RayPool, described, start_actors
from bridges.retrieval.encoders import load_encoder, resolved_name, titles_digest
from bridges.retrieval.errors import RetrievalError, ServiceNotFound
from bridges.retrieval.index import Fingerprint, default_cache, load_index, load_titles, open_index
from bridges.retrieval.local import QUERIES, LocalBackend, Space
from bridges.retrieval.queries import Queries, of_rows
from bridges.retrieval.ranking import Counts, Nearest, Scale
from grpo_jax.config.files import load_json
from grpo_jax.config.judge import PoolSection
from grpo_jax.config.retrieval import RetrievalSection
from grpo_jax.errors import StopRun, UserError


class RankService:
    """Judge of an actor: the index in a folder of `open_index`, where a restart finds it again, and its encoder."""

    def __init__(self, folder: str, encoder: str, replicas: int):
        self._folder, self.encoder, self.replicas = folder, encoder, replicas

    def load(self, device: str) -> "RankService":
        """Load the encoder onto "cpu" or "gpu:N", as the actor sees its cards, and the vectors."""
        encoder, index = load_encoder(self.encoder, load_titles(self._folder), device=device), load_index(self._folder)
        if encoder.identity != index.fingerprint.encoder:
            raise UserError(f"encoder {self.encoder} is not the one that {self._folder} was made with")
        self._backend = LocalBackend(Space(encoder, index))
        self.items, self.fingerprint = self._backend.items, tuple(index.fingerprint)
        return self

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """Count over the catalogue."""
        return self._backend.count(queries, scale)

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """Return the catalogue's best items."""
        return self._backend.nearest(queries, count)


class RayBackend:
    """A running service, as a `retriever.Backend`; `close` ends it if it was started here."""

    def __init__(self, section: RetrievalSection, actors: Sequence[Any], *, owned: bool = False):
        """Wait until actors have loaded; ServiceNotFound if one is dead or missing."""
        self._section, self._owned = section, actors if owned else ()
        try:
            with _typed_errors():
                description = described(actors, max(section.timeout, START_SECONDS))
        except RetrievalError as error:
            if isinstance(error.__cause__, ray_pool.ActorLost):  # it keeps its name until whoever started it ends
                why = f"its actor is dead, end its `serve`: {error}"
                raise ServiceNotFound(_not_found(section.service, why)) from error
            raise
        replicas = description[1]["replicas"]
        if len(actors) < replicas:
            raise ServiceNotFound(_not_found(section.service, f"actor {len(actors)} of {replicas} is gone"))
        self._pool: RayPool | None = RayPool(section.service, actors, description)
        self.items, self.encoder = self._pool.items, self._pool.encoder
        self.fingerprint = Fingerprint(*self._pool.fingerprint)

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """Count over the whole catalogue within the timeout."""
        return Counts(*map(np.concatenate, zip(*self._asked("count", queries, scale), strict=True)))

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """Return the best items of the whole catalogue within the timeout."""
        return Nearest(*map(np.concatenate, zip(*self._asked("nearest", queries, count), strict=True)))

    def _asked(self, method: str, queries: Queries, argument: Any) -> list[Any]:
        """Ask about some queries at a time; after a call that failed cluster and actors are looked up again."""
        pool, self._pool = self._pool or self._found_again(), None
        starts = range(0, queries.mix.shape[0], QUERIES)
        requests = [((of_rows(queries, slice(start, start + QUERIES)), argument), {}) for start in starts]
        with _typed_errors():
            answers = pool.run(method, requests, self._section.timeout)
        self._pool = pool
        return answers

    def _found_again(self) -> RayPool:
        """Find the service, which may have been started again by hand; StopRun if it serves something else."""
        import ray

        if ray.is_initialized() and ray_pool.is_gone():
            ray.shutdown()
        found = _found(self._section)
        if found.fingerprint != self.fingerprint:
            raise StopRun(
                f"the retrieval service {self._section.service!r} was started again with something else: "
                f"{found.fingerprint} instead of {self.fingerprint}"
            )
        return found._pool

    def close(self) -> None:
        """End the actors if they were started through this object; a service started elsewhere goes on."""
        _kill(self._owned)


def connect(titles: Sequence[str], section: RetrievalSection = RetrievalSection(backend="ray")) -> RayBackend:
    """Find a service that was started with `python -m bridges.retrieval serve`; UserError if it serves another run."""
    backend = _found(section)
    ours = f"{len(titles)} titles, {titles_digest(titles)}"
    theirs = (backend.encoder, backend.fingerprint.catalogue)
    if theirs != (resolved_name(section.encoder), ours):
        raise UserError(
            f"the retrieval service {section.service!r} has the encoder {theirs[0]} and {theirs[1]}; this run has "
            f"{section.encoder} and {ours}"
        )
    return backend


def _found(section: RetrievalSection) -> RayBackend:
    """Join the cluster of a service, and find its actors by their names."""
    join_cluster(section.address, section.service)
    with _typed_errors():
        actors = list(itertools.takewhile(bool, (_find_actor(section.service, i) for i in itertools.count())))
    if not actors:
        raise ServiceNotFound(_not_found(section.service, "the cluster has no such actor"))
    return RayBackend(section, actors)


def start_service(
    titles: Sequence[str],
    section: RetrievalSection = RetrievalSection(),
    pool: PoolSection = PoolSection(resources={"num_cpus": 1.0}, batch_timeout=0.0),
    *,
    judge: type[RankService] = RankService,
) -> RayBackend:
    """Make or find the catalogue's vectors in the cache and start the actors that serve them.

    They live as long as this process, or until `close`. UserError if the service's name is taken, or the cluster has
    no room for it. Every node must see the section's cache (None: `default_cache()`).
    """
    if pool.address is None:
        ray_pool.join(None, object_store=256 * 2**20)  # only queries and counts pass through it
    else:
        join_cluster(pool.address, section.service)
    if _find_actor(section.service, 0) is not None:
        raise UserError(f"a retrieval service {section.service!r} runs on this cluster already")
    name = resolved_name(section.encoder)
    index = open_index(titles, load_encoder(name, titles), section.cache or default_cache())
    judges = [judge(str(index.folder), name, pool.replicas)] * pool.replicas
    names = [f"{section.service}-{number}" for number in range(pool.replicas)]
    actors = start_actors(section.service, judges, pool, names)
    try:
        return RayBackend(section, actors, owned=True)
    except RetrievalError as error:
        _kill(actors)
        raise UserError(f"the retrieval service did not start: {error} (see `ray status`)") from error


def join_cluster(address: str | None, service: str) -> None:
    """Connect this process to a service's cluster, or raise ServiceNotFound; keep one that it belongs to.

    `address` is HOST:PORT; None or "auto" is where this user's `serve` of that name runs, and nowhere else.
    """
    if ray_pool.import_ray().is_initialized():
        return
    if address in (None, "auto") and (address := find_service(service)) is None:
        why = "none of yours runs here, and no other is joined without task.retrieval.address"
        raise ServiceNotFound(_not_found(service, why))
    try:
        ray_pool.join(address)
    except UserError as error:
        refused = isinstance(error, ray_pool.TokenRefused)
        raise ServiceNotFound(str(error) if refused else _not_found(service, str(error))) from error


def _kill(actors: Sequence[Any]) -> None:
    import ray

    for handle in actors if not ray_pool.is_gone() else ():  # Ray would wait for it to come back
        with suppress(Exception):
            ray.kill(handle)


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Raise failures of a call as errors of `bridges.retrieval.errors`."""
    try:
        yield
    except RetrievalError:  # raised in an actor
        raise
    except ray_pool.PoolLost as error:
        raise RetrievalError(str(error)) from error
    except Exception as error:
        raise RetrievalError(f"the service failed: {ray_pool.told(error)}") from error


def _not_found(service: str, reason: str) -> str:
    return (
        f"RetrievalService not found: {service!r} ({reason}); start the service with: "
        f"python -m bridges.retrieval serve --catalogue FILE --service {service}"
    )


def _find_actor(service: str, number: int) -> Any | None:
    import ray

    with suppress(ValueError):
        return ray.get_actor(f"{service}-{number}", namespace=ray_pool.NAMESPACE)


def service_file(service: str) -> Path:
    """Return the file of a service of this name on this machine."""
    name = quote(f"{service}@{socket.gethostname()}", safe="@")  # homes are shared, loopbacks are not
    return default_cache().parent / "services" / f"{name}.json"


@contextmanager
def announced(service: str, address: str) -> Iterator[None]:
    """Keep the file of a service while the block runs; UserError if it cannot be written."""
    path = service_file(service)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump({"address": address}, file)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}), where training looks for the service") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_service(service: str) -> str | None:
    """Return the address of this user's service of that name, which may have been killed since; None without one.

    UserError if somebody else can write the file, or it is broken.
    """
    path = service_file(service)
    if not path.exists():
        return None
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UserError(f"{path} can be written by others; remove it and start the service again")
    try:
        return load_json(path)["address"]
    except (UserError, KeyError) as error:
        raise UserError(f"{path} cannot be read; remove it and start the service again") from error
