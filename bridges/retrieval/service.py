"""Retrieval in a pool of actors of a Ray cluster: each holds a part of the catalogue and an encoder.

A call is two rounds: whichever shard is free encodes a batch of the texts, then every shard counts its part with all
the vectors. Ray restarts an actor that dies; it loads its vectors from the cache and is asked again. Failures that
the pool cannot mend arrive here as typed errors.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridges.pool.cluster import (
    LOOPBACK,
    NAMESPACE,
    BatchLost,
    NotJoined,
    PoolLate,
    PoolLost,
    TokenRefused,
    cluster_session,
    first_line,
    is_gone,
    is_joined,
    join,
    start_cluster,
)
from bridges.pool.pool import Pool, Request, start_actors
from bridges.pool.section import PoolSection
from bridges.retrieval.catalogue import Fingerprint, default_cache, load_index, load_titles, open_index
from bridges.retrieval.encoders import Vectors, check_finite, load_encoder, resolved_name, stacked, titles_digest
from bridges.retrieval.errors import ActorLost, ConnectionLost, RetrievalError, RetrievalTimeout, ServiceNotFound
from bridges.retrieval.local import Shard
from bridges.retrieval.queries import Queries
from bridges.retrieval.ranking import Counts, Nearest, Scale, merge_counts, merge_nearest
from bridges.retrieval.retriever import RetrieverSection
from bridges.retrieval.whereabouts import find_service
from grpo_jax.errors import StopRun, UserError

_OBJECT_STORE = 256 * 2**20  # bytes, of a cluster started here: only queries and counts pass through it
_START_SECONDS = 600.0  # for actors to load encoder and vectors; a large catalogue on a slow disk takes minutes
_LIMITS = PoolSection(
    batch_attempts=100, batch_timeout=0
)  # Ray ends the restarts, and an actor that is late may serve others


class RankShard:
    """Judge of a pool: a part of the catalogue, and the encoder. `actor.described` reports its plain attributes."""

    def __init__(self, folder: str, encoder: str, shard: int, shards: int):
        """Take a part, from 0, of the index in a folder of `open_index`: a restart finds the same vectors there."""
        self._folder, self.encoder, self._number, self.shards = folder, encoder, shard, shards

    def load(self, device: str) -> "RankShard":
        """Load the encoder and this part's vectors onto "cpu" or "gpu:N", as the actor sees its cards.

        The device is that of a sentence encoder and of dense vectors.
        """
        if device != "cpu":
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the encoder is on the same card
        self._encoder = load_encoder(self.encoder, load_titles(self._folder), device=device)
        index = load_index(self._folder)
        if self._encoder.identity != index.fingerprint.encoder:
            raise UserError(f"encoder {self.encoder} is not the one that {self._folder} was made with")
        part = {"emphasis": self._encoder.emphasis, "shard": self._number, "shards": self.shards}
        self._shard = Shard(index, **part, device=_jax_device(device))
        self.items, self.fingerprint = index.vectors.shape[0], tuple(index.fingerprint)
        return self

    def encode(self, texts: list[str]) -> Vectors:
        """Encode one batch; NonFiniteScores if a vector is not finite."""
        vectors = self._encoder.encode(texts)
        check_finite(vectors, texts)
        return vectors

    def count(self, queries: Queries, scale: Scale, *vectors: Vectors) -> Counts:
        """Count over this part; `vectors` are those of the queries' batches, in their order."""
        return self._shard.count(queries, stacked(vectors), scale)

    def nearest(self, queries: Queries, count: int, *vectors: Vectors) -> Nearest:
        """Best items of this part."""
        return self._shard.nearest(queries, stacked(vectors), count)


