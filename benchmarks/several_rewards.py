"""GDPO, GRPO and RAFT with a noisy second reward: the default run's alignment at three scales.

    python benchmarks/several_rewards.py [--arms gdpo grpo raft best shuffled] [--scales 1 0.1 0.01]
                                         [--seeds 200 201 202] [--jobs 1] [--out DIR] [--section.field VALUE ...]

Each run is the default config with 80 iterations and two rewards of equal weight: `alignment` times a scale, and
`style`, a weak true signal beside noise of spread 1. No entropy bonus, which takes over beside noise: chosen on seed
100, alike for all arms (settings are chosen on seeds 100 to 109 only). "shuffled" permutes GDPO's rewards within each
group, at the first scale alone. "best" is GRPO at its best weight: on seed 100 alignment weighs 1, 10, 100, ... until
pixel accuracy falls. GRPO sees weight x scale alone, so runs with the same product are one. A run that is there in
DIR is not run again. Prints JSON and a table for RESULTS.md: pixel accuracy of held-out prompts, and GDPO minus each
arm on the same seeds with a 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import miniature
import numpy as np
from seeds import paired_difference

ARMS = ("gdpo", "grpo", "raft", "best", "shuffled")
SEARCH_SEED = 100
SETTINGS = ["--training.max_steps", "80", "--algorithm.entropy_coef", "0", "--evaluation.every", "0"]
SETTINGS += ["--evaluation.samples", "0"]


def style(prompts: list[str], completions: list[str], trainer_state, seed: int) -> np.ndarray:
    """A fifth of the share of words that are not repeated, and fresh noise of spread 1."""
    words = [text.split() for text in completions]
    signal = [0.2 * len(set(those)) / max(len(those), 1) for those in words]
    state = [seed, trainer_state.global_step, zlib.crc32("\n".join([*prompts, *completions]).encode())]
    return signal + np.random.default_rng(state).normal(size=len(words))


def changed(score, *, scale: float, shuffle: bool, seed: int):
    """A score whose first reward is in another unit."""
    score = miniature.shuffled(score, seed) if shuffle else score

    def scaled(rows, episodes, pictures, **told):
        rewards, watched = score(rows, episodes, pictures, **told)
        return rewards * np.array([scale, 1.0], rewards.dtype), watched

    return scaled


def one(arm: str, scale: float, seed: int, run_dir: str, *extra: str) -> None:
    """A single run in this process."""
    rewards = [{"name": "alignment"}, {"name": f"{Path(__file__).resolve()}:style", "options": {"seed": seed}}]
    options = ["--seed", str(seed), "--run_dir", run_dir, "--rewards", json.dumps(rewards), *SETTINGS]
    change = partial(changed, scale=scale, shuffle=arm == "shuffled", seed=seed)
    miniature.one([*options, *miniature.VARIANTS[arm], *extra], change)


def measure(job: tuple[str, float, int], folder: Path, extra: list[str]) -> dict:
    """A run in a process of its own, unless it is there; its figures."""
    arm, scale, seed = job
    run_dir = folder / f"{arm}_{scale:g}_{seed}"
    if not (run_dir / "summary.json").exists():
        command = [sys.executable, __file__, "--one", arm, str(scale), str(seed), str(run_dir), *extra]
        with open(folder / f"{run_dir.name}.log", "w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    summary = json.loads((run_dir / "summary.json").read_text())
    pixels = {when: summary["evaluation"]["pixel_accuracy"][when] for when in ("before", "after")}
    return {"arm": arm, "scale": scale, "seed": seed, **pixels, "seconds": summary["seconds"]["total"]}


def search(run) -> list[dict]:
    """GRPO's runs on the seed of choices, with products of weight and scale from 1 up by tens until accuracy falls."""
    rows = [run(("grpo", 1.0, SEARCH_SEED))]
    while len(rows) < 2 or (rows[-1]["after"] >= rows[-2]["after"] and len(rows) < 5):
        rows.append(run(("grpo", 10 * rows[-1]["scale"], SEARCH_SEED)))
    return rows


def table(cells: dict[tuple[str, float], list[dict]], searches: dict[float, int]) -> str:
    """Markdown: a row for each arm and scale."""
    head = ("scale of alignment", "arm", "weights tried", "before", "after", "least, most", "GDPO minus this")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (arm, scale), rows in cells.items():
        before, after = (np.array([row[when] for row in rows]) for when in ("before", "after"))
        ours, theirs = ({row["seed"]: row["after"] for row in some} for some in (cells.get(("gdpo", scale), []), rows))
        less = paired_difference(ours, theirs) if ours and arm != "gdpo" else ""
        tried = searches[scale] if arm == "best" else 1
        figures = f"{before.mean():.3f} | {after.mean():.3f} | {after.min():.3f}, {after.max():.3f} | {less}"
        lines.append(f"| {scale:g} | {arm} | {tried} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the figures."""
    if sys.argv[1:2] == ["--one"]:
        return one(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 0.1, 0.01])
    parser.add_argument("--seeds", type=int, nargs="+", default=[200, 201, 202])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/several_rewards"))
    options, extra = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run = partial(measure, folder=options.out, extra=extra)
    searched = search(run) if "best" in options.arms else []
    best = max(searched, key=lambda row: row["after"])["scale"] if searched else 1.0
    jobs = {
        (arm, scale): [("grpo", best, seed) if arm == "best" else (arm, scale, seed) for seed in options.seeds]
        for scale in options.scales
        for arm in options.arms
        if arm != "shuffled" or scale == options.scales[0]
    }
    every = [*dict.fromkeys(job for some in jobs.values() for job in some)]
    rows = dict(zip(every, ThreadPoolExecutor(options.jobs).map(run, every), strict=True))
    cells = {cell: [rows[job] for job in some] for cell, some in jobs.items()}
    # From weight 1, the product `scale`, up by tens until the one after the best has fallen.
    searches = {scale: round(np.log10(best / scale)) + 2 for scale in options.scales}
    print(json.dumps({"arguments": extra, "searched": searched, "runs": [*rows.values()]}, indent=2))
    print(f"\n{table(cells, searches)}")


if __name__ == "__main__":
    main()
