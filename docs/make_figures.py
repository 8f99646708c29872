"""Make the pictures of the README from a finished run.

pip install -e ".[figures]"
python docs/make_figures.py --run runs/my_run              # writes docs/images/gallery.png and curves.png
python docs/make_figures.py --run runs/my_refinement       # a run of several turns: docs/images/episodes.png
python docs/make_figures.py --run runs/joint --rewriter runs/rewriter          # docs/images/joint.png
python docs/make_figures.py --scales benchmarks/several_rewards.json     # docs/images/several_rewards.png
python docs/make_figures.py --tasks benchmarks/reasoning_gym_tasks.json          # docs/images/reasoning_gym.png
python docs/make_figures.py --writer benchmarks/small_writer.json          # docs/images/small_writer.png
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.image import imread

HERE = Path(__file__).parent
BLUE, GREY, GREEN, RED = "#2a6fdb", "#8a8f98", "#2e8b57", "#c0504d"
ARMS = (
    ("gdpo", GREEN, "o-", "GDPO"),
    ("grpo", BLUE, "s--", "GRPO on the sum"),
    ("raft", RED, "^-.", "RAFT on the sum"),
)


def gallery(run: Path, target: Path, pairs: int) -> None:
    """Before/after pairs of the run's first held-out prompts."""
    entries = json.loads((run / "report.json").read_text())["gallery"][:pairs]
    texts = [(entry["prompt"], [entry["completion"]]) for entry in entries]
    draw_pairs([(run, "before"), (run, "after")], target, texts)


def joint(run: Path, rewriter: Path, target: Path, pairs: int) -> None:
    """Draw each prompt as typed, rewritten where only the rewriter learned, and where the renderer learned too."""
    entries, others = (
        json.loads((folder / "report.json").read_text())["gallery"][:pairs] for folder in (run, rewriter)
    )
    texts = [
        (both["prompt"], [f"{alone['completion']}  |  {both['completion']}"])
        for both, alone in zip(entries, others, strict=True)
    ]
    draw_pairs([(run, "before"), (rewriter, "after"), (run, "after")], target, texts)


def episodes(run: Path, target: Path, pairs: int) -> None:
    """Draw both turns of the run's first held-out prompts."""
    entries = json.loads((run / "report.json").read_text())["episodes"][:pairs]
    texts = [(entry["prompt"], [turn["completion"] for turn in entry["turns"][:2]]) for entry in entries]
    draw_pairs([(run, "turn_1"), (run, "turn_2")], target, texts)


