"""Check each figure of the README against a kept measurement or the code."""

import json
import re
from functools import cache
from statistics import mean, median

import pytest
from support.imports import ROOT

from grpo_jax.config.run import make_config


@cache
def kept(name):
    """A file of benchmarks/."""
    return json.loads((ROOT / "benchmarks" / name).read_text())


def results():
    return (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()


def seeds():
    """Pixel accuracy after training of each seed."""
    return [float(line.split("|")[5]) for line in results() if line.startswith("| gdpo |")]


def printed(row, column):
    """A cell of a table of RESULTS.md that `benchmarks/miniature.py` printed."""
    lines = results()
    place = next(place for place, line in enumerate(lines) if line.startswith(row))
    head = next(lines[above - 1] for above in range(place, 0, -1) if lines[above].startswith("|---"))
    return float(lines[place].split("|")[head.replace(" ", "").split("|").index(column)])


def over_scales(arm, choose):
    """The least or largest mean over seeds of an arm beside a noisy reward, among its scales of at most 1."""
    runs = [run for run in kept("several_rewards.json")["runs"] if run["arm"] == arm and run["scale"] <= 1]
    scales = {run["scale"] for run in runs}
    return choose(mean(run["after"] for run in runs if run["scale"] == scale) for scale in scales)


def three_rewards(arm):
    """The mean pixel accuracy of an arm of `benchmarks/three_rewards.py` over its fresh seeds."""
    lines = (ROOT / "benchmarks" / "three_rewards.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if re.fullmatch(rf"{arm}_\de-3_1_4\d\d", run["run"])]
    assert len(runs) == 10
    return mean(run["pixel_accuracy"]["after"] for run in runs)


def joint(arm):
    """The mean pixel accuracy over seeds of an arm of `benchmarks/joint.py`."""
    return mean(run["after"] for run in kept("joint.json")["runs"] if run["arm"] == arm)


def writer(when, arm="gdpo", pairs=32, arguments=()):
    """The mean pixel accuracy of SmolLM2-135M over the fresh seeds of `benchmarks/small_writer.py`."""
    runs = [run for run in kept("small_writer.json")["runs"] if run["arm"] == arm and run["seed"] >= 300]
    return mean(run[when] for run in runs if run["pairs"] == pairs and run["arguments"] == [*arguments])


def writer_beside_trl():
    """The mean ratio of CPU seconds to TRL's, over the seeds of both."""
    timed = [run for run in kept("small_writer.json")["runs"] if run["pairs"] == 32 and "cpu" in run]
    runs = {(run["arm"], run["seed"]): run["cpu"][-1] for run in timed}
    return mean(runs["gdpo", seed] / seconds for (arm, seed), seconds in runs.items() if arm == "trl")


def fewer_pairs():
    """The fewest pairs that were supervised alone."""
    return min(run["pairs"] for run in kept("small_writer.json")["runs"] if run["arm"] == "sft")


def rate(**lora):
    return make_config(task="text", policy={"lora": lora}).learning_rate


def parameters():
    """Of the miniature's policy, from the header of its weights."""
    with (ROOT / "bridges" / "miniature" / "weights" / "policy" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    return sum(rows * (columns[0] if columns else 1) for rows, *columns in shapes)


def in_tens(path):
    return 10 * (len((ROOT / path).read_text().splitlines()) // 10 + 1)


FIGURES = [
    (r"a (\S+) M-parameter policy", [lambda: parameters() / 1e6]),
    (r"finds (\S+ %) of the requested attributes before", [lambda: printed("| **gdpo** | mean", "before")]),
    (r"\*\*(\S+ %)\*\* after it", [lambda: printed("| **gdpo** | mean", "after")]),
    (r"over (\d+) held-out prompts", [lambda: make_config(task="prompt_enhancement").evaluation.prompts]),
    (r"on shuffled rewards ends at (\S+ %)", [lambda: printed("| shuffled | 377", "after")]),
    (r"and (\d+) fresh seeds", [lambda: len(seeds())]),
    (r"the lowest seed reaches (\S+ %)", [lambda: min(seeds())]),
    (r"GDPO (\.\d+) to (\.\d+), GRPO", [lambda: over_scales("gdpo", min), lambda: over_scales("gdpo", max)]),
    (r", GRPO (\.\d+) to (\.\d+), RAFT", [lambda: over_scales("grpo", min), lambda: over_scales("grpo", max)]),
    (r", RAFT (\.\d+) to (\.\d+)\]", [lambda: over_scales("raft", min), lambda: over_scales("raft", max)]),
    (r"GDPO reaches (\.\d+) and GRPO (\.\d+) \(ten", [lambda: three_rewards("gdpo"), lambda: three_rewards("grpo")]),
    (r"with the rewriter alone \((\.\d+)\), and", [lambda: joint("rewriter")]),
    (r"and with both \(\*\*(\.\d+)\*\* of", [lambda: joint("joint")]),
    (r"one CPU core (\S+) × faster than with TRL", [lambda: 1 / kept("time_to_reward.json")["ratios"]["cpu to 0.7"]]),
    (r"SmolLM2-135M has (\.\d+) after some supervised", [lambda: writer("before")]),
    (r"supervised updates on (\d+) pairs", [lambda: kept("small_writer.json")["runs"][0]["pairs"]]),
    (r"on rewards then reaches \*\*(\.\d+)\*\*", [lambda: writer("after")]),
    (r"Supervision alone reaches (\.\d+) in", [lambda: writer("after", arm="sft")]),
    (r"in (\.\d+) of TRL's CPU seconds \(three", [writer_beside_trl]),
    (r"Behind (\d+) pairs supervision", [fewer_pairs]),
    (r"supervision ends at (\.\d+), and", [lambda: writer("after", arm="sft", pairs=8)]),
    (r"rewards reach \*\*(\.\d+)\*\* \(three", [lambda: writer("after", "gdpo", 8, ("--training.max_steps", "180"))]),
    (r"(\S+) on all weights, (\S+) with", [lambda: rate(), lambda: rate(rank=16)]),
    (r"GRPO in under (\d+) lines", [lambda: in_tens("examples/own_loop.py")]),
]  # fmt: skip
"""Texts around the README's figures, with the sources of the figures."""
NAMES = (
    r"Stable Diffusion 3|one GPU\]? of \d+(?: or \d+)? GB|Qwen2\.5-1\.5B(?: or 0\.5B)?"
    r"|[23] (?:CPU cores|GPUs)|Python 3\.11\+|November 2026|return 1 if"
)
"""Texts with a number that is no measurement."""
NUMBER = re.compile(r"(?<![\w.@-])(?:\d[\d,]*)?\.?\d+(?:e-?\d+)?(?!\w)")


def prose(page):
    """What a reader takes for a claim: no code, no addresses; of command lines what is said behind them."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    page = re.sub(r"^    [^#\n]*(#[^\n]*)?$", lambda line: line[1] or "", page, flags=re.MULTILINE)
    page = re.sub(r"`[^`]*`", "``", page)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", page).split())


TEXT = prose((ROOT / "README.md").read_text())


def first_of(libraries, name):
    """The first iteration of a library's fastest variant."""
    rows = [row for key, row in libraries.items() if key.split("/")[0] == name]
    return min(rows, key=lambda row: row["total"])["first"]


ITERATIONS = ("small", "long-prompt", "large-vocab", "unequal")


@pytest.mark.parametrize(
    ("column", "case", "file"),
    [
        *((1, case, f"grpo_iteration_{case.replace('-', '_')}.json") for case in (*ITERATIONS, "pictures")),
        *((2, case, "grpo_iteration_avx512.json") for case in ITERATIONS),
    ],
)
def test_the_speed_beside_trl_is_what_was_measured(column, case, file):
    page = (ROOT / "docs" / "speed.md").read_text().splitlines()
    (cells,) = [line.strip("|").split("|") for line in page if line.startswith(f"| {case}: ")]
    (result,) = [result for result in kept(file)["results"] if result["case"] == case]
    said = re.match(r" ([\d.]+) ×", cells[column])[1]
    rounds = next(values for name, values in result["ratios"].items() if name.startswith("time"))
    ratio = 1 / median(rounds if isinstance(rounds, list) else [rounds])
    assert said == f"{ratio:.{len(said.partition('.')[2])}f}"
    if column == 2:
        first = [first_of(result["libraries"], name) for name in ("ours", "trl")]
        assert cells[3].strip() == ", ".join(f"{seconds:.0f}" for seconds in first)


@pytest.mark.parametrize(("around", "sources"), FIGURES, ids=[around for around, _ in FIGURES])
def test_a_figure_is_what_was_measured(around, sources):
    (found,) = re.finditer(around, TEXT)
    for said, source in zip(found.groups(), sources, strict=True):
        value = source()
        if said.endswith(" %"):
            said, value = said.removesuffix(" %"), 100 * value
        digits = len(said.partition(".")[2])
        rounded = f"{value:.0e}".replace("e-0", "e-") if "e" in said else f"{value:.{digits}f}"
        assert said == (rounded.removeprefix("0") if said.startswith(".") else rounded)


def test_no_figure_is_without_a_source():
    known = [
        found.span() for around in (NAMES, *(around for around, _ in FIGURES)) for found in re.finditer(around, TEXT)
    ]
    bare = [found for found in NUMBER.finditer(TEXT) if not any(a <= found.start() < b for a, b in known)]
    assert not [TEXT[max(0, found.start() - 30) : found.end() + 20] for found in bare]
