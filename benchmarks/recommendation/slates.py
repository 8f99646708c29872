"""Lists that are judged as a whole: what trained runs list beside re-rankings of the supervised policy.

    python benchmarks/recommendation/slates.py measure --start RUN [--policy NAME=RUN …] [--users 4000] [--head 0.2]
                                                       [--rule brand] --json FILE
    python benchmarks/recommendation/slates.py table FILE …          # a file for each seed

RUN is a run directory of `task.writes: slate`. Every run's greedy lists of test users are measured by NDCG@10, by the
exposure of the long tail (all but the share `head` of the items), by the diversity of titles and by the share of items
within at most two of a value of the column `rule`. Beside them stand re-rankings of the next item's 150 best
candidates under the policy of `--start`; rel is p or log p, scaled to [0, 1] in a user's candidates:

    MMR       (1 - λ) rel(i) - λ max_{j chosen} cos(i, j)                                  (Carbonell & Goldstein 1998)
    xQuAD     (1 - λ) p(i) + λ Σ_c p(c | user) [i in c] Π_{j chosen} (1 - [j in c])        (Abdollahpouri et al. 2019)
    bonus     (1 - λ) rel(i) + λ [i in the tail]
    greedy    rel(i) + λ [i in the tail] - μ mean_{j chosen} cos(i, j): both of what is measured
    ruled     the same, of the candidates that keep the rule

c is head or tail and p(c | user) its share of the history. Weights are chosen on validation users: of each method
the one that shows most of the tail, or the most different titles, while its NDCG@10 is at least 99.5 % of the ten
best's. A trained list's rival is the re-ranking that has on validation users at least its NDCG@10 (99.5 % of it), its
tail and its share within the rule, and of those the most different titles. The table has means over seeds, and ranges.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import sparse

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
from grpo_jax.tasks.recommendation.slates import diversity, exposure, groups_of, ranks_of, slate_of, tail_items, within

LENGTH, CANDIDATES, KEPT, MOST = 10, 150, 0.995, 2
MEASURES = ("ndcg@10", "tail", "diversity", "rule")
GRID = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
BOTH = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
TEN_BEST, TEN_RULED = "ten best", "ruled greedy on p, 0 0"


class World(NamedTuple):
    """What lists are measured against."""

    dataset: Dataset
    tail: np.ndarray
    vectors: sparse.csr_array
    groups: sparse.csr_array  # [I, values of the rule's column]

    def measures(self, slates: Sequence[tuple[int, ...]], rows: Sequence[Row]) -> np.ndarray:
        """The measures of each list, [U, 4]."""
        targets = [row.columns["target_row"] for row in rows]
        gain = ndcg(ranks_of(slates, targets, items=len(self.tail)), k=LENGTH)
        kept = within(slates, self.groups, MOST)
        return np.stack([gain, exposure(slates, self.tail), diversity(slates, self.vectors), kept], axis=1)


class Candidates(NamedTuple):
    """Of U users: rows of the catalogue, best first, their log-probabilities, which are tail; of pairs [U, C, C] the
    cosine, and whether they share the rule's value."""

    items: np.ndarray
    logs: np.ndarray
    tail: np.ndarray
    alike: np.ndarray
    together: np.ndarray
    history_tail: np.ndarray  # [U], the share of the history that is tail


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

    def pairs(vectors: sparse.csr_array) -> np.ndarray:
        return np.stack([(vectors[line] @ vectors[line].T).toarray() for line in items]).astype(np.float32)

    shares = [world.tail[list(row.columns["history"])].mean() for row in rows]
    return Candidates(items, logs, world.tail[items], pairs(world.vectors), pairs(world.groups), np.array(shares))


def scaled(values: np.ndarray) -> np.ndarray:
    """Scale each user's values to [0, 1]."""
    low, high = values.min(1, keepdims=True), values.max(1, keepdims=True)
    return (values - low) / np.maximum(high - low, 1e-12)


