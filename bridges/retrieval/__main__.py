"""`python -m bridges.retrieval serve`: a retrieval service on a Ray cluster, until Ctrl-C."""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from grpo_jax.errors import UserError, extras_named


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 after Ctrl-C or SIGTERM, 2 after a UserError."""
    parser = argparse.ArgumentParser(prog="python -m bridges.retrieval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("serve", help="start a service and keep it running")
    command.add_argument("--catalogue", required=True, help="file of the items: .tsv or .csv")
    command.add_argument("--blank_titles", choices=("error", "keep"), default="error", help="items without a title")
    command.add_argument("--encoder", default="tfidf", help='"tfidf", a sentence-transformers folder, or its name')
    command.add_argument("--service", default="retrieval", help="name that training looks for")
    command.add_argument("--replicas", type=int, default=1, help="actors that share the queries")
    command.add_argument("--cpus", type=float, default=1.0, help="CPUs of each actor")
    command.add_argument("--gpus", type=float, default=0.0, help="GPUs of each actor's encoder")
    command.add_argument("--cache", help="folder for vectors; every node must see it (default: ~/.cache/grpo_jax)")
    command.add_argument("--address", help="HOST:PORT of a Ray cluster to join; by default one is started")
    try:
        with extras_named():
            return serve(parser.parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def serve(asked: argparse.Namespace) -> int:
    """Start the service, test it, and wait for Ctrl-C or SIGTERM."""
    from bridges.ray_pool import answers, cluster_address
    from bridges.retrieval import service
    from bridges.retrieval.catalogue import read_catalogue_file
    from bridges.retrieval.retriever import Retriever
    from grpo_jax.config.judge import PoolSection
    from grpo_jax.config.retrieval import RetrievalSection

    section = RetrievalSection(backend="ray", encoder=asked.encoder, service=asked.service, cache=asked.cache)
    resources = {"num_cpus": asked.cpus, "num_gpus": asked.gpus}
    pool = PoolSection(replicas=asked.replicas, resources=resources, address=asked.address, batch_timeout=0.0)
    running = service.find_service(section.service)
    if running is not None and answers(running):
        raise UserError(
            f"a service {section.service!r} of yours is at {running} already: end it or choose another --service (if "
            f"it is not, remove {service.service_file(section.service)})"
        )
    stop = threading.Event()
    titles = read_catalogue_file(asked.catalogue, blank_titles=asked.blank_titles).titles
    backend = service.start_service(titles, section, pool)
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has started, which has handlers of its own
        signal.signal(number, lambda *_: stop.set())
    try:
        share = Retriever(backend).self_test(titles)
        with service.announced(section.service, cluster_address()):
            print(f"cluster     {cluster_address()}")
            print(f"catalogue   {backend.fingerprint.catalogue}")
            print(f"encoder     {section.encoder} ({backend.fingerprint.encoder})")
            print(f"self-test   {share:.1%} of the titles asked for retrieve themselves")
            print(f"serving     {section.service!r} in {asked.replicas} actors; Ctrl-C ends it", flush=True)
            stop.wait()
    finally:
        backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
