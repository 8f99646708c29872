"""Text and tables of docs/comparison.md, with every number from docs/comparison.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparison_figures import LEARNING, OBJECTIVES

SOLVED, LAST = 475, 7  # measurements at the end that are averaged


def solved_at(run: dict[str, Any]) -> list[float]:
    """Environment steps at the first measurement of at least 475, by seed; inf for never."""
    curves = run["curves"]
    pairs = zip(curves["environment_steps"], curves["episode_return"], strict=True)
    return [next((s for s, r in zip(*seed, strict=True) if r >= SOLVED), math.inf) for seed in pairs]


def seconds_at(run: dict[str, Any]) -> list[float]:
    """Seconds of the side-by-side run at that measurement, by seed."""
    returns = run["curves"]["episode_return"]
    return [
        next((t for t, r in zip(run["seconds_at"], seed, strict=True) if r >= SOLVED), math.inf) for seed in returns
    ]


def middle(values: Sequence[float | None]) -> float:
    """Median; inf counts as the largest, None not at all."""
    present = [x for x in values if x is not None]
    return float(np.quantile(present, 0.5, method="lower")) if present else math.nan


def last(run: dict[str, Any], key: str, measurements: int = 1) -> list[float]:
    """Each seed's mean over its last measurements."""
    values = [[x for x in seed[-measurements:] if x is not None] for seed in run["curves"][key]]
    return [float(np.mean(seed)) for seed in values if seed]


