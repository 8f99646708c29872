"""`python -m bridges.retrieval serve`: a retrieval service on a Ray cluster, until Ctrl-C."""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from bridges.ray_cluster import cluster_address
from bridges.retrieval import Retriever
from bridges.retrieval.catalogue import read_catalogue_file
from bridges.retrieval.service import start_service
from grpo_jax.config.judge import PoolSection
from grpo_jax.config.sections import RetrievalSection
from grpo_jax.errors import run_cli


def serve(arguments: Sequence[str]) -> None:
    """Start the service, test it, and wait for Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser("python -m bridges.retrieval", description="A retrieval service on Ray.")
    parser.add_argument("command", choices=["serve"], help="start a service, until Ctrl-C")
    parser.add_argument("--catalogue", required=True, help="file of the items: .tsv or .csv")
    parser.add_argument("--encoder", default="tfidf", help='"tfidf", a sentence-transformers folder, or its name')
    parser.add_argument("--replicas", type=int, default=1, help="actors that share the queries")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs of each actor")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of each actor's encoder")
    parser.add_argument("--cache", help="folder for vectors; every node must see it (default: ~/.cache/grpo_jax)")
    parser.add_argument("--address", help="HOST:PORT of a Ray cluster to join; by default one is started")
    asked = parser.parse_args(arguments)
    section = RetrievalSection(backend="ray", encoder=asked.encoder, cache=asked.cache)
    resources = {"num_cpus": asked.cpus, "num_gpus": asked.gpus}
    pool = PoolSection(replicas=asked.replicas, resources=resources, address=asked.address, batch_timeout=0.0)
    _, titles = read_catalogue_file(asked.catalogue)
    backend = start_service(titles, section, pool)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has started, which has handlers of its own
        signal.signal(number, lambda *_: stop.set())
    share = Retriever(backend).self_test(titles)
    print(f"cluster     {cluster_address()}")
    print(f"catalogue   {backend.fingerprint.catalogue}")
    print(f"encoder     {section.encoder} ({backend.fingerprint.encoder})")
    print(f"self-test   {share:.1%} of the titles asked for retrieve themselves")
    print(f"serving     in {asked.replicas} actors; Ctrl-C ends it", flush=True)
    stop.wait()


if __name__ == "__main__":
    sys.exit(run_cli(serve, None))
