"""Retrieval in actors of a Ray cluster: each holds a part of the catalogue and an encoder.

A call is one round: the batches of texts are encoded by the shards in turn, their vectors go from actor to actor,
every shard counts its part, and the sums come back. An actor that dies is started again by Ray, loads its vectors
from the cache and repeats the call; only what Ray does not mend arrives here, as an error with a type.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridges.pool.cluster import LOOPBACK, NAMESPACE, start_cluster
from bridges.retrieval.catalogue import Fingerprint, default_cache, load_index, load_titles, open_index
from bridges.retrieval.cluster import fetch, join_cluster, not_found, rejoin_cluster, typed_errors
from bridges.retrieval.encoders import Vectors, check_finite, load_encoder, resolved_name, stacked, titles_digest
from bridges.retrieval.errors import ActorLost, RetrievalError, ServiceNotFound
from bridges.retrieval.local import Shard
from bridges.retrieval.queries import Queries
from bridges.retrieval.ranking import Counts, Nearest, Scale, merge_counts, merge_nearest
from grpo_jax.errors import StopRun, UserError

_OBJECT_STORE = 256 * 2**20  # bytes, of a cluster started here: only queries and counts pass through it
_START_SECONDS = 600.0  # for actors to load encoder and vectors; a large catalogue on a slow disk takes minutes


class Description(NamedTuple):
    """What a shard says about its service.

    Attributes:
        items: of the whole catalogue.
        shards: number of them.
        encoder: name it was started with.
        fingerprint: of catalogue and encoder.
    """

    items: int
    shards: int
    encoder: str
    fingerprint: Fingerprint


class RankShard:
    """The actor. It is made from a folder of the cache, so that a restart finds the same vectors."""

    def __init__(self, folder: str, encoder: str, shard: int, shards: int, device: str = "cpu"):
        """Loads the encoder and this shard's vectors.

        Args:
            folder: of the index, as `open_index` made it.
            encoder: as `load_encoder`.
            shard: which part, from 0.
            shards: number of parts.
            device: "cpu" or "gpu:N" as the actor sees its cards; of a sentence encoder and of dense vectors.
        """
        if device == "cpu":
            os.environ["JAX_PLATFORMS"] = "cpu"  # JAX is imported later, and only for dense vectors
        else:
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the encoder is on the same card
        self._encoder = load_encoder(encoder, load_titles(folder), device=device)
        index = load_index(folder)
        if self._encoder.identity != index.fingerprint.encoder:
            raise UserError(f"encoder {encoder} is not the one that {folder} was made with")
        device, emphasis = _jax_device(device), self._encoder.emphasis
        self._shard = Shard(index, emphasis=emphasis, shard=shard, shards=shards, device=device)
        self._description = Description(index.vectors.shape[0], shards, encoder, index.fingerprint)

    def describe(self) -> Description:
        """What this is; answered when everything is loaded."""
        return self._description

    def encode(self, texts: list[str]) -> Vectors:
        """Vectors of one batch.

        Raises:
            NonFiniteScores: If one of them is not finite.
        """
        vectors = self._encoder.encode(texts)
        check_finite(vectors, texts)
        return vectors

    def count(self, queries: Queries, scale: Scale, *vectors: Vectors) -> Counts:
        """Counts of this part; `vectors` are those of the queries' batches, in their order."""
        return self._shard.count(queries, stacked(vectors), scale)

    def nearest(self, queries: Queries, count: int, *vectors: Vectors) -> Nearest:
        """The best items of this part."""
        return self._shard.nearest(queries, stacked(vectors), count)


