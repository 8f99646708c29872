"""Lists that are judged as a whole: what trained runs list beside re-rankings of the supervised policy.

    python benchmarks/recommendation/slates.py --start RUN [--policy NAME=RUN …] [--rerank NAME=RUN …] [--users 4000]
                                               [--head 0.2] [--json FILE]

RUN is a run directory of `task.writes: slate`. Every run's greedy lists of test users are measured by NDCG@10, by the
exposure of the long tail (all but the share `head` of the items) and by the diversity of titles. Beside them stand
re-rankings of the next item's 50 best candidates under the policy of `--start`, and of each `--rerank`:

    MMR     λ rel(i) - (1 - λ) max_{j chosen} cos(i, j)                                    (Carbonell & Goldstein 1998)
    xQuAD   (1 - λ) p(i) + λ Σ_c p(c | user) [i in c] Π_{j chosen} (1 - [j in c])          (Abdollahpouri et al. 2019)
    bonus   (1 - λ) rel(i) + λ [i in the tail]

c is head or tail and p(c | user) its share of the history; rel is p or log p, scaled to [0, 1] in a user's candidates.
Each method's point is chosen on validation users: the one that shows most of the tail (and the most different items)
while its NDCG@10 is at least 99.5 % of the supervised list's. Intervals are bootstraps over users, of ratios in pairs.
Prints Markdown; all points are in the JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.models.policy import Policy
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.encoding import make_encode
from grpo_jax.rollout.texts import policy_tokens
from grpo_jax.runs.policy import restore_policy
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.samplers import named_ends, sampling_params
from grpo_jax.tasks.recommendation.baselines import taken_counts, title_vectors
from grpo_jax.tasks.recommendation.catalogue import items_of
from grpo_jax.tasks.recommendation.dataset import Dataset, load_dataset
from grpo_jax.tasks.recommendation.metrics import bootstrap, ndcg
from grpo_jax.tasks.recommendation.recommending import policy_ranking
from grpo_jax.tasks.recommendation.slates import diversity, exposure, ranks_of, slate_of, tail_items

LENGTH, CANDIDATES, KEPT = 10, 50, 0.995
MEASURES = ("ndcg@10", "tail", "diversity")
GRID = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)


class Candidates(NamedTuple):
    """Of U users: rows of the catalogue, best first, their log-probabilities, which are tail; cosines [U, C, C]."""

    items: np.ndarray
    logs: np.ndarray
    tail: np.ndarray
    alike: np.ndarray
    history_tail: np.ndarray  # [U], the share of the history that is tail


class World(NamedTuple):
    """What lists are measured against."""

    dataset: Dataset
    tail: np.ndarray
    vectors: Any

    def measures(self, slates: Sequence[tuple[int, ...]], rows: Sequence[Row]) -> np.ndarray:
        """NDCG@10, exposure of the tail and diversity of each list, [U, 3]."""
        targets = [row.columns["target_row"] for row in rows]
        gain = ndcg(ranks_of(slates, targets, items=len(self.tail)), k=LENGTH)
        return np.stack([gain, exposure(slates, self.tail), diversity(slates, self.vectors)], axis=1)


def written_lists(config: Any, policy: Policy, world: World, rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """The greedy lists of a policy."""
    folder = policy.folder
    items = items_of(world.dataset.catalogue.names)
    allowed = policy_tokens(config, folder, items.texts)
    ends = named_ends(config.sampling, folder, allowed, no_repeats=True)
    sample = make_sampler(policy, sampling_params(config.sampling, 1, 0.0), **ends)
    size = folder.config.vocab_size
    encode = make_encode(folder.tokenizer, config.data, pad_id=folder.pad_id, vocab_size=size, rows=rows)
    lists = []
    for start in range(0, len(rows), 256):
        tokens, mask, _ = encode(rows[start : start + 256])
        samples = sample(policy.variables, tokens, mask, jax.random.split(jax.random.key(0), len(tokens)))
        texts = folder.tokenizer.batch_decode(np.asarray(samples.tokens[:, 0]))
        lists += [slate_of(items, text) for text in texts]
    return lists


def candidates_of(config: Any, policy: Policy, world: World, rows: Sequence[Row]) -> Candidates:
    """The best next items of each user that the history does not hold."""
    most = max(len(row.columns["history"]) for row in rows)
    listed = min(CANDIDATES + most, len(world.tail))
    found, scores = policy_ranking(config, policy, world.dataset.catalogue, rows, listed=listed)(rows)
    left = [
        [place for place, item in enumerate(line) if item not in row.columns["history"]][:CANDIDATES]
        for line, row in zip(found.tolist(), rows, strict=True)
    ]
    items, logs = (np.take_along_axis(array, np.array(left), axis=1) for array in (found, scores))
    alike = np.stack([(world.vectors[line] @ world.vectors[line].T).toarray() for line in items])
    shares = [world.tail[list(row.columns["history"])].mean() for row in rows]
    return Candidates(items, logs, world.tail[items], alike.astype(np.float32), np.array(shares))


def scaled(values: np.ndarray) -> np.ndarray:
    """Scale each user's values to [0, 1]."""
    low, high = values.min(1, keepdims=True), values.max(1, keepdims=True)
    return (values - low) / np.maximum(high - low, 1e-12)


