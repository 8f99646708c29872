"""Judges in a Ray cluster: the speed-up by many, and the overhead of a pool.

    python benchmarks/scaling/farm.py [--replicas 1 2 4 8] [--seconds 0.5] [--batches 8] [--no_miniature] [--json FILE]

Prints JSON. "waiting" is a judge that sleeps for each batch, as one on a card of its own does as far as this machine
is concerned: the seconds that it sleeps in all, those of a call to a pool, and their quotient, which is the speed-up.
An empty judge measures a pool's overhead per batch. Pictures of the sizes of real renderers, which one actor makes and
another reads, measure the overhead per picture. "miniature" draws with the renderer that ships with
the package, on the cores that there are.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bridges import ray_cluster
from bridges.judges.stable_diffusion_3 import StableDiffusion3
from bridges.ray_pool import Pooled
from grpo_jax.config.judge import PoolSection

TEXTS = [f"a {size} {colour} circle" for size in ("small", "big") for colour in ("red", "blue", "green", "grey")]


@dataclass(frozen=True)
class Waiting:
    """Sleeps for each batch.

    Args:
        seconds: So long.
        batch_size: Rows of a batch.
    """

    seconds: float = 0.0
    batch_size: int = 4

    def load(self, device: str) -> "Waiting":
        """Itself."""
        return self

    def score(self, texts: list[str]) -> list[int]:
        """A number for each text, one batch after the other."""
        for _ in range(0, len(texts), self.batch_size):
            time.sleep(self.seconds)
        return [len(text) for text in texts]


@dataclass(frozen=True)
class Canvas:
    """Makes pictures of a size, and looks at some.

    Args:
        size: Width and height.
        batch_size: Pictures of a batch.
    """

    size: int = 512
    batch_size: int = 4

    def load(self, device: str) -> "Canvas":
        """Itself."""
        return self

    def draw(self, texts: list[str], seeds: list[int]) -> torch.Tensor:
        """Grey pictures."""
        return torch.full((len(texts), 3, self.size, self.size), 0.5)

    def look(self, images: torch.Tensor) -> torch.Tensor:
        """One number of each."""
        return images[:, 0, 0, 0].clone()


def alternated(ways, repeats):
    """Median seconds of way(number) for each way by name, one call of each first to warm up, then in turns.

    Other work on the machine then slows all of them alike.
    """
    times = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(number)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent[1:]) for name, spent in times.items()}


def pools(judge, replicas):
    """Pools of one judge by the number of their actors, which end when nobody holds them."""
    return {count: Pooled(judge, PoolSection(replicas=count), "bench").load("cpu") for count in replicas}


def measure_waiting(seconds, batches, replicas, repeats):
    judge = Waiting(seconds)

    def asking(pool, count):
        return lambda _: pool.score(["x"] * judge.batch_size * batches * count)

    made = pools(judge, replicas)
    taken = alternated({count: asking(pool, count) for count, pool in made.items()}, repeats)
    found = {}
    for count in replicas:
        here = batches * count * seconds  # in one process it takes this long at least
        found[str(count)] = {
            "batches": batches * count,
            "in_process_seconds": round(here, 4),
            "seconds": round(taken[count], 4),
            "speedup": round(here / taken[count], 3),
            "speedup_per_actor": round(here / taken[count] / count, 4),
        }
    return found


def measure_overhead(repeats):
    """Milliseconds that a batch of nothing takes, alone and among many."""
    made = pools(Waiting(), [1])
    ways = {1: lambda _: made[1].score(["x"] * 4), 50: lambda _: made[1].score(["x"] * 4 * 50)}
    taken = alternated(ways, 10 * repeats)
    return {"batch_alone_ms": round(1e3 * taken[1], 3), "batch_among_50_ms": round(1e3 * taken[50] / 50, 3)}


def measure_pictures(sizes, count, repeats):
    """Milliseconds a picture, from the actor that makes it through this process into the one that looks at it."""
    found = {}
    for size in sizes:
        judge = Canvas(size)
        drawer, looker = (Pooled(judge, PoolSection(replicas=1), "bench").load("cpu") for _ in range(2))

        def work(number, drawer=drawer, looker=looker):
            assert len(looker.look(drawer.draw([str(place) for place in range(count)], [number] * count))) == count

        def here(number, judge=judge):
            for _ in range(0, count, judge.batch_size):  # the same batches
                judge.look(judge.draw([""] * judge.batch_size, [number] * judge.batch_size))

        taken = alternated({"in_process": here, "pool": work}, repeats)
        found[str(size)] = {
            "megabytes": round(3 * size * size * 4 / 1e6, 3),
            "in_process_ms": round(1e3 * taken["in_process"] / count, 3),
            "pool_ms": round(1e3 * taken["pool"] / count, 3),
        }
    return found


def measure_miniature(replicas, pictures, repeats):
    """Pictures a second of the miniature's renderer; every call draws new ones. An actor has one thread."""
    judge = StableDiffusion3(steps=2, batch_size=16, cache_megabytes=0)
    threads = torch.get_num_threads()

    def drawing(renderer, used=threads):
        def draw(number):
            torch.set_num_threads(used)
            texts = [TEXTS[place % len(TEXTS)] for place in range(pictures)]
            images = renderer.draw(texts, [1000 * number + place for place in range(pictures)], evaluation=False)
            assert len(images) == pictures
            torch.set_num_threads(threads)

        return draw

    own = judge.load("cpu")
    made = pools(judge, replicas)
    ways = {"in_process_one_thread": drawing(own, 1), f"in_process_{threads}_threads": drawing(own)}
    taken = alternated({**ways, **{str(count): drawing(pool) for count, pool in made.items()}}, repeats)
    return {
        "pictures": pictures,
        "pictures_a_second": {name: round(pictures / spent, 2) for name, spent in taken.items()},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=0.5, help="of a batch of the waiting judge")
    parser.add_argument("--batches", type=int, default=8, help="for each actor")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 512, 1024], help="of pictures")
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no_miniature", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    began = time.perf_counter()
    ray_cluster.join(None)  # one cluster for all pools
    report = {
        "benchmark": "farm",
        "python": platform.python_version(),
        "ray": importlib.metadata.version("ray"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "waiting": measure_waiting(args.seconds, args.batches, args.replicas, args.repeats),
        "overhead": measure_overhead(args.repeats),
        "pictures": measure_pictures(args.sizes, args.pictures, args.repeats),
    }
    if not args.no_miniature:
        report["miniature"] = measure_miniature([1, 2], 2 * args.pictures, args.repeats)
    report["seconds"] = round(time.perf_counter() - began)
    report["load_after"] = [round(load, 2) for load in os.getloadavg()]
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
