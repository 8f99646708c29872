"""How much of a reward is the text's, and how much the noise's that its picture was drawn from.

    python benchmarks/evidence/noises.py RUN [--checkpoints start 120 final] [--prompts 64] [--noises 8]

Groups of the first training prompts are sampled by a run's policy ("start": the one it began with) and each text drawn
from the same noises. A reward r(text, noise) of a group is then taken apart as in a two-way analysis of variance:
texts, noises, and what a text and a noise make together. A group shares its noises, so that theirs cancels in the
advantages; the share of the texts is texts / (texts + together / N) with N pictures of each, or, were every text drawn
from a noise of its own, texts / (texts + noises + together). Prints JSON and Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

PICTURES = (1, 2, 4, 8)


def components(values: np.ndarray) -> dict[str, float]:
    """Mean variances of rewards [K, P, G] within a group: of G texts, of K noises, and of both together."""
    noises, _, texts = values.shape
    of_text, of_noise, whole = values.mean(0), values.mean(2), values.mean((0, 2))
    rest = values - of_text - of_noise[..., None] + whole[:, None]
    together = (rest**2).sum((0, 2)).mean() / ((noises - 1) * (texts - 1))
    return {
        "texts": max(of_text.var(1, ddof=1).mean() - together / noises, 0.0),
        "noises": max(of_noise.var(0, ddof=1).mean() - together / texts, 0.0),
        "together": together,
    }


def shares(found: dict[str, float]) -> dict[str, float]:
    """The texts' share of the variance within a group, by pictures of a text, and without shared noises."""
    texts, noises, together = found["texts"], found["noises"], found["together"]
    whole = {str(count): texts / (texts + together / count) for count in PICTURES}
    return {**whole, "not_shared": texts / (texts + noises + together)}


def measure(parts: Any, variables: Any, prompts: int) -> dict[str, Any]:
    """The components and shares of each reward and watched measure that looks, of a policy."""
    from grpo_jax.rollout.rollout import collect

    rows, environment = parts.prompts.train[:prompts], parts.environment
    names = (*environment.reward_names, *environment.watch_names)

    def unjudged(rows: Any, texts: Any, *_: Any, **__: Any) -> list[np.ndarray]:
        both = environment.reward_names, environment.watch_names
        return [np.zeros((len(rows), len(texts[0]), len(some)), np.float32) for some in both]

    written, scheduling = environment._replace(render=None, score=unjudged), parts.scheduling(16)
    sample = parts.samplers.training
    episodes, _ = collect(written, sample, variables, rows, key=parts.key, iteration=0, scheduling=scheduling)
    drawn = environment.render(rows, episodes.texts, 0, False)
    size = prompts * parts.config.sampling.group_size
    values = []
    for start in range(0, len(drawn.images), size):  # one noise behind another
        one = drawn._replace(images=drawn.images[start : start + size])
        values.append(np.concatenate(environment.score(rows, episodes.texts, one), axis=-1))
    stacked = np.stack(values).astype(np.float64)  # [K, P, G, N + W]
    looking = [place for place in range(len(names)) if np.ptp(stacked[..., place], axis=0).any()]
    different = np.mean([len(set(group)) for group in episodes.texts])
    return {"different_texts": different} | {
        names[place]: (found := components(stacked[..., place])) | {"shares": shares(found)} for place in looking
    }


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    heads = ("texts", "noises", "together", *(f"share, {count}" for count in PICTURES), "not shared")
    lines = ["| policy | reward | " + " | ".join(heads) + " |", "|---|---|" + "---|" * len(heads)]
    for policy, rewards in report["policies"].items():
        for name, found in rewards.items():
            if isinstance(found, dict):
                variances = [f"{found[part]:.5f}" for part in ("texts", "noises", "together")]
                listed = [*variances, *(f"{share:.2f}" for share in found["shares"].values())]
                lines.append(f"| {policy} | {name} | " + " | ".join(listed) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures each policy and prints the figures."""
    from grpo_jax.runs.parts import load_parts
    from grpo_jax.runs.policy import restore_variables, run_config

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoints", nargs="+", default=["start", "final"], help="start, final, best or a step")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--noises", type=int, default=8)
    options = parser.parse_args()
    config = run_config(options.run)
    task = dataclasses.replace(config.task, pictures_per_text=options.noises)
    parts = load_parts(dataclasses.replace(config, task=task), say=lambda *_: None)
    policies = {}
    for which in options.checkpoints:
        variables = parts.policy.variables
        if which != "start":
            variables, _ = restore_variables(variables, options.run, int(which) if which.isdigit() else which)
        policies[which] = measure(parts, variables, options.prompts)
    machine = f"{platform.processor() or platform.machine()}, {platform.system()}"
    report = {"machine": machine, "prompts": options.prompts, "noises": options.noises, "policies": policies}
    print(json.dumps(report, indent=2))
    print(f"\n{table(report)}")


if __name__ == "__main__":
    main()