class Chosen(NamedTuple):
    """What a list begins with: candidates bool [U, C], and of each candidate the largest cosine and the mean one."""

    members: np.ndarray
    nearest: np.ndarray
    mean: np.ndarray


Step = Callable[[Chosen], np.ndarray]
"""Scores of all candidates [U, C]."""


def rerank(found: Candidates, step: Step, *, ruled: bool) -> list[tuple[int, ...]]:
    """Choose the candidate of the best score, again and again; `ruled` only while the rule holds, if any is left."""
    members, order, users = np.zeros(found.items.shape, bool), [], np.arange(len(found.items))
    nearest, total, taken = (np.zeros(members.shape, np.float32) for _ in range(3))
    for place in range(LENGTH):
        scores = step(Chosen(members, nearest, total / max(place, 1)))
        scores = scores - 1e3 * (taken >= MOST) if ruled else scores
        best = np.where(members, -np.inf, scores).argmax(1)
        members[users, best] = True
        nearest, total = np.maximum(nearest, found.alike[users, best]), total + found.alike[users, best]
        taken += found.together[users, best]
        order.append(found.items[users, best])
    return [tuple(line) for line in np.stack(order, axis=1).tolist()]


def steps_of(found: Candidates) -> dict[str, Step]:
    """Every re-ranking and weight by name."""
    probability = np.exp(found.logs)
    wanted = np.stack([1 - found.history_tail, found.history_tail], axis=1)
    member = np.stack([~found.tail, found.tail], axis=-1)

    def xquad(chosen: Chosen, share: float) -> np.ndarray:
        open_ = 1.0 - (chosen.members[..., None] & member).any(1)
        return (1 - share) * probability + share * (member * (wanted * open_)[:, None]).sum(-1)

    def weighed(chosen: Chosen, rel: np.ndarray, keep: float, tail: float, nearest: float, mean: float) -> np.ndarray:
        return keep * rel + tail * found.tail - nearest * chosen.nearest - mean * chosen.mean

    steps: dict[str, Step] = {f"xQuAD, {share:g}": functools.partial(xquad, share=share) for share in GRID}
    for name, rel in {"p": scaled(probability), "log p": scaled(found.logs)}.items():
        make = functools.partial(functools.partial, weighed, rel=rel)
        for share in GRID:
            steps[f"MMR on {name}, {share:g}"] = make(keep=1 - share, tail=0, nearest=share, mean=0)
            steps[f"bonus on {name}, {share:g}"] = make(keep=1 - share, tail=share, nearest=0, mean=0)
        for tail, mean in itertools.product(BOTH, BOTH):
            steps[f"greedy on {name}, {tail:g} {mean:g}"] = make(keep=1, tail=tail, nearest=0, mean=mean)
    return steps


def kind_of(method: str) -> str:
    """A method without its weight, and without what its relevance is."""
    return method.rpartition(", ")[0].partition(" on ")[0] if ", " in method else method


Means = Mapping[str, np.ndarray]
"""By method the means of the measures [4]."""


def tuned(validation: Means, measure: int) -> dict[str, str]:
    """By kind the re-ranking that has most of a measure on validation users at the ten best's NDCG."""
    least = KEPT * validation[TEN_BEST][0]
    kept = [method for method, values in validation.items() if values[0] >= least and method != TEN_BEST]
    return {kind_of(method): method for method in sorted(kept, key=lambda method: validation[method][measure])}


