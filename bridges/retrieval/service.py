"""Retrieval by actors of a Ray cluster: each holds a part of the catalogue and an encoder, as a pool's holds a judge.

A call is two rounds: each shard encodes some batches of the texts, then every shard counts its part with all the
vectors. Ray restarts an actor that dies, which loads its vectors from the cache, and asks it again (`max_restarts`,
`max_task_retries`). Failures that Ray cannot mend arrive here as typed errors.

`serve` leaves its cluster's address in a file that only the user can write. Ray's own ways to find a cluster
(RAY_ADDRESS, "auto") find anybody's: a run joins what this file or its config names.
"""

import itertools
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from bridges.pool import cluster
from bridges.pool.pool import require_room, start_actors
from bridges.retrieval.catalogue import Fingerprint, default_cache, load_index, load_titles, open_index
from bridges.retrieval.encoders import Vectors, check_finite, load_encoder, resolved_name, stacked, titles_digest
from bridges.retrieval.errors import RetrievalError, ServiceNotFound
from bridges.retrieval.local import Shard, Space
from bridges.retrieval.queries import Queries
from bridges.retrieval.ranking import Counts, Nearest, Scale, merge_counts, merge_nearest
from grpo_jax.config.files import load_json
from grpo_jax.config.judge import PoolSection
from grpo_jax.config.retrieval import RetrievalSection
from grpo_jax.errors import StopRun, UserError

_OBJECT_STORE = 256 * 2**20  # bytes, of a cluster started here: only queries and counts pass through it
_START_SECONDS = 600.0  # for actors to load encoder and vectors; a large catalogue on a slow disk takes minutes


class RankShard:
    """Judge of an actor: a part of the catalogue, and the encoder."""

    def __init__(self, folder: str, encoder: str, shard: int, shards: int):
        """Take a part, from 0, of the index in a folder of `open_index`: a restart finds the same vectors there."""
        self._folder = folder
        self._number = shard
        self.encoder = encoder
        self.shards = shards

    def load(self, device: str) -> "RankShard":
        """Load the encoder onto "cpu" or "gpu:N", as the actor sees its cards, and this part's vectors."""
        self._encoder = load_encoder(self.encoder, load_titles(self._folder), device=device)
        index = load_index(self._folder)
        if self._encoder.identity != index.fingerprint.encoder:
            raise UserError(f"encoder {self.encoder} is not the one that {self._folder} was made with")
        self._shard = Shard([Space(self._encoder, index)], shard=self._number, shards=self.shards)
        self.items, self.fingerprint = index.vectors.shape[0], tuple(index.fingerprint)
        return self

    def encode(self, texts: list[str]) -> Vectors:
        """Encode one batch; NonFiniteScores if a vector is not finite."""
        vectors = self._encoder.encode(texts)
        check_finite(vectors, texts)
        return vectors

    def count(self, queries: Queries, scale: Scale, *vectors: Vectors) -> Counts:
        """Count over this part; `vectors` are those of the queries' batches, in their order."""
        return self._shard.count(queries, [stacked(vectors)], scale)

    def nearest(self, queries: Queries, count: int, *vectors: Vectors) -> Nearest:
        """Best items of this part."""
        return self._shard.nearest(queries, [stacked(vectors)], count)


