"""Every figure of the README is that of a measurement which is kept, or of the code."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from grpo_jax.config import make_config

ROOT = Path(__file__).parents[2]
TEXTS = "recommendation/beauty_text_together.json"
TAUGHT_ALL = "recommendation/beauty_ranking_every.json"
ALONE = "policy, after − policy, before"


@cache
def kept(name):
    """A file of benchmarks/."""
    return json.loads((ROOT / "benchmarks" / name).read_text())


def looking(measure):
    return kept("evidence/vision.json")["intervals"][measure][0]


def against_trl(case):
    """The median of the rounds."""
    ratios = kept(f"grpo_iteration_{case}.json")["results"][0]["ratios"]["time/trl"]
    return sorted(ratios)[len(ratios) // 2] if isinstance(ratios, list) else ratios


def on_a_xeon(case):
    """The ratio in the table of RESULTS.md."""
    section = (ROOT / "benchmarks" / "RESULTS.md").read_text().partition("### On an Intel Xeon")[2]
    return float(re.search(rf"^\| {case} \| \*\*(\S+)\*\*", section, flags=re.MULTILINE)[1])


def to_a_reward(measure):
    """Ours over TRL's, of medians."""
    return kept("time_to_reward.json")["ratios"][measure]


def gains(name, difference):
    """NDCG@10 of all users, seed by seed."""
    found = [row for run in kept(name) for row in run["differences"]]
    return [row["NDCG@10"][0] for row in found if row["method"] == difference and row["group"] == "all"]


def of_seed(seed, method):
    """NDCG@10 of all users after the config as it stands, the last run of a seed."""
    *_, run = (run for run in kept(TAUGHT_ALL) if run["seed"] == seed)
    (row,) = [row for row in run["table"] if row["method"] == method and row["group"] == "all"]
    assert row["users"] == 22363
    return row["NDCG@10"][0]


def printed(row, column):
    """A cell of a table of RESULTS.md that `benchmarks/miniature.py` printed."""
    lines = (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith(row))
    head = next(lines[above - 1] for above in range(place, 0, -1) if lines[above].startswith("|---"))
    return float(lines[place].split("|")[head.replace(" ", "").split("|").index(column)])


def of_a_tool(column):
    """The mean of three seeds in the table of a tool on real weights."""
    section = (ROOT / "benchmarks" / "RESULTS.md").read_text().partition("## A tool, on real weights")[2]
    lines = section.splitlines()
    head = next(line for line in lines if line.startswith("| seed"))
    place = [cell.strip() for cell in head.split("|")].index(column)
    seeds = [next(line for line in lines if line.startswith(f"| {seed} |")).split("|") for seed in range(3)]
    return sum(float(cells[place]) for cells in seeds) / 3


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
    (r"finds (\S+) of the requested attributes before", [lambda: printed("| **gdpo** | mean", "before")]),
    (r"after it \*\*(\S+)\*\* with GDPO", [lambda: printed("| **gdpo** | mean", "after")]),
    (r"\*\*(\S+)\*\* with GRPO", [lambda: printed("| **grpo** | mean", "after")]),
    (r"PPO reaches (\S+),", [lambda: printed("| **ppo** | mean", "after")]),
    (r"\((\d+) held-out prompts", [lambda: make_config(task="prompt_enhancement").evaluation.prompts]),
    (r"and (\S+) after training on shuffled", [lambda: printed("| shuffled | 0", "after")]),
    (r"from (\S+) of the attributes to \*\*(\S+)\*\*", [
        lambda: looking("refinement seeing turn_1"), lambda: looking("refinement seeing end")]),
    (r"another user's picture it stays at (\S+) ", [lambda: looking("refinement seeing end_wrong")]),
    (r"takes (\S+) to (\S+) of the time of TRL", [
        lambda: min(map(against_trl, ("small", "large_vocab", "long_prompt", "pictures"))),
        lambda: max(map(against_trl, ("small", "large_vocab", "long_prompt", "pictures")))]),
    (r"and (\S+) to (\S+) on an Intel Xeon", [
        lambda: min(map(on_a_xeon, ("small", "long-prompt", "large-vocab"))),
        lambda: max(map(on_a_xeon, ("small", "long-prompt", "large-vocab")))]),
    (r"a reward of (\S+) in (\S+) of TRL's", [lambda: 0.7, lambda: to_a_reward("cpu to 0.7")]),
    (r"with (\S+) of its memory", [lambda: to_a_reward("peak MiB, training")]),
    (r"from (\S+) of held-out ones right to \*\*(\S+)\*\*", [
        lambda: of_a_tool("right before"), lambda: of_a_tool("right after")]),
    (r"(\S+) on all weights, (\S+) with", [lambda: rate(), lambda: rate(rank=16)]),
    (r"GRPO in under (\d+) lines", [lambda: in_tens("examples/own_loop.py")]),
    (r"has an NDCG@10 of (\S+), and (\S+) beside co-occurrence", [
        lambda: sum(of_seed(seed, "policy, after") for seed in (1, 2)) / 2,
        lambda: sum(of_seed(seed, "policy, after + prior") for seed in (1, 2)) / 2]),
    (r"gains nothing by them \((\S+)\)", [lambda: gains(TEXTS, ALONE)[0]]),
]  # fmt: skip
"""What stands around figures of the README, and what they are."""
NAMES = r"Stable Diffusion 3|TRL 1\.16|Gemma [23]|[23] (?:CPU cores|GPUs)|Python 3\.11\+|tested on 3\.11 and 3\.13"
"""What has a number and measures nothing."""
NUMBER = re.compile(r"(?<![\w.@-])(?:\d[\d,]*)?\.?\d+(?:e-?\d+)?(?!\w)")


def prose(page):
    """What a reader takes for a claim: no code, no addresses; of command lines what is said behind them."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    page = re.sub(r"^    [^#\n]*(#[^\n]*)?$", lambda line: line[1] or "", page, flags=re.MULTILINE)
    page = re.sub(r"`[^`]*`", "``", page)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", page).split())


TEXT = prose((ROOT / "README.md").read_text())


@pytest.mark.parametrize(("around", "sources"), FIGURES, ids=[around for around, _ in FIGURES])
def test_a_figure_is_what_was_measured(around, sources):
    (found,) = re.finditer(around, TEXT)
    for said, source in zip(found.groups(), sources, strict=True):
        value = source()
        digits = len(said.partition(".")[2])
        rounded = f"{value:.0e}".replace("e-0", "e-") if "e" in said else f"{value:.{digits}f}"
        assert said == (rounded.removeprefix("0") if said.startswith(".") else rounded)


def test_no_figure_is_without_a_source():
    known = [
        found.span() for around in (NAMES, *(around for around, _ in FIGURES)) for found in re.finditer(around, TEXT)
    ]
    bare = [found for found in NUMBER.finditer(TEXT) if not any(a <= found.start() < b for a, b in known)]
    assert not [TEXT[max(0, found.start() - 30) : found.end() + 20] for found in bare]