Step = Callable[[np.ndarray], np.ndarray]
"""Chosen candidates bool [U, C] → scores of all [U, C]."""


def rerank(found: Candidates, step: Step) -> list[tuple[int, ...]]:
    """Choose the candidate of the best score, again and again."""
    chosen, order = np.zeros(found.items.shape, bool), []
    users = np.arange(len(chosen))
    for _ in range(LENGTH):
        best = np.where(chosen, -np.inf, step(chosen)).argmax(1)
        chosen[users, best] = True
        order.append(found.items[users, best])
    return [tuple(line) for line in np.stack(order, axis=1).tolist()]


def steps_of(found: Candidates) -> dict[str, Step]:
    """Every re-ranking and weight by name."""
    relevance = {"p": scaled(np.exp(found.logs)), "log p": scaled(found.logs)}
    probability = np.exp(found.logs)
    wanted = np.stack([1 - found.history_tail, found.history_tail], axis=1)
    member = np.stack([~found.tail, found.tail], axis=-1)

    def mmr(chosen: np.ndarray, share: float, rel: np.ndarray) -> np.ndarray:
        nearest = np.where(chosen[:, None], found.alike, 0.0).max(2)
        return (1 - share) * rel - share * nearest

    def xquad(chosen: np.ndarray, share: float) -> np.ndarray:
        open_ = 1.0 - (chosen[..., None] & member).any(1)
        return (1 - share) * probability + share * (member * (wanted * open_)[:, None]).sum(-1)

    def bonus(chosen: np.ndarray, share: float, rel: np.ndarray) -> np.ndarray:
        return (1 - share) * rel + share * found.tail

    steps: dict[str, Step] = {}
    for share in GRID:
        steps[f"xQuAD, {share:g}"] = functools.partial(xquad, share=share)
        for name, rel in relevance.items():
            steps[f"MMR on {name}, {share:g}"] = functools.partial(mmr, share=share, rel=rel)
            steps[f"bonus on {name}, {share:g}"] = functools.partial(bonus, share=share, rel=rel)
    return steps


def kind_of(method: str) -> str:
    """A method without its weight, and without what its relevance is."""
    return method.rpartition(", ")[0].partition(" on ")[0] if ", " in method else method


def chosen_points(validation: dict[str, np.ndarray], reference: np.ndarray, measure: int) -> dict[str, str]:
    """By family of methods the one that has most of a measure on validation users at the reference's NDCG."""
    least, best = KEPT * reference[:, 0].mean(), {}
    for method, values in validation.items():
        if values[:, 0].mean() >= least:
            family = kind_of(method)
            if family not in best or values[:, measure].mean() > validation[best[family]][:, measure].mean():
                best[family] = method
    return best