class RayBackend:
    """A running service, as a `retriever.Backend`; made by `connect` and `start_service`."""

    def __init__(self, section: RetrievalSection, actors: Sequence[Any], *, start: float = _START_SECONDS):
        """Take Ray's handles of the shards in their order, and wait for `start` seconds until they have loaded.

        ServiceNotFound if a shard is dead or missing.
        """
        service = section.service
        try:
            with typed_errors():
                attributes = cluster.get([actor.describe.remote() for actor in actors], start)[0][0]
        except RetrievalError as error:
            if isinstance(error.__cause__, cluster.ActorLost):  # it keeps its name until whoever started it ends
                raise ServiceNotFound(not_found(service, f"its actor is dead, end its `serve`: {error}")) from error
            raise
        if len(actors) < attributes["shards"]:
            raise ServiceNotFound(not_found(service, f"shard {len(actors)} of {attributes['shards']} is gone"))
        self.items: int = attributes["items"]
        self.encoder: str = attributes["encoder"]
        self.fingerprint = Fingerprint(*attributes["fingerprint"])
        self.actors = actors
        self._section = section
        # Ray ends an actor when the handle goes with which it was made, whoever else holds one
        self._owned: Sequence[Any] = ()

    def count(self, queries: Queries, scale: Scale) -> Counts:
        """`retriever.Backend.count` within the timeout."""
        return merge_counts(self._asked("count", queries, scale))

    def nearest(self, queries: Queries, count: int) -> Nearest:
        """`retriever.Backend.nearest` within the timeout."""
        return merge_nearest(self._asked("nearest", queries, count), count)

    def _asked(self, method: str, queries: Queries, argument: Any) -> list[Any]:
        """Answers of every shard's method to the queries; after a call that failed cluster and actors are looked up."""
        actors, self.actors = self.actors or self._found_again(), ()
        with typed_errors():
            asked = itertools.cycle(actors)
            vectors = [next(asked).call.remote("encode", batch) for batch in queries.texts]
            queries = queries._replace(texts=[])
            counted = [actor.call.remote(method, queries, argument, *vectors) for actor in actors]
            answers = cluster.get(counted, self._section.timeout)
        self.actors = actors
        return answers

    def _found_again(self) -> Sequence[Any]:
        """Handles of the service, which may have been started again by hand; StopRun if it serves something else."""
        import ray

        if ray.is_initialized() and cluster.is_gone():
            ray.shutdown()
        found = _found(self._section, self._section.timeout)
        if found.fingerprint != self.fingerprint:
            raise StopRun(
                f"the retrieval service {self._section.service!r} was started again with something else: "
                f"{found.fingerprint} instead of {self.fingerprint}"
            )
        return found.actors

    def close(self) -> None:
        """End the actors if they were started through this object; a service started elsewhere goes on."""
        import ray

        for actor in self._owned:
            with suppress(Exception):
                ray.kill(actor)


def connect(titles: Sequence[str], section: RetrievalSection = RetrievalSection(backend="ray")) -> RayBackend:
    """Find a service that was started with `python -m bridges.retrieval serve`.

    UserError if it serves another catalogue or encoder than expected.
    """
    service = section.service
    backend = _found(section, max(section.timeout, _START_SECONDS))
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


def _found(section: RetrievalSection, start: float) -> RayBackend:
    """Join the cluster of a service, and find its actors by their names."""
    service = section.service
    join_cluster(section.address, service)
    with typed_errors():
        actors = list(itertools.takewhile(bool, (_find_actor(service, shard) for shard in itertools.count())))
    if not actors:
        raise ServiceNotFound(not_found(service, "the cluster has no such actor"))
    return RayBackend(section, actors, start=start)


def start_service(
    titles: Sequence[str],
    section: RetrievalSection = RetrievalSection(),
    pool: PoolSection = PoolSection(replicas=1, resources={"num_cpus": 1.0}, max_restarts=3),
    *,
    host: str = cluster.LOOPBACK,
    shard_class: type[RankShard] = RankShard,
) -> RayBackend:
    """Make or find the catalogue's vectors in the cache and start the actors that serve them.

    They live as long as this process, or until `close`. UserError if the service's name is taken, or the cluster has
    no room for it.

    Args:
        titles: Of all items, in the order of their rows.
        section: Encoder, name, and cache, a folder that every node sees; None for `default_cache()`.
        pool: Actors that share the catalogue (`replicas`), what each is given, and the cluster to join. Without cards
            the encoder is on the CPU.
        host: Address of the cluster that is started; on a loopback one nothing outside this machine reaches it.
        shard_class: Of what the actors load.
    """
    service, shards = section.service, pool.replicas
    if not 1 <= shards <= max(len(titles), 1):
        raise UserError(f"shards: expected 1 to {len(titles)}, the number of items, got {shards}")
    if pool.address is None:
        cluster.start_cluster(host, object_store=_OBJECT_STORE)
    else:
        join_cluster(pool.address, service)
    if _find_actor(service, 0) is not None:
        raise UserError(f"a retrieval service {service!r} runs on this cluster already")
    require_room(service, pool)
    name = resolved_name(section.encoder)
    index = open_index(titles, load_encoder(name, titles), section.cache or default_cache())
    parts = [shard_class(str(index.folder), name, shard, shards) for shard in range(shards)]
    actors = start_actors(service, parts, pool, [_actor_name(service, shard) for shard in range(shards)])
    try:
        backend = RayBackend(section, actors)
    except RetrievalError as error:
        raise UserError(f"the retrieval service did not start: {error} (see `ray status`)") from error
    backend._owned = actors
    return backend


