"""Exact ranks in large catalogues: queries per second and memory, in process and with Ray, against faiss.

    python benchmarks/retrieval.py [--items 12000 100000 1000000] [--queries 256] [--replicas 2] [--json FILE]

Prints JSON, and a table on stderr. Vectors are random units of 384 numbers; a query is its target's vector with
noise, so that ranks range from 1 to thousands. Encoding of texts is not part of it. Every measurement has a process
of its own, all threads the machine has, and one warm-up call apart (compilation, first touch of pages).

- `local`: one call of the in-process backend with all queries: exact rank, ties, excluded rows, and the softmax
  probability of the target.
- `ray`: the same over actors; the call's whole way, there and back.
- `faiss top 10`: IndexFlatIP.search with k=10. It gives no rank for a target that is not among the ten.
- `faiss k=N`: what an exact rank of every target takes with search alone: all items sorted.
- `faiss range`: the cheaper way: range_search, one query at a time since each has a radius of its own (its target's
  score); the number of results is the rank. The exponential sum is not in it.

Memory is the peak of the process (resident, MiB) less what it had before the catalogue was loaded; with Ray the
sum over the actors. A catalogue read from a memory map counts once it is touched. `equal` is the share of ranks
that agree with those of `faiss range`: two scores may be level to one and apart by a rounding to the other.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import iteration_work as work
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, also for Ray's workers

WIDTH = 384
NOISE = 0.12  # of each number of a query: about as long as the vector itself three times over
EXCLUDED = 8


def make_data(folder, items, queries):
    """vectors.npy, queries.npy, targets.npy, exclude.npy and the files that make the folder an index."""
    from bridges.retrieval.encoders import Fingerprint, save_index

    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((items, WIDTH), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    targets = rng.integers(0, items, queries)
    wanted = vectors[targets] + NOISE * rng.standard_normal((queries, WIDTH), dtype=np.float32)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    save_index(folder / "index", [f"item {i}" for i in range(items)], vectors, Fingerprint("random", "given"))
    np.save(folder / "queries.npy", wanted)
    np.save(folder / "targets.npy", targets)
    np.save(folder / "exclude.npy", rng.integers(0, items, (queries, EXCLUDED)))


class Given:
    """An encoder whose texts are numbers of rows."""

    identity, emphasis = "given", None

    def __init__(self, vectors):
        self.vectors = vectors

    def encode(self, texts):
        return self.vectors[[int(text) for text in texts]]


def peak_mib():
    """Most memory this process ever had resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def timed(call, repeats, count):
    """(last result, seconds of the warm-up, queries per second in the median of the repeats)."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, seconds[0], count / float(np.median(seconds[1:]))


def row(name, before, warm_up, speed, memory=None, **more):
    memory = peak_mib() - before if memory is None else memory
    return {
        "method": name,
        "queries_per_second": float(f"{speed:.4g}"),
        "warm_up_seconds": round(warm_up, 3),
        "memory_mib": round(memory),
        **more,
    }


def ask(backend, folder, repeats):
    from bridges.retrieval import Retriever

    targets, exclude = np.load(folder / "targets.npy"), np.load(folder / "exclude.npy").tolist()
    texts = [str(i) for i in range(len(targets))]
    retriever = Retriever(backend)
    found, warm_up, speed = timed(lambda: retriever.score_ranks(texts, targets, exclude), repeats, len(texts))
    np.save(folder / "ranks.npy", found.rank)
    return warm_up, speed


def run_local(folder, repeats, replicas):
    from bridges.retrieval.encoders import load_index
    from bridges.retrieval.ranking import LocalBackend

    before = peak_mib()
    backend = LocalBackend(Given(np.load(folder / "queries.npy")), load_index(folder / "index"))
    warm_up, speed = ask(backend, folder, repeats)
    return [row("local", before, warm_up, speed)]


def bench_service():
    from bridges.retrieval import service
    from bridges.retrieval.encoders import load_index
    from bridges.retrieval.ranking import LocalBackend

    class Bench(service.RankService):
        def load(self, device):
            self._before = peak_mib()
            index = load_index(Path(self._folder) / "index")
            self._backend = LocalBackend(Given(np.load(Path(self._folder) / "queries.npy")), index)
            self.fingerprint = tuple(index.fingerprint)
            return self

        def memory(self):
            return peak_mib() - self._before

    return Bench


def run_ray(folder, repeats, replicas):
    from bridges import ray_cluster, ray_pool
    from bridges.retrieval import service
    from grpo_jax.config.judge import PoolSection
    from grpo_jax.config.sections import RetrievalSection

    ray_cluster.join(None, object_store=256 * 2**20)
    judge, pool = bench_service()(str(folder), "given"), PoolSection(replicas=replicas, batch_timeout=0.0)
    actors = ray_pool.start_actors(service.SERVICE, judge, pool, named=True)
    backend = service.RayBackend(RetrievalSection(backend="ray"), actors)
    warm_up, speed = ask(backend, folder, repeats)
    import ray

    memory = sum(ray.get([actor.answer.remote("memory", [], {}) for actor in actors]))
    return [row(f"ray, {replicas} actors", 0, warm_up, speed, memory)]


def run_faiss(folder, repeats, replicas):
    import faiss

    before = peak_mib()
    index = faiss.IndexFlatIP(WIDTH)
    vectors = np.load(folder / "index" / "vectors.npy", mmap_mode="r")
    for start in range(0, len(vectors), 65536):
        index.add(np.ascontiguousarray(vectors[start : start + 65536]))
    queries, targets = np.load(folder / "queries.npy"), np.load(folder / "targets.npy")
    items = index.ntotal
    _, warm_up, speed = timed(lambda: index.search(queries, 10), repeats, len(queries))
    rows = [row("faiss top 10", before, warm_up, speed)]

    some = max(2, min(len(queries), 32, 4_000_000 // items))
    radii = np.einsum("be,be->b", queries, vectors[targets])

    def ranks():
        # results are those above the radius; the target is put in by a hair and not left to a rounding
        return [len(index.range_search(queries[i : i + 1], float(radii[i]) - 1e-6)[1]) for i in range(some)]

    found, warm_up, speed = timed(ranks, repeats, some)
    np.save(folder / "faiss_ranks.npy", found)
    rows.append(row("faiss range", before, warm_up, speed, queries=some))
    few = max(2, min(some, 8))
    _, warm_up, speed = timed(lambda: index.search(queries[:few], items), 1, few)
    rows.append(row("faiss k=N", before, warm_up, speed, queries=few))
    return rows


PARTS = {"faiss": run_faiss, "local": run_local, "ray": run_ray}


def agreement(folder):
    """Share of ranks that agree; excluded rows are put back, for faiss ranks everything."""
    expected = np.load(folder / "faiss_ranks.npy")
    found, queries = np.load(folder / "ranks.npy")[: len(expected)], np.load(folder / "queries.npy")
    vectors = np.load(folder / "index" / "vectors.npy", mmap_mode="r")
    targets, exclude = np.load(folder / "targets.npy"), np.load(folder / "exclude.npy")
    for i in range(len(expected)):
        others = np.array(sorted(set(exclude[i].tolist()) - {int(targets[i])}))
        found[i] += (vectors[others] @ queries[i] >= vectors[targets[i]] @ queries[i] - 1e-6).sum()
    return float((found == expected).mean())


def tfidf_rows(items, queries, repeats):
    """The same sparse vectors compared as they are, and spread out into dense blocks: why TF-IDF stays sparse."""
    from bridges.retrieval import Retriever
    from bridges.retrieval.encoders import Fingerprint, Index, TfidfEncoder
    from bridges.retrieval.ranking import LocalBackend

    rng = np.random.default_rng(0)
    share = 1 / np.arange(10, 10010)
    words = np.char.add("w", np.arange(10000).astype(str))
    titles = [" ".join(line) for line in rng.choice(words, (items, 10), p=share / share.sum())]
    encoder = TfidfEncoder(titles)
    vectors = encoder.encode(titles)
    targets = rng.integers(0, items, queries)
    texts = [" ".join(titles[target].split()[:4]) for target in targets]

    class Spread:
        identity, emphasis = "spread", None

        def encode(self, texts):
            return encoder.encode(texts).toarray()

    rows = []
    for name, kept, encode in (("tf-idf sparse", vectors, encoder), ("tf-idf dense", vectors.toarray(), Spread())):
        retriever = Retriever(LocalBackend(encode, Index(kept, Fingerprint("words", "tf-idf"), None)))
        call = lambda asked=retriever: asked.score_ranks(texts, targets, [[]] * queries)  # noqa: E731
        found, warm_up, speed = timed(call, repeats, queries)
        stored = kept.data.nbytes + kept.indices.nbytes if name.endswith("sparse") else kept.nbytes
        rows.append(row(name, 0, warm_up, speed, stored / 2**20, items=items, mean_rank=float(found.rank.mean())))
    return rows


def table(report):
    lines = [f"{'items':>9}  {'method':<16} {'queries/s':>10} {'memory MiB':>11} {'warm-up s':>10}"]
    for case in report["rows"]:
        lines.append(
            f"{case['items']:>9,}  {case['method']:<16} {case['queries_per_second']:>10,.4g} "
            f"{case['memory_mib']:>11,} {case['warm_up_seconds']:>10.2f}"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[12_000, 100_000, 1_000_000])
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "tfidf"], default=[*PARTS, "tfidf"])
    parser.add_argument("--folder", help="for the vectors (1 M items take 1.5 GB); a temporary one by default")
    parser.add_argument("--json", help="also write the report there")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)  # what a child process is asked
    args = parser.parse_args()
    if args.only:
        print(json.dumps(PARTS[args.only](Path(args.folder), args.repeats, args.replicas)))
        return
    report = {
        "benchmark": "retrieval",
        "width": WIDTH,
        "queries": args.queries,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": work.versions(("jax", "faiss-cpu", "ray", "numpy", "scipy")),
        "rows": [],
    }
    if "tfidf" in args.parts:
        report["rows"] += tfidf_rows(min(args.items), args.queries, args.repeats)
    for items in args.items:
        folder = Path(tempfile.mkdtemp(prefix="retrieval-", dir=args.folder))
        try:
            make_data(folder, items, args.queries)
            for part in [part for part in PARTS if part in args.parts]:
                command = [sys.executable, __file__, "--only", part, "--folder", str(folder)]
                command += ["--repeats", str(args.repeats), "--replicas", str(args.replicas)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rows = json.loads(done.stdout.splitlines()[-1])
                if part != "faiss" and (folder / "faiss_ranks.npy").exists():
                    rows = [case | {"equal": agreement(folder)} for case in rows]
                report["rows"] += [{"items": items} | case for case in rows]
        finally:
            shutil.rmtree(folder)
    print(json.dumps(report, indent=2))
    print(table(report), file=sys.stderr)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