def span(values: Sequence[float], digits: int = 0) -> str:
    """Median and quartiles."""
    low, centre, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{centre:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def number(value: float) -> str:
    """A whole number for people, or a dash."""
    return f"{value:,.0f}" if math.isfinite(value) else "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def learning(results: dict[str, Any]) -> list[str]:
    """One task, three algorithms."""
    rows = []
    for name in LEARNING:
        run = results[name]
        steps, seconds = solved_at(run), seconds_at(run)
        rows.append(
            [
                name,
                f"{sum(map(math.isfinite, steps))}/{len(steps)}",
                f"{sum(x >= SOLVED for x in last(run, 'episode_return'))}/{len(steps)}",
                f"{number(middle(steps))} ({number(min(steps))}–{number(max(steps))})",
                f"{middle(seconds):.1f}" if math.isfinite(middle(seconds)) else "–",
                f"{run['iterations']}",
                run["learning_rate"],
                f"{run['seconds']:.1f}",
                f"{run['compile_seconds']:.0f}",
            ]
        )
    head = ["", "solved", "still at the end", "env steps to 475: median (range)", "seconds to 475, median"]
    head += ["iterations", "learning rate", "seconds of the run", "compiling, s"]
    return table(head, rows)


def objectives(results: dict[str, Any]) -> list[str]:
    """Two objectives at the end, and on the way."""
    rows = []
    for name in ("GRPO", *OBJECTIVES):
        run = results[name]
        both = [
            next((s for s, r, c in zip(*seed, strict=True) if r >= SOLVED and c >= 0.8 * 500), math.inf)
            for seed in zip(
                *(run["curves"][k] for k in ("environment_steps", "episode_return", "centred")), strict=True
            )
        ]
        rows.append(
            [
                "GRPO, upright alone" if name == "GRPO" else name,
                span(last(run, "episode_return", LAST)),
                span(last(run, "centred", LAST)),
                span(last(run, "distance", LAST), 2),
                number(middle(solved_at(run))),
                f"{sum(map(math.isfinite, both))}/{len(both)}",
                number(middle(both)),
            ]
        )
    head = ["", "upright", "centred", "distance", "env steps to upright 475",
            "seeds that reach both", "env steps to both"]  # fmt: skip
    return table(head, rows)


def signal(results: dict[str, Any]) -> list[str]:
    """Return the agreement of a group's advantages over the run of GRPO on the sum."""
    curves = results["GRPO on the sum"]["curves"]
    count = len(curves["dead/sum"][0])
    thirds = {"first third": slice(0, count // 3), "second": slice(count // 3, 2 * count // 3),
              "last": slice(2 * count // 3, count)}  # fmt: skip

    def pair(key: str, part: slice, names: Sequence[str]) -> str:
        values = [np.array(curves[key.format(name)], float)[:, part] for name in names]
        return " / ".join("–" if np.isnan(x).all() else f"{np.nanmean(x):.2f}" for x in values)

    both, each = ("sum", "gdpo"), ("upright", "centred", "sum")
    rows = [
        ["agreement with upright: sum / GDPO", "share/{}/upright", both],
        ["agreement with centred: sum / GDPO", "share/{}/centred", both],
        ["groups without signal: upright / centred / sum", "dead/{}", each],
        ["the same, yes-or-no rewards: upright / centred / sum", "dead_passed/{}", each],
    ]
    body = [[title, *(pair(key, part, names) for part in thirds.values())] for title, key, names in rows]
    return table(["part of the run", *thirds], body)


PAGE = """# PPO, GRPO and GDPO on one page

## When to take which

| algorithm | take it for | measured |
| --- | --- | --- |
| GRPO | one reward, or several in one unit that agree | [CartPole](#one-objective-cartpole): as many steps as PPO, without a value network |
| GDPO | rewards of different units or spreads | a rare right answer pays 10, 1, .1 or .01 beside noise of spread 1. GDPO learns it to .99, .99, .99, .99, GRPO to .99, .97, .05, .03 |
| RAFT | a control: is each group's best enough? | the same: .99, .98, .15, .04, because it also compares sums |
| PPO | rewards along an episode, with a state that predicts them | CartPole: 0.9 s of training, GRPO 1.6 s |

The rare answer is one of 32; figures are means over eight seeds
([tutorial](tutorial/6_several_rewards.md#a-rare-answer-beside-a-noisy-reward)).

No estimator solves these problems:

- **Conflicts.** If an easy reward excludes a hard one, GRPO, RAFT and GDPO learn the easy one; the hard one reaches .04,
  .03 and .09. With a [condition](algorithms.md#1-rewards) on the easy one it reaches .99, .97 and 1.00.
- **Useless rewards.** GDPO weighs a useless reward like a useful one: remove it, or lower its weight.
- **Zero-variance groups.** An answer that is never sampled gets no advantage.

## In the default run

![Pixel accuracy by the scale of alignment](images/several_rewards.png)

The default run got a noisy second reward, with alignment scaled by 1, .1 and .01, on three seeds. GDPO's pixel accuracy is
.85, .87 and .84, GRPO's .17, .19 and .13, RAFT's .05, .04 and .05, all with equal weights. A searched weight ties: GRPO
with the best of five reaches .89, because that weight ignores the noise ([figures](../benchmarks/RESULTS.md#gdpo-and-grpo-beside-a-noisy-reward)).

SmolLM2-135M learns a tool call although short answers, which exclude it, are also rewarded. Conditioned, or by GRPO, it needs
2 to 3 iterations, by GDPO 4 to 5 ([figures](../benchmarks/RESULTS.md#an-easy-reward-that-excludes-a-hard-one)).

## How this page is made

[`docs/make_comparison.py`](make_comparison.py) made the following, from [`docs/comparison.json`](comparison.json):

    pip install -e ".[cartpole,figures]"
    python docs/make_comparison.py                 # trains on CartPole, rewrites this page
    python docs/make_comparison.py --draw_only     # from the kept figures

{where}

## One objective: CartPole

A policy with one hidden layer plays CartPole-v1; {seeds} seeds learn in one compiled function. PPO has a value
network and GAE, and plays a fixed number of steps. GRPO plays whole episodes from one start and normalises their
discounted returns over the group. GDPO has a second objective, "centred". A seed has solved CartPole with a mean
return of at least 475 over 100 greedy episodes.

![Return over environment steps and seconds](images/comparison_learning.png)

Lines are medians over seeds, bands are quartiles.

{learning}

Seconds are those of all seeds together. Each algorithm has [its own settings](cartpole.md#settings). GDPO is faster than
GRPO here because of its learning rate; with the same rate, GRPO on the sum needs {sum_solved} environment steps. Speed:
[results](../benchmarks/RESULTS.md#cartpole).

## Two objectives

Each step pays 1 for being upright and max(0, 1 - |x| / {width}) for being near the middle, at most 500 each. All
runs but "upright alone" have the settings of GDPO:

- *GRPO on the sum* normalises the returns of the summed rewards.
- *GDPO* normalises each objective's returns, adds them, and whitens.
- *GDPO, weighted* gives upright twice the weight.
- *GDPO, conditioned* counts centred only in episodes of at least {condition} steps.

![Both objectives over environment steps](images/comparison_objectives.png)

Figures are medians over seeds (quartiles) of the mean of the last seven measurements; "both" is upright ≥ 475 and
centred ≥ 400.

{objectives}

### The signal

The policies of the run on the sum played a group of {group} episodes per seed at every measurement. *Agreement* is
the correlation, in the group, of the combined advantage with that of one objective.

![Agreement with each objective](images/comparison_signal.png)

While the pole still falls, lengths differ more than distances, so the sum follows upright. Later distances differ more,
so the sum neglects the rare fall. GDPO always gives both the same weight.

{signal}

The yes-or-no rewards are 1 for at least 475 steps, and for a mean of at least 0.6 centred per step.
"""


def busy(runs: dict[str, Any]) -> str:
    """A caution where other work was running."""
    load = max(run["load"] for run in runs.values())
    if load < 0.5:
        return ""
    return f" Other work was running (load {load:.1f} before the start), so only the seconds are too high."


def write_page(target: Path, results: dict[str, Any], *, group: int) -> None:
    """Fill in the page."""
    runs = results["cartpole"]
    made = runs["GRPO"]
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    target.write_text(
        PAGE.format(
            where=f"CartPole: {made['machine']}, {made['date']}; {versions}.{busy(runs)}",
            seeds=len(made["curves"]["episode_return"]),
            learning="\n".join(learning(runs)),
            width=runs["GDPO"]["width"],
            condition=runs["GDPO, conditioned"]["condition"],
            objectives="\n".join(objectives(runs)),
            group=group,
            sum_solved=number(middle(solved_at(runs["GRPO on the sum"]))),
            signal="\n".join(signal(runs)),
        )
    )
