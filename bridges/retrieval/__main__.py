"""`python -m bridges.retrieval serve`: a retrieval service on a Ray cluster, until Ctrl-C."""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from bridges import ray_cluster
from bridges.ray_pool import start_actors
from bridges.retrieval import encoders, service
from bridges.retrieval.catalogue import read_catalogue_file
from grpo_jax.config.judge import PoolSection
from grpo_jax.errors import Parser, UserError, run_cli


def serve(arguments: Sequence[str]) -> None:
    """Start a service, and wait for Ctrl-C or SIGTERM; UserError if the cluster has one, or no room for it."""
    parser = Parser("python -m bridges.retrieval", description="A retrieval service on Ray.")
    parser.add_argument("command", choices=["serve"], help="start a service that runs until Ctrl-C")
    parser.add_argument("--catalogue", required=True, help="file of the items: .tsv or .csv")
    parser.add_argument("--data.columns.title", default="title", dest="title", help="the catalogue's column of titles")
    parser.add_argument("--encoder", type=service.absolute, default="tfidf", help="tfidf, or a model's folder or name")
    parser.add_argument("--replicas", type=int, default=1, help="actors that share the queries")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of each actor's encoder")
    parser.add_argument("--address", help="HOST:PORT of a Ray cluster to join; by default the command starts one")
    asked = parser.parse_args(arguments)
    resources = {"num_gpus": asked.gpus}
    pool = PoolSection(replicas=asked.replicas, resources=resources, address=asked.address, batch_timeout=0.0)
    _, titles = read_catalogue_file(asked.catalogue, title_column=asked.title)
    ray_cluster.join(pool.address, object_store=256 * 2**20)  # it holds only queries and counts
    if service.find_actor(0) is not None:
        raise UserError("a retrieval service runs on this cluster already")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "grpo_jax", "retrieval")
    index = encoders.open_index(titles, encoders.load_encoder(asked.encoder, titles), cache)
    actors = start_actors(service.SERVICE, service.RankService(str(index.folder), asked.encoder), pool, named=True)
    try:
        backend = service.RayBackend(None, actors)
    except encoders.RetrievalError as error:
        raise UserError(f"the retrieval service did not start: {error} (see `ray status`)") from error
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after the start of Ray, which sets its own handlers
        signal.signal(number, lambda *_: stop.set())
    print(f"cluster     {ray_cluster.cluster_address()}")
    print(f"catalogue   {backend.fingerprint.catalogue}, by {asked.encoder} ({backend.fingerprint.encoder})")
    print(f"serving     in {asked.replicas} actors; Ctrl-C ends it", flush=True)
    stop.wait()


if __name__ == "__main__":
    sys.exit(run_cli(serve, None))