class RayBackend:
    """A running service, as `retriever.Backend`; made by `connect` and `start_service`."""

    def __init__(
        self,
        service: str,
        actors: list[Any],
        description: Description,
        *,
        timeout: float,
        owner: bool = False,
        address: str | None = None,
    ):
        """Takes the actors in the order of their shards.

        Args:
            service: name.
            actors: handles.
            description: that they gave.
            timeout: seconds that one attempt may take.
            owner: whether closing ends the service.
            address: of a cluster to join where this one is gone, as `connect`.
        """
        self.items = description.items
        self.fingerprint = description.fingerprint
        self._service = service
        self._actors = actors
        self._timeout = timeout
        self._address = address
        # Ray ends an actor when the handle goes with which it was made, whoever else holds one
        self._owned = list(actors) if owner else []

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """As `retriever.Backend.count`, within the timeout."""
        return merge_counts(self._asked("count", queries, scale))

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """As `retriever.Backend.nearest`, within the timeout."""
        return merge_nearest(self._asked("nearest", queries, count), count)

    def _asked(self, method: str, queries: Queries, argument: Any) -> list[Any]:
        """What every shard's method says of the queries."""
        if not self._actors:  # the last look-up failed; handles of a cluster that was left must not be used
            self.reconnect()
        turns = len(self._actors)
        with typed_errors():
            vectors = [self._actors[i % turns].encode.remote(batch) for i, batch in enumerate(queries.texts)]
            asked = queries._replace(texts=[])  # their vectors go instead
            answers = [getattr(actor, method).remote(asked, argument, *vectors) for actor in self._actors]
        return fetch(answers, self._timeout)

    def reconnect(self) -> None:
        """Looks cluster and actors up again: the service may have been started again by hand.

        Raises:
            ServiceNotFound: One of them is not there.
            StopRun: Another catalogue or encoder is served under its name.
        """
        self._actors = []
        rejoin_cluster(self._address, self._service)
        actors, description = _look_up(self._service, self._timeout)
        if description.fingerprint != self.fingerprint:
            raise StopRun(
                f"the retrieval service {self._service!r} was started again with something else: "
                f"{description.fingerprint} instead of {self.fingerprint}"
            )
        self._actors = actors

    def close(self) -> None:
        """Ends the actors if they were started through this object; a service started elsewhere goes on."""
        import ray

        for actor in self._owned:
            ray.kill(actor)
        self._owned = []


def connect(
    titles: Sequence[str],
    *,
    encoder: str = "tfidf",
    service: str = "retrieval",
    address: str | None = None,
    timeout: float = 120.0,
) -> RayBackend:
    """Finds a service that was started with `python -m bridges.retrieval serve`.

    Args:
        titles: of the catalogue that is to be ranked.
        encoder: that is expected.
        service: name.
        address: host and port of the Ray cluster; None or "auto" for where this user's `serve` of that name runs.
        timeout: seconds that one attempt of a call may take.

    Raises:
        ServiceNotFound: There is no such cluster or service; the message says how to start one.
        UserError: It serves another catalogue or encoder.
    """
    if not timeout > 0:
        raise ValueError(f"timeout: expected a number > 0, got {timeout}")
    join_cluster(address, service)
    actors, description = _look_up(service, max(timeout, _START_SECONDS))
    if description.encoder != resolved_name(encoder):
        raise UserError(
            f"the retrieval service {service!r} was started with the encoder {description.encoder}, not {encoder}"
        )
    ours = f"{len(titles)} titles, {titles_digest(titles)}"
    if description.fingerprint.catalogue != ours:
        raise UserError(
            f"the retrieval service {service!r} serves another catalogue ({description.fingerprint.catalogue}) than "
            f"this run's ({ours})"
        )
    return RayBackend(service, actors, description, timeout=timeout, address=address)