def rival(validation: Means, trained: np.ndarray) -> str | None:
    """The re-ranking with most diversity of those that are not behind a trained list in anything else."""
    able = [
        method
        for method, values in validation.items()
        if values[0] >= KEPT * trained[0] and (values[[1, 3]] >= trained[[1, 3]]).all()
    ]
    return max(able, key=lambda method: validation[method][2], default=None)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Every method's measures of test users, the named ones' intervals, and who a trained list's rival is."""
    config, policy, _ = restore_policy(options.start, "final")
    dataset = load_dataset(config.task)
    catalogue = dataset.catalogue
    tail = tail_items(taken_counts(dataset.known, len(catalogue)), options.head)
    world = World(dataset, tail, title_vectors(catalogue.titles), groups_of(catalogue, options.rule))
    parts = [part[: options.users] for part in (dataset.prompts.validation, dataset.prompts.test)]
    found: list[dict[str, np.ndarray]] = [{}, {}]
    for rows, values in zip(parts, found, strict=True):
        candidates = candidates_of(config, policy, world, rows)
        values[TEN_BEST] = world.measures([tuple(line) for line in candidates.items[:, :LENGTH].tolist()], rows)
        for method, step in steps_of(candidates).items():
            values[method] = world.measures(rerank(candidates, step, ruled=False), rows)
            if method.startswith("greedy"):
                values[f"ruled {method}"] = world.measures(rerank(candidates, step, ruled=True), rows)
    means = {method: values.mean(0) for method, values in found[0].items()}
    report: dict[str, Any] = {"users": len(parts[1]), "head": options.head, "rule": options.rule, "rivals": {}}
    for name, run in [("supervised list", Path(options.start)), *map(named, options.policy)]:
        config, policy, _ = restore_policy(run, "final")
        for rows, values in zip(parts, found, strict=True):
            values[name] = world.measures(written_lists(config, policy, world, rows), rows)
        report["rivals"][name] = rival(means, found[0][name].mean(0))
    report["tuned"] = {MEASURES[place]: tuned(means, place) for place in (1, 2)}
    report["points"] = {method: np.round(values.mean(0), 4).tolist() for method, values in found[1].items()}
    shown = {TEN_BEST, TEN_RULED, *report["rivals"], *filter(None, report["rivals"].values())}
    shown |= {method for methods in report["tuned"].values() for method in methods.values()}
    report["intervals"] = {method: [list(one)[1:] for one in bootstrap(found[1][method])] for method in shown}
    return report


def named(entry: str) -> tuple[str, Path]:
    """NAME=RUN."""
    name, equals, run = entry.partition("=")
    if not equals:
        raise SystemExit(f"expected NAME=RUN, got {entry!r}")
    return name, Path(run)


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds, and their range, of what was tuned and of trained lists, each before its rival."""
    lines = [f"| {reports[0]['users']} test users | {' | '.join(MEASURES)} |", "|---" * (len(MEASURES) + 1) + "|"]

    def line(name: str, methods: Sequence[str | None]) -> None:
        points = [report["points"][method] for report, method in zip(reports, methods, strict=True) if method]
        if points:
            low, mean, high = np.min(points, 0), np.mean(points, 0), np.max(points, 0)
            span = "{:.3f}" if len(points) == 1 else "{:.3f} ({:.3f}–{:.3f})"
            cells = [span.format(*one) for one in zip(mean, low, high, strict=True)]
            lines.append(f"| {name} | {' | '.join(cells)} |")

    for method in (TEN_BEST, TEN_RULED):
        line(method, [method] * len(reports))
    for measure in MEASURES[1:3]:
        for kind in sorted({kind for report in reports for kind in report["tuned"][measure]}):
            methods = [report["tuned"][measure].get(kind) for report in reports]
            line(f"{kind}, most {measure}: {', '.join(str(m).rpartition(', ')[2] for m in methods)}", methods)
    for name in reports[0]["rivals"]:
        line(name, [name] * len(reports))
        line(
            f"its rival: {'; '.join(str(report['rivals'][name]) for report in reports)}",
            [r["rivals"][name] for r in reports],
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure")
    measure.add_argument("--start", required=True, metavar="RUN")
    measure.add_argument("--policy", nargs="*", default=[], metavar="NAME=RUN")
    measure.add_argument("--users", type=int, default=4000)
    measure.add_argument("--head", type=float, default=0.2)
    measure.add_argument("--rule", default="brand", metavar="COLUMN")
    measure.add_argument("--json", type=Path, required=True)
    commands.add_parser("table").add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        options.json.write_text(json.dumps(measured(options)) + "\n")
        options.files = [options.json]
    print(table([json.loads(file.read_text()) for file in options.files]))


if __name__ == "__main__":
    main()