class RayBackend:
    """A running service, as a `retriever.Backend`; made by `connect` and `start_service`."""

    def __init__(
        self,
        service: str,
        pool: Pool,
        *,
        timeout: float,
        owner: bool = False,
        address: str | None = None,
    ):
        """Take the actors in the order of their shards; `owner` says whether `close` ends the service.

        `timeout` is seconds of one attempt, `address` the cluster to join where this one is gone, as in `connect`.
        """
        said = _said(pool, timeout)
        self.items, self.encoder, self.fingerprint = said["items"], said["encoder"], Fingerprint(*said["fingerprint"])
        self._service = service
        self._pool: Pool | None = pool
        self._timeout = timeout
        self._address = address
        # Ray ends an actor when the handle goes with which it was made, whoever else holds one
        self._owned = pool if owner else None

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """`retriever.Backend.count` within the timeout."""
        return merge_counts(self._asked("count", queries, scale))

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """`retriever.Backend.nearest` within the timeout."""
        return merge_nearest(self._asked("nearest", queries, count), count)

    def _asked(self, method: str, queries: Queries, argument: Any) -> list[Any]:
        """Answers of every shard's method to the queries."""
        pool = self._pool or self.reconnect()  # handles of a cluster that was left must not be used
        deadline = time.monotonic() + self._timeout
        with typed_errors(self._timeout):
            vectors = pool.ask([Request("encode", [batch]) for batch in queries.texts], self._timeout)
            asked = [queries._replace(texts=[]), argument, *(answer.value for answer in vectors)]
            counted = [Request(method, asked, seat=seat.number) for seat in pool.seats]
            return [answer.value for answer in pool.ask(counted, deadline - time.monotonic())]

    def reconnect(self) -> Pool:
        """Look cluster and actors up again: the service may have been started again by hand.

        StopRun if another catalogue or encoder is served under its name.
        """
        self._pool = None
        import ray

        if ray.is_initialized() and is_gone():
            ray.shutdown()
        join_cluster(self._address, self._service)
        pool = _look_up(self._service, self._timeout)
        found = RayBackend(self._service, pool, timeout=self._timeout)
        if found.fingerprint != self.fingerprint:
            raise StopRun(
                f"the retrieval service {self._service!r} was started again with something else: "
                f"{found.fingerprint} instead of {self.fingerprint}"
            )
        self._pool = pool
        return pool

    def close(self) -> None:
        """End the actors if they were started through this object; a service started elsewhere goes on."""
        if self._owned is not None:
            self._owned.close()


def connect(titles: Sequence[str], section: RetrieverSection = RetrieverSection("ray")) -> RayBackend:
    """Find a service that was started with `python -m bridges.retrieval serve`.

    UserError if it serves another catalogue or encoder than expected.
    """
    service, timeout = section.service, section.timeout
    if not timeout > 0:
        raise ValueError(f"timeout: expected a number > 0, got {timeout}")
    join_cluster(section.address, service)
    pool = _look_up(service, max(timeout, _START_SECONDS))
    backend = RayBackend(service, pool, timeout=timeout, address=section.address)
    if backend.encoder != resolved_name(section.encoder):
        raise UserError(
            f"the retrieval service {service!r} was started with the encoder {backend.encoder}, not {section.encoder}"
        )
    ours = f"{len(titles)} titles, {titles_digest(titles)}"
    if backend.fingerprint.catalogue != ours:
        raise UserError(
            f"the retrieval service {service!r} serves another catalogue ({backend.fingerprint.catalogue}) than "
            f"this run's ({ours})"
        )
    return backend


@dataclass(frozen=True)
class ServiceSection:
    """A service to be started.

    Args:
        encoder: "tfidf", a folder, or a model's name.
        service: Name that `connect` looks for.
        shards: Actors that share the catalogue.
        cache: Folder that every node of the cluster sees; None for `default_cache()`.
        address: Host and port of a cluster to join; None starts one on this machine.
        host: Address of the cluster that is started; on a loopback one nothing outside this machine reaches it.
        cpus: Of each actor, like `gpus`; 0 GPUs keep it on the CPU.
        timeout: Seconds of a call made through the returned backend.
        restarts: How often Ray starts a dead actor again.
    """

    encoder: str = "tfidf"
    service: str = "retrieval"
    shards: int = 1
    cache: str | Path | None = None
    address: str | None = None
    host: str = LOOPBACK
    cpus: float = 1.0
    gpus: float = 0.0
    timeout: float = 120.0
    restarts: int = 3


def start_service(
    titles: Sequence[str], section: ServiceSection = ServiceSection(), *, shard_class: type[RankShard] = RankShard
) -> RayBackend:
    """Make or find the catalogue's vectors in the cache and start the actors that serve them.

    They live as long as this process, or until `close`. `titles` are those of all items, in the order of their rows.
    UserError if the service's name is taken, or the cluster has no room for it.
    """
    service, shards = section.service, section.shards
    if not 1 <= shards <= max(len(titles), 1):
        raise UserError(f"shards: expected 1 to {len(titles)}, the number of items, got {shards}")
    if section.address == "auto":
        raise UserError("address: auto may be anybody's cluster; give HOST:PORT, or leave it out to start one")
    if section.address is None:
        start_cluster(section.host, object_store=_OBJECT_STORE)
    else:
        join_cluster(section.address, service)
    import ray

    if _find_actor(service, 0) is not None:
        raise UserError(f"a retrieval service {service!r} runs on this cluster already")
    for kind, wanted in (("CPU", shards * section.cpus), ("GPU", shards * section.gpus)):
        if wanted > (there := ray.cluster_resources().get(kind, 0)):
            raise UserError(
                f"the retrieval service needs {wanted:g} {kind}s for {shards} actors, the cluster has {there:g}"
            )
    name = resolved_name(section.encoder)
    index = open_index(titles, load_encoder(name, titles), section.cache or default_cache())
    parts = [shard_class(str(index.folder), name, i, shards) for i in range(shards)]
    resources = {"num_cpus": section.cpus, "num_gpus": section.gpus}
    actors_section = PoolSection(resources=resources, max_restarts=section.restarts)
    actors = start_actors(service, parts, actors_section, [_actor_name(service, i) for i in range(shards)])
    pool = Pool(service, actors, _LIMITS, whole=True)
    try:
        _said(pool, _START_SECONDS)
    except RetrievalError as error:
        pool.close()
        raise UserError(f"the retrieval service did not start: {error} (see `ray status`)") from error
    return RayBackend(service, pool, timeout=section.timeout, owner=True)