def start_service(
    titles: Sequence[str],
    *,
    encoder: str = "tfidf",
    service: str = "retrieval",
    shards: int = 1,
    cache: str | Path | None = None,
    address: str | None = None,
    host: str = LOOPBACK,
    cpus: float = 1.0,
    gpus: float = 0.0,
    timeout: float = 120.0,
    restarts: int = 3,
    shard_class: type[RankShard] = RankShard,
) -> RayBackend:
    """Makes or finds the catalogue's vectors in the cache and starts the actors that serve them.

    They live as long as this process, or until `close`.

    Args:
        titles: of all items, in the order of their rows.
        encoder: "tfidf", a folder, or a model's name.
        service: name that `connect` looks for.
        shards: actors.
        cache: folder that every node of the cluster sees; None for `default_cache()`.
        address: host and port of a cluster to join; None starts one on this machine.
        host: address of the cluster that is started; on a loopback one nothing outside this machine reaches it.
        cpus: of each actor.
        gpus: of each actor; 0 keeps it on the CPU.
        timeout: seconds of a call made through the returned backend.
        restarts: how often Ray starts a dead actor again, and repeats a call that died with it.
        shard_class: class of the actors.

    Raises:
        UserError: A service of that name runs, there is not room enough for it, or encoder or cache are not usable.
    """
    if not 1 <= shards <= max(len(titles), 1):
        raise UserError(f"shards: expected 1 to {len(titles)}, the number of items, got {shards}")
    if address == "auto":
        raise UserError("address: auto may be anybody's cluster; give HOST:PORT, or leave it out to start one")
    if address is None:
        start_cluster(host, object_store=_OBJECT_STORE)
    else:
        join_cluster(address, service)
    import ray

    if _find_actor(service, 0) is not None:
        raise UserError(f"a retrieval service {service!r} runs on this cluster already")
    for kind, wanted in (("CPU", shards * cpus), ("GPU", shards * gpus)):
        if wanted > (there := ray.cluster_resources().get(kind, 0)):
            raise UserError(
                f"the retrieval service needs {wanted:g} {kind}s for {shards} actors, the cluster has {there:g}"
            )
    name = resolved_name(encoder)
    index = open_index(titles, load_encoder(name, titles), cache or default_cache())
    options = {"namespace": NAMESPACE, "num_cpus": cpus, "num_gpus": gpus}
    patience = {"max_restarts": restarts, "max_task_retries": restarts}
    remote = ray.remote(shard_class)
    actors = [
        remote.options(name=_actor_name(service, i), **options, **patience).remote(
            str(index.folder), name, i, shards, "gpu:0" if gpus else "cpu"
        )
        for i in range(shards)
    ]
    try:
        descriptions = fetch([actor.describe.remote() for actor in actors], _START_SECONDS)
    except RetrievalError as error:
        for actor in actors:
            ray.kill(actor)
        raise UserError(f"the retrieval service did not start: {error} (see `ray status`)") from error
    return RayBackend(service, actors, descriptions[0], timeout=timeout, owner=True)


def _actor_name(service: str, shard: int) -> str:
    return f"{service}-{shard}"


def _find_actor(service: str, shard: int) -> Any | None:
    import ray

    try:
        return ray.get_actor(_actor_name(service, shard), namespace=NAMESPACE)
    except ValueError:
        return None


def _look_up(service: str, timeout: float) -> tuple[list[Any], Description]:
    """The actors of a service and what they say."""
    with typed_errors():
        first = _find_actor(service, 0)
        if first is None:
            raise ServiceNotFound(not_found(service, "the cluster has no such actor"))
        try:
            description = fetch([first.describe.remote()], timeout)[0]
        except ActorLost as error:  # it keeps its name until whoever started it ends
            raise ServiceNotFound(not_found(service, f"its actor is dead, end its `serve`: {error}")) from error
        actors = [first, *(_find_actor(service, i) for i in range(1, description.shards))]
    if None in actors:
        raise ServiceNotFound(not_found(service, f"shard {actors.index(None)} of {len(actors)} is gone"))
    return actors, description


def _jax_device(name: str) -> Any:
    """The JAX device of "cpu" (None) or of the actor's card."""
    if name == "cpu":
        return None
    import jax

    return jax.local_devices(backend="gpu")[int(name.removeprefix("gpu:"))]
