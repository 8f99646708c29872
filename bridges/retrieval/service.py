"""Retrieval by a service: actors of a Ray cluster, each with the whole catalogue, that share a call's queries."""

import argparse
import itertools
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridges import ray_pool
from bridges.ray_pool import START_SECONDS, RayPool, described, start_actors
from bridges.retrieval.catalogue import read_catalogue_file
from bridges.retrieval.encoders import digest, load_encoder
from bridges.retrieval.index import Fingerprint, default_cache, load_index, load_titles, open_index
from bridges.retrieval.local import LocalBackend, Queries
from bridges.retrieval.ranking import Counts, RetrievalError, ServiceNotFound
from bridges.retrieval.retriever import Retriever
from grpo_jax.config.judge import PoolSection
from grpo_jax.config.sections import RetrievalSection
from grpo_jax.errors import StopRun, UserError, extras_named


class RankService:
    """Judge of an actor: the index in a folder of `open_index`, where a restart finds it again, and its encoder."""

    def __init__(self, folder: str, encoder: str, replicas: int):
        self._folder, self.encoder, self.replicas = folder, encoder, replicas

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
    """A running service, as a `retriever.Backend`; `actors` are those that were started here."""

    def __init__(self, section: RetrievalSection, actors: Sequence[Any] = ()):
        """Wait until the service's actors have loaded; ServiceNotFound if one is dead or missing."""
        self._section, self.actors = section, actors
        pool = _found(section)
        self._pool: RayPool | None = pool
        self.encoder, self.fingerprint = pool.encoder, Fingerprint(*pool.fingerprint)

    def count(self, parts: Sequence[Queries]) -> list[Counts]:
        """Count within the timeout; after a call that failed cluster and actors are looked up again."""
        pool, self._pool = self._pool or self._found_again(), None
        try:
            counts = pool.run("count", [((part,), {}) for part in parts], self._section.timeout)
        except RetrievalError:  # raised in an actor
            raise
        except ray_pool.PoolLost as error:
            raise RetrievalError(str(error)) from error
        except Exception as error:
            raise RetrievalError(f"the service failed: {ray_pool.told(error)}") from error
        self._pool = pool
        return counts

    def _found_again(self) -> RayPool:
        """Find the service, which may have been started again by hand; StopRun if it serves something else."""
        pool = _found(self._section)
        if Fingerprint(*pool.fingerprint) != self.fingerprint:
            name = self._section.service
            raise StopRun(f"the retrieval service {name!r} was started again with {pool.fingerprint}")
        return pool

    def close(self) -> None:
        """End the actors that were started here."""
        _kill(self.actors)


def _found(section: RetrievalSection) -> RayPool:
    """Join the cluster of a service, and find its actors by their names."""
    _join(section.address, section.service)
    try:
        actors = list(itertools.takewhile(bool, (_find_actor(section.service, i) for i in itertools.count())))
        if not actors:
            raise _not_found(section.service, "the cluster has no such actor")
        description = described(actors, max(section.timeout, START_SECONDS))
    except ray_pool.ActorLost as error:  # it keeps its name until the process that started it ends
        raise _not_found(section.service, f"its actor is dead, end its `serve`: {error}") from error
    except ray_pool.PoolLost as error:
        raise RetrievalError(str(error)) from error
    replicas = description[1]["replicas"]
    if len(actors) < replicas:
        raise _not_found(section.service, f"actor {len(actors)} of {replicas} is gone")
    return RayPool(section.service, actors, description)


def connect(titles: Sequence[str], section: RetrievalSection) -> RayBackend:
    """Find a service that was started with `python -m bridges.retrieval serve`; UserError if it serves another run."""
    backend = RayBackend(section)
    ours = (_absolute(section.encoder), f"{len(titles)} titles, {digest(titles)}")
    theirs = (backend.encoder, backend.fingerprint.catalogue)
    if theirs != ours:
        has, wants = (" and ".join(one) for one in (theirs, ours))
        raise UserError(f"the retrieval service {section.service!r} has the encoder {has}; this run has {wants}")
    return backend


def _find_actor(service: str, number: int) -> Any | None:
    import ray

    with suppress(ValueError):
        return ray_pool.attempt(ray.get_actor, f"{service}-{number}", namespace=ray_pool.NAMESPACE)


def _absolute(name: str) -> str:
    """Return an encoder's name, a folder as its absolute path: processes elsewhere have another working directory."""
    return str(Path(name).expanduser().resolve()) if name != "tfidf" and Path(name).expanduser().is_dir() else name