def join_cluster(address: str | None, service: str) -> None:
    """Connect this process to a service's cluster, or raise ServiceNotFound; do nothing if it belongs to one already.

    Nothing of the run is placed there before the service itself was found. `address` is HOST:PORT; None or "auto" is
    where this user's `serve` of that name runs, and nowhere else.
    """
    if is_joined():
        return
    known = None
    if address in (None, "auto"):
        known = find_service(service)
        if known is None:
            raise ServiceNotFound(not_found(service, f"none of yours runs here{_foreign()}"))
        address = known.address
    try:
        join(address)
    except TokenRefused as error:
        raise ServiceNotFound(str(error)) from error
    except NotJoined as error:
        raise ServiceNotFound(not_found(service, str(error))) from error
    if known is not None and cluster_session() != known.session:
        import ray

        ray.shutdown()
        raise ServiceNotFound(not_found(service, f"at {address}, where it was, is another Ray cluster"))


def _foreign() -> str:
    """Describe the cluster that Ray itself would have joined."""
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"  # the last `ray start`
    found = os.environ.get("RAY_ADDRESS") or (current.read_text().strip() if current.is_file() else "")
    return f"; the Ray cluster at {found} is joined only if task.retrieval.address names it" if found else ""


@contextmanager
def typed_errors(seconds: float) -> Iterator[None]:
    """Raise a pool's failures, given its limit in seconds, as errors of `bridges.retrieval.errors`."""
    from ray import exceptions

    try:
        yield
    except RetrievalError:  # raised here, or in an actor
        raise
    except PoolLate as error:
        raise RetrievalTimeout(f"no answer within {seconds:g} s") from error
    except (PoolLost, BatchLost) as error:
        raise (ConnectionLost if is_gone() else ActorLost)(f"a shard died, or the cluster is gone: {error}") from error
    except (exceptions.RayError, ConnectionError) as error:
        raise ConnectionLost(first_line(error)) from error
    except Exception as error:
        raise RetrievalError(f"the service failed: {first_line(error)}") from error


def not_found(service: str, reason: str) -> str:
    """Message of `ServiceNotFound`: what is missing, and how to start it."""
    return (
        f"RetrievalService not found: {service!r} ({reason}); start the service with: "
        f"python -m bridges.retrieval serve --catalogue FILE --service {service}"
    )


def _actor_name(service: str, shard: int) -> str:
    return f"{service}-{shard}"


def _find_actor(service: str, shard: int) -> Any | None:
    import ray

    try:
        return ray.get_actor(_actor_name(service, shard), namespace=NAMESPACE)
    except ValueError:
        return None


def _look_up(service: str, timeout: float) -> Pool:
    with typed_errors(timeout):
        found = (_find_actor(service, i) for i in itertools.count())
        pool = Pool(service, [*itertools.takewhile(bool, found)], _LIMITS, whole=True)
    if not pool.seats:
        raise ServiceNotFound(not_found(service, "the cluster has no such actor"))
    try:
        shards = _said(pool, timeout)["shards"]
    except ActorLost as error:  # it keeps its name until whoever started it ends
        raise ServiceNotFound(not_found(service, f"its actor is dead, end its `serve`: {error}")) from error
    if len(pool.seats) < shards:
        raise ServiceNotFound(not_found(service, f"shard {len(pool.seats)} of {shards} is gone"))
    return pool


def _said(pool: Pool, seconds: float) -> dict[str, Any]:
    """Description of the service by a shard, once all have loaded."""
    with typed_errors(seconds):
        return pool.wait_until_ready(seconds)[0]


def _jax_device(name: str) -> Any:
    """JAX device of "cpu" (None) or of the actor's card."""
    if name == "cpu":
        return None
    import jax

    return jax.local_devices(backend="gpu")[int(name.removeprefix("gpu:"))]