def draw_pairs(
    names: list[tuple[Path, str]], target: Path, texts: list[tuple[str, list[str]]], columns: int = 4
) -> None:
    """Pictures (run, name) of each prompt side by side, the prompt above, what was written below."""
    rows = -(-len(texts) // columns)
    height = 0.85 + 2.0 / len(names) + 0.2 * max(len(written) for _, written in texts)
    figure, axes = plt.subplots(rows, columns, figsize=(3.1 * columns, height * rows), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for index, (axis, (prompt, written)) in enumerate(zip(axes.flat, texts, strict=False)):
        pictures = [imread(run / "images" / f"{index:03d}_{name}.png")[..., :3] for run, name in names]
        gap = np.ones((len(pictures[0]), max(len(pictures[0]) // 8, 1), 3))
        parts = [part for picture in pictures for part in (gap, picture)][1:]
        axis.imshow(np.concatenate(parts, axis=1), interpolation="nearest")
        axis.set_title(textwrap.fill(prompt, 44), fontsize=7.5, color=GREY)
        below = "\n".join(textwrap.fill(text, 52) for text in written)
        axis.text(0.5, -0.05, below, fontsize=7.5, ha="center", va="top", transform=axis.transAxes)
    figure.tight_layout(h_pad=2.2)
    figure.savefig(target, dpi=130)


def curves(run: Path, target: Path) -> None:
    """Pixel accuracy and alignment over iterations, with before, after and oracle on held-out prompts."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    steps = [row["step"] for row in rows]
    panels = (
        ("pixel accuracy (never trained on)", "eval_rewards/pixel_accuracy/mean", "pixel_accuracy"),
        ("alignment reward (CLIP)", "reward/alignment/mean", "alignment"),
    )
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for axis, (title, curve, measure) in zip(axes, panels, strict=True):
        values = summary["evaluation"][measure]
        axis.plot(steps, [row[curve] for row in rows], color=BLUE, label="training batch, sampled")
        axis.axhline(values["oracle"], color=GREEN, linestyle="--", label=f"oracle, held out: {values['oracle']:.2f}")
        axis.plot([0], [values["before"]], "o", color=GREY, label=f"before, held out: {values['before']:.2f}")
        axis.plot([steps[-1]], [values["after"]], "o", color=BLUE, label=f"after, held out: {values['after']:.2f}")
        axis.set(title=title, xlabel="iteration")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def scales(source: Path, target: Path) -> None:
    """Pixel accuracy beside a noisy reward, by the scale of the true one: a line for each arm, a dot for each seed."""
    runs = json.loads(source.read_text())["runs"]
    figure, axis = plt.subplots(figsize=(6.2, 3))
    for arm, colour, style, label in ARMS:
        seen = [(run["scale"], run["after"]) for run in runs if run["arm"] == arm and run["scale"] <= 1]
        ticks = sorted({scale for scale, _ in seen})
        means = [np.mean([after for at, after in seen if at == scale]) for scale in ticks]
        axis.plot(*zip(*seen, strict=True), ".", color=colour, alpha=0.4)
        axis.plot(ticks, means, style, color=colour, label=label)
    best = np.mean([run["after"] for run in runs if run["arm"] == "grpo" and run["scale"] > 1])
    axis.axhline(best, color=GREY, linestyle=":", label="GRPO, best of five weights")
    axis.set(xscale="log", ylim=(0, 1), xlabel="scale of alignment", ylabel="pixel accuracy, held out")
    axis.set_xticks(ticks, [f"{scale:g}" for scale in ticks])
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def tasks(source: Path, target: Path, window: int = 3) -> None:
    """Rewards of three tasks by step: each run, and the mean of an arm's runs."""
    runs = json.loads(source.read_text())["runs"]
    titles = {"sums": "sums", "chains": "sums and differences", "products": "products, two turns and a tool"}
    arms = (("grpo", BLUE, "score"), ("exact", GREEN, "whole scores only"), ("shuffled", GREY, "score, shuffled"))
    figure, axes = plt.subplots(1, len(titles), figsize=(10, 3), sharey=True)
    for axis, (task, title) in zip(axes, titles.items(), strict=True):
        for arm, colour, label in arms:
            found = [run["rewards"] for run in runs if (run["task"], run["arm"]) == (task, arm)]
            if not found:
                continue
            width = window if len(found[0]) > 2 * window else 1
            smooth = [np.convolve(rewards, np.ones(width) / width, "valid") for rewards in found]
            steps = range(width, len(found[0]) + 1)
            axis.plot(steps, np.transpose(smooth), color=colour, alpha=0.35, linewidth=1)
            axis.plot(steps, np.mean(smooth, 0), color=colour, label=f"{label} ({len(found)})")
        axis.set(title=title, xlabel="step", ylim=(0, 1.02))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    axes[0].set_ylabel(f"reward, mean of {window} steps")
    axes[-1].set_ylabel("reward")
    figure.tight_layout()
    figure.savefig(target, dpi=100)


def writer(source: Path, target: Path, window: int = 5) -> None:
    """Pixel accuracy by CPU seconds, ours and TRL's on the same seeds: the means, their range, and dots held out."""
    runs = [run for run in json.loads(source.read_text())["runs"] if run["pairs"] == 32 and "cpu" in run]
    arms = {arm: {run["seed"]: run for run in runs if run["arm"] == arm} for arm in ("gdpo", "trl")}
    seeds = sorted(arms["gdpo"].keys() & arms["trl"].keys())
    figure, axis = plt.subplots(figsize=(6.2, 3))
    for found, colour, name in zip(arms.values(), (BLUE, GREY), ("grpo_jax", "TRL 1.16"), strict=True):
        columns = {key: np.array([found[seed][key] for seed in seeds]) for key in ("batches", "cpu", "before", "after")}
        smooth = np.stack([np.convolve(row, np.ones(window) / window, "valid") for row in columns["batches"]])
        seconds = columns["cpu"].mean(0)
        label = f"{name}, held out {columns['before'].mean():.2f} → {columns['after'].mean():.2f}"
        axis.plot(seconds[window - 1 :], smooth.mean(0), color=colour, label=label)
        axis.fill_between(seconds[window - 1 :], smooth.min(0), smooth.max(0), color=colour, alpha=0.2, linewidth=0)
        for place, when in ((0.0, "before"), (seconds[-1], "after")):
            axis.plot(np.full(len(seeds), place), columns[when], "o", color=colour, markersize=4, clip_on=False)
    axis.set(xlabel="CPU seconds of training on rewards", ylabel=f"pixel accuracy, {window} batches")
    axis.set(xlim=0, ylim=(0.5, 1))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=100)


def main() -> None:
    """Reads the run, writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path)
    what.add_argument("--scales", type=Path)
    what.add_argument("--tasks", type=Path)
    what.add_argument("--writer", type=Path)
    parser.add_argument("--rewriter", type=Path, help="the same run with training.learns rewriter")
    parser.add_argument("--pairs", type=int, default=12)
    options = parser.parse_args()
    images = HERE / "images"
    images.mkdir(exist_ok=True)
    if options.scales:
        scales(options.scales, images / "several_rewards.png")
        return
    if options.tasks:
        tasks(options.tasks, images / "reasoning_gym.png")
        return
    if options.writer:
        writer(options.writer, images / "small_writer.png")
        return
    if options.rewriter:
        joint(options.run, options.rewriter, images / "joint.png", options.pairs)
        return
    if (options.run / "images" / "000_turn_1.png").exists():
        episodes(options.run, images / "episodes.png", options.pairs)
        return
    gallery(options.run, images / "gallery.png", options.pairs)
    curves(options.run, images / "curves.png")


if __name__ == "__main__":
    main()