def join_cluster(address: str | None, service: str) -> None:
    """Connect this process to a service's cluster, or raise ServiceNotFound; do nothing if it belongs to one already.

    Nothing of the run is placed there before the service itself was found. `address` is HOST:PORT; None or "auto" is
    where this user's `serve` of that name runs, and nowhere else.
    """
    if cluster.is_joined():
        return
    running = None
    if address in (None, "auto"):
        running = find_service(service)
        if running is None:
            raise ServiceNotFound(not_found(service, f"none of yours runs here{_foreign()}"))
        address = running.address
    try:
        cluster.join(address)
    except cluster.TokenRefused as error:
        raise ServiceNotFound(str(error)) from error
    except cluster.NotJoined as error:
        raise ServiceNotFound(not_found(service, str(error))) from error
    if running is not None and cluster.cluster_session() != running.session:
        import ray

        ray.shutdown()
        raise ServiceNotFound(not_found(service, f"at {address}, where it was, is another Ray cluster"))


def _foreign() -> str:
    """Describe the cluster that Ray itself would have joined."""
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"  # the last `ray start`
    address = os.environ.get("RAY_ADDRESS") or (current.read_text().strip() if current.is_file() else "")
    return f"; the Ray cluster at {address} is joined only if task.retrieval.address names it" if address else ""


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise failures of a call as errors of `bridges.retrieval.errors`."""
    try:
        yield
    except RetrievalError:  # raised in an actor
        raise
    except cluster.PoolLost as error:
        raise RetrievalError(str(error)) from error
    except Exception as error:
        raise RetrievalError(f"the service failed: {cluster.first_line(error)}") from error


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
        return ray.get_actor(_actor_name(service, shard), namespace=cluster.NAMESPACE)
    except ValueError:
        return None


class Whereabouts(NamedTuple):
    """Cluster of one service, HOST:PORT, and its session: another one at that address is another cluster."""

    address: str
    session: str


def service_file(service: str) -> Path:
    """The file of a service of this name on this machine."""
    name = quote(f"{service}@{socket.gethostname()}", safe="@")  # homes are shared, loopbacks are not
    return default_cache().parent / "services" / f"{name}.json"


@contextmanager
def announced(service: str, where: Whereabouts) -> Iterator[None]:
    """Keep the file of a service while the block runs; UserError if it cannot be written."""
    path = service_file(service)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)  # 0600
        with os.fdopen(handle, "w") as file:
            json.dump(where._asdict(), file)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}), where training looks for the service") from error
    try:
        yield
    finally:
        with suppress(OSError, ValueError, UserError):
            if find_service(service) == where:  # not another's, who came after it
                path.unlink()


def find_service(service: str) -> Whereabouts | None:
    """Find this user's service of that name, which may have been killed since; None if no file names it.

    UserError if somebody else can write the file, or it is broken.
    """
    path = service_file(service)
    try:
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise UserError(f"{path} can be written by others; remove it and start the service again")
        return Whereabouts(**load_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read; remove it and start the service again") from error