def ratio(one: np.ndarray, other: np.ndarray, draws: int = 1000) -> list[float]:
    """The ratio of two means over the same users, and its 95 % bootstrap interval."""
    random = np.random.default_rng(0)
    users = random.integers(len(one), size=(draws, len(one)))
    drawn = one[users].mean(1) / other[users].mean(1)
    return [float(one.mean() / other.mean()), *np.quantile(drawn, (0.025, 0.975)).tolist()]


def named(entry: str) -> tuple[str, Path]:
    """NAME=RUN."""
    name, equals, run = entry.partition("=")
    if not equals:
        raise SystemExit(f"expected NAME=RUN, got {entry!r}")
    return name, Path(run)


def measured(options: argparse.Namespace) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Every method's measures of validation and of test users, [U, 3]."""
    config, policy, _ = restore_policy(options.start, "final")
    dataset = load_dataset(config.task)
    counts = taken_counts(dataset.known, len(dataset.catalogue))
    world = World(dataset, tail_items(counts, options.head), title_vectors(dataset.catalogue.titles))
    parts = [part[: options.users] for part in (dataset.prompts.validation, dataset.prompts.test)]
    found: list[dict[str, np.ndarray]] = [{}, {}]
    runs = [("", Path(options.start)), *map(named, options.rerank)]
    for name, run in runs:
        config, policy, _ = restore_policy(run, "final")
        for rows, values in zip(parts, found, strict=True):
            candidates = candidates_of(config, policy, world, rows)
            before = f"{name}: " if name else ""
            top = [tuple(line) for line in candidates.items[:, :LENGTH].tolist()]
            values[f"{before}ten best"] = world.measures(top, rows)
            for method, step in steps_of(candidates).items():
                values[before + method] = world.measures(rerank(candidates, step), rows)
    for name, run in [("supervised list", Path(options.start)), *map(named, options.policy)]:
        config, policy, _ = restore_policy(run, "final")
        for rows, values in zip(parts, found, strict=True):
            values[name] = world.measures(written_lists(config, policy, world, rows), rows)
    return found[0], found[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--start", required=True, metavar="RUN")
    parser.add_argument("--policy", nargs="*", default=[], metavar="NAME=RUN")
    parser.add_argument("--rerank", nargs="*", default=[], metavar="NAME=RUN")
    parser.add_argument("--users", type=int, default=4000)
    parser.add_argument("--head", type=float, default=0.2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    validation, test = measured(options)
    reference = "ten best"
    report: dict[str, Any] = {"users": len(test[reference]), "head": options.head, "points": [], "chosen": {}}
    for method, values in test.items():
        intervals = {name: [*one] for name, one in zip(MEASURES, bootstrap(values), strict=True)}
        means = dict(zip(MEASURES, validation[method].mean(0).tolist(), strict=True))
        report["points"].append({"method": method, **intervals, "validation": means})
    print(f"| {report['users']} test users | " + " | ".join(MEASURES) + " |\n|---|---|---|---|")
    shown = [reference, *(name for name in test if ", " not in name and name != reference)]
    for place, measure in enumerate(MEASURES[1:], 1):
        points = chosen_points(validation, validation[reference], place)
        report["chosen"][measure] = {
            family: {"method": method, "against ten best": ratio(test[method][:, place], test[reference][:, place])}
            for family, method in points.items()
        }
        shown += points.values()
    cells = {point["method"]: [point[name] for name in MEASURES] for point in report["points"]}
    for method in dict.fromkeys(shown):
        print(
            f"| {method} | " + " | ".join(f"{m:.3f} [{low:.3f}, {high:.3f}]" for m, low, high in cells[method]) + " |"
        )
    print(json.dumps(report["chosen"], indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
