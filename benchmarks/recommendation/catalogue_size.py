"""What a large catalogue costs: seconds and memory of the rankings that need no policy, and of the tree of its titles.

    python benchmarks/recommendation/catalogue_size.py [--items 10000 100000 1000000] [--json FILE]

Prints JSON, and a table on stderr. Items are drawn by rank with probability 1 / (rank + 100); half as many users as
items took eight each, and so many of them are asked as `--users` says. A title is six words of a vocabulary that grows
with the catalogue. Everything is drawn from one seed. Every measurement has a process of its own.

- `item-kNN`: how alike the items are (the seconds to prepare), then rank and first ten items of each user.
- `popularity`, `Markov-1`: the other two that count.
- `titles + item-kNN`: the prior, which has a score for every title that shares a word: of fewer users.
- `title tree`: `grpo_jax.core.trie.make_trie` of the titles; "nodes" and the MiB of its arrays stand beside it.

Memory is the peak of the process (resident, MiB) less what it had when the data were there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation.catalogue import UserSequence

SEED, TAKEN, WORDS = 0, 8, 6
FEW = 64
"""Users of the prior."""


class Data(NamedTuple):
    """Users as training knows them, and rows that are asked."""

    items: int
    users: list[UserSequence]
    rows: list[Row]


def make_data(items: int, asked: int) -> Data:
    """Histories drawn by popularity; the last of each asked user's items is the target."""
    rng = np.random.default_rng(SEED)
    shares = 1.0 / (np.arange(items) + 100.0)
    drawn = rng.choice(items, (items // 2, TAKEN), p=shares / shares.sum())
    drawn = rng.permutation(items)[drawn]  # the catalogue is in no order of popularity
    users = [UserSequence(str(place), tuple(dict.fromkeys(taken))) for place, taken in enumerate(drawn.tolist())]
    rows = []
    for user, target in zip(users[:asked], rng.integers(0, items, asked).tolist(), strict=False):
        columns = {"history": user.items, "target_row": target, "excluded": user.items}
        rows.append(Row(len(rows), "", columns))
    return Data(items, users, rows)


def draw_words(items: int) -> tuple[np.ndarray, int]:
    """The words of each title, int [I, WORDS] from 1, and how many words there are."""
    words, rng = items // 5 + 1000, np.random.default_rng(SEED)
    shares = 1.0 / (np.arange(words) + 10.0)
    return 1 + rng.choice(words, (items, WORDS), p=shares / shares.sum()), words


def peak_mib() -> float:
    """Most memory that this process ever had resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class Clock:
    """Seconds and memory from where it was made."""

    def __init__(self) -> None:
        """Starts."""
        self.before, self.start, self.prepared = peak_mib(), time.perf_counter(), 0.0

    def lap(self) -> None:
        """Says that what comes before the users is done."""
        self.prepared = time.perf_counter() - self.start

    def read(self, method: str, items: int, users: int = 0, **more: object) -> dict[str, object]:
        """A row of the report."""
        ranked = time.perf_counter() - self.start - self.prepared
        each = {"users": users, "ms_per_user": round(1000 * ranked / users, 3)} if users else {}
        found = {"method": method, "items": items, "prepare_seconds": round(self.prepared, 2)}
        return {**found, **each, "memory_mib": round(peak_mib() - self.before), **more}


def run_counting(name: str, items: int, asked: int) -> dict[str, object]:
    """Popularity, item-kNN or Markov-1, as a run ranks by them."""
    from grpo_jax.tasks.recommendation import baselines

    data = make_data(items, asked)
    clock = Clock()
    if name == "popularity":
        score = baselines.popularity(data.users, items)
    elif name == "Markov-1":
        score = baselines.markov(data.users, items, data.rows)
    else:
        score = baselines.item_knn(baselines.item_similarity(data.users, items), data.rows)
    clock.lap()

    baselines.rank_and_recommend(score, data.rows, items=items)
    return clock.read(name, items, len(data.rows))


def run_prior(name: str, items: int, asked: int) -> dict[str, object]:
    """The prior of titles and neighbours."""
    from grpo_jax.tasks.recommendation import baselines
    from grpo_jax.tasks.recommendation.baselines import fusion_baseline

    data, (drawn, _) = make_data(items, min(asked, FEW)), draw_words(items)
    titles = [" ".join(f"w{word}" for word in words) for words in drawn.tolist()]
    histories = [row.columns["history"] for row in data.rows]
    clock = Clock()
    known = fusion_baseline(titles, data.users, decay=0.7)
    clock.lap()
    baselines.rank_and_recommend(lambda start, stop: known(histories[start:stop]), data.rows, items=items)
    return clock.read(name, items, len(data.rows))


def run_tree(name: str, items: int, asked: int) -> dict[str, object]:
    """The tree of the titles, each once."""
    from grpo_jax.core.trie import make_trie

    drawn, words = draw_words(items)
    texts = [(*text, 0) for text in dict.fromkeys(map(tuple, drawn.tolist()))]
    clock = Clock()
    trie = make_trie(texts, vocab_size=words + 1)
    clock.lap()
    size = sum(np.asarray(part).nbytes for part in trie) / 2**20
    return clock.read(name, items, nodes=len(trie.text), vocabulary=words + 1, arrays_mib=round(size))


COUNTING = ("item-kNN", "popularity", "Markov-1")
METHODS: dict[str, Callable[[str, int, int], dict[str, object]]] = {
    **dict.fromkeys(COUNTING, run_counting),
    "titles + item-kNN": run_prior,
    "title tree": run_tree,
}


def machine() -> dict[str, object]:
    """What it is measured on, and when."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    load = round(os.getloadavg()[0], 2)
    today = datetime.date.today().isoformat()
    return {"processor": processor, "cores": os.cpu_count(), "date": today, "load_before": load}


def table(rows: list[dict[str, object]]) -> str:
    """The rows as text."""
    lines = [f"{'items':>9}  {'method':<24} {'prepare s':>10} {'ms a user':>10} {'memory MiB':>11}"]
    for row in rows:
        each = row.get("ms_per_user", "")
        lines.append(
            f"{row['items']:>9,}  {row['method']:<24} {row['prepare_seconds']:>10} {each:>10} {row['memory_mib']:>11,}"
        )
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--users", type=int, default=1024, help="that are asked")
    parser.add_argument("--json", help="also write the report there")
    parser.add_argument("--only", nargs=2, metavar=("METHOD", "ITEMS"), help=argparse.SUPPRESS)  # of a child process
    options = parser.parse_args()
    if options.only:
        method, items = options.only[0], int(options.only[1])
        print(json.dumps(METHODS[method](method, items, options.users)))
        return
    report = {"benchmark": "catalogue size", "machine": machine(), "seed": SEED}
    report["versions"] = {name: version(name) for name in ("numpy", "scipy", "scikit-learn", "jax")}
    rows = report["rows"] = []
    for items in options.items:
        for method in METHODS:
            words = [sys.executable, __file__, "--only", method, str(items), "--users", str(options.users)]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    print(json.dumps(report, indent=1))
    print(table(rows), file=sys.stderr)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
