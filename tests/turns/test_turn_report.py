"""Episodes in figures and on the page: held-out measures by slow loops, and what the report shows of them."""

import math

import numpy as np
import pytest
from support.rollouts import rollout_of

from grpo_jax.reports.page import RunEnd, render_report
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.metrics import turn_measures
from grpo_jax.tasks.task import EpisodeEntry, ShownTurn

nan = math.nan
VALUES = [  # of each prompt, of each turn: a share that is right at 1, and a score that may be missing
    [(1.0, 3.0), (0.5, 2.0), (1.0, 4.0)],
    [(1.0, 1.0), (1.0, nan), (0.0, 5.0)],
    [(0.0, nan), (1.0, 2.0)],
    [(0.25, 2.0)],
]


def judged():
    turns = np.full((4, 1, 3, 2), nan, np.float32)
    for p, episode in enumerate(VALUES):
        turns[p, 0, : len(episode)] = episode
    last = np.array([[len(episode) - 1] for episode in VALUES])
    return rollout_of(turns[..., :1], turns[..., 1:], last)


def mean(values):
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else nan


def loop(n):
    """One prompt after the other, from what the names promise."""
    found = {"turn_1": [], "turn_2": [], "peak": [], "kept": [], "gain": []}
    for episode in VALUES:
        own = [turn[n] for turn in episode]
        for turn in (1, 2):
            found[f"turn_{turn}"].append(own[min(turn, len(own)) - 1])
        present = [value for value in own if not math.isnan(value)]
        found["peak"].append(max(present) if present else nan)
        if own[0] >= 1.0:
            found["kept"].append(float(own[-1] >= own[0]))
        found["gain"].append(own[-1] - own[0])
    return {name: mean(values) for name, values in found.items()}


def test_measures_of_turns_are_those_of_a_loop():
    came = turn_measures(judged(), ["share", "score"])
    assert len(came) == 10
    for n, name in enumerate(("share", "score")):
        for what, expected in loop(n).items():
            assert came[f"{name}_{what}"] == pytest.approx(expected, nan_ok=True), (name, what)
    assert came["share_kept"] == 0.5 and came["share_gain"] == pytest.approx(0.0)


def test_the_page_shows_episodes_as_they_went(tmp_path):
    image = np.full((8, 8, 3), 200, np.uint8)
    turns = [
        ShownTurn("a <red> disc", {"share": 0.5}, image, "mend it", [image]),
        ShownTurn("a red disc", {"share": 1.0, "score": nan}, image),
    ]
    entry = EpisodeEntry("red & round", turns, [image])
    measures = {"share": 1.0, **turn_measures(judged(), ["share"])}
    summary = {"evaluation": {name: {"before": 0.0, "after": value} for name, value in measures.items()}}
    metrics = [{"step": step, "reward/share@turn1": 0.5, "reward/share/mean": 0.6, "turns": 2.0} for step in (1, 2)]
    end = RunEnd(episodes=[entry])
    page = render_report("run", summary, rows=metrics, end=end)
    section = page[page.index("<h2>Episodes</h2>") :]
    order = ["red &amp; round", "a &lt;red&gt; disc", "mend it", "a red disc"]
    places = [section.index(text) for text in order]
    assert places == sorted(places) and section.partition("</section>")[0].count("data:image/png") == 4
    assert "Rewards turn by turn" in page and "share, turn 1" in page and "Turns of an episode" in page
    assert "<h3>share gain" not in page
    RunDirectory(tmp_path).write_images([], [entry])
    assert sorted(file.name for file in (tmp_path / "images").iterdir()) == ["000_turn_1.png", "000_turn_2.png"]