def _join(address: str | None, service: str) -> None:
    """Connect this process to a service's cluster at HOST:PORT, or raise ServiceNotFound; keep one that is there.

    Ray's own ways to find a cluster (RAY_ADDRESS, "auto") find anybody's.
    """
    if ray_pool.import_ray().is_initialized():
        if not ray_pool.is_gone():
            return
        sys.modules["ray"].shutdown()
    if address is None:
        raise _not_found(service, "no cluster is joined without task.retrieval.address")
    try:
        ray_pool.join(address)
    except ray_pool.TokenRefused as error:
        raise ServiceNotFound(str(error)) from error
    except UserError as error:
        raise _not_found(service, str(error)) from error


def _kill(actors: Sequence[Any]) -> None:
    import ray

    for handle in actors if not ray_pool.is_gone() else ():  # Ray would wait for it to come back
        with suppress(Exception):
            ray.kill(handle)


def _not_found(service: str, reason: str) -> ServiceNotFound:
    return ServiceNotFound(
        f"RetrievalService not found: {service!r} ({reason}); start the service with: "
        f"python -m bridges.retrieval serve --catalogue FILE --service {service}, and give the address that it prints"
    )


def start_service(
    titles: Sequence[str], section: RetrievalSection, pool: PoolSection, *, judge: type[RankService] = RankService
) -> RayBackend:
    """Make or find the catalogue's vectors in the cache and start the actors that serve them.

    They live as long as this process, or until `close`. UserError if the service's name is taken, or the cluster has
    no room for it. Every node must see the section's cache (None: `default_cache()`).
    """
    if pool.address is None:
        ray_pool.join(None, object_store=256 * 2**20)  # only queries and counts pass through it
    else:
        _join(pool.address, section.service)
    if _find_actor(section.service, 0) is not None:
        raise UserError(f"a retrieval service {section.service!r} runs on this cluster already")
    name = _absolute(section.encoder)
    index = open_index(titles, load_encoder(name, titles), section.cache or default_cache())
    judges = [judge(str(index.folder), name, pool.replicas)] * pool.replicas
    actors = start_actors(section.service, judges, pool, [f"{section.service}-{i}" for i in range(pool.replicas)])
    try:
        return RayBackend(section, actors)
    except RetrievalError as error:
        _kill(actors)
        raise UserError(f"the retrieval service did not start: {error} (see `ray status`)") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 after Ctrl-C or SIGTERM, 2 after a UserError."""
    parser = argparse.ArgumentParser("python -m bridges.retrieval", description="A retrieval service on Ray.")
    parser.add_argument("command", choices=["serve"], help="start a service, until Ctrl-C")
    parser.add_argument("--catalogue", required=True, help="file of the items: .tsv or .csv")
    parser.add_argument("--blank_titles", choices=("error", "keep"), default="error", help="items without a title")
    parser.add_argument("--encoder", default="tfidf", help='"tfidf", a sentence-transformers folder, or its name')
    parser.add_argument("--service", default="retrieval", help="name that training looks for")
    parser.add_argument("--replicas", type=int, default=1, help="actors that share the queries")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs of each actor")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of each actor's encoder")
    parser.add_argument("--cache", help="folder for vectors; every node must see it (default: ~/.cache/grpo_jax)")
    parser.add_argument("--address", help="HOST:PORT of a Ray cluster to join; by default one is started")
    try:
        with extras_named():
            return serve(parser.parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def serve(asked: argparse.Namespace) -> int:
    """Start the service, test it, and wait for Ctrl-C or SIGTERM."""
    section = RetrievalSection(backend="ray", encoder=asked.encoder, service=asked.service, cache=asked.cache)
    resources = {"num_cpus": asked.cpus, "num_gpus": asked.gpus}
    pool = PoolSection(replicas=asked.replicas, resources=resources, address=asked.address, batch_timeout=0.0)
    stop = threading.Event()
    titles = read_catalogue_file(asked.catalogue, blank_titles=asked.blank_titles).titles
    backend = start_service(titles, section, pool)
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has started, which has handlers of its own
        signal.signal(number, lambda *_: stop.set())
    try:
        share = Retriever(backend).self_test(titles)
        print(f"cluster     {ray_pool.cluster_address()}")
        print(f"catalogue   {backend.fingerprint.catalogue}")
        print(f"encoder     {section.encoder} ({backend.fingerprint.encoder})")
        print(f"self-test   {share:.1%} of the titles asked for retrieve themselves")
        print(f"serving     {section.service!r} in {asked.replicas} actors; Ctrl-C ends it", flush=True)
        stop.wait()
    finally:
        backend.close()
    return 0
