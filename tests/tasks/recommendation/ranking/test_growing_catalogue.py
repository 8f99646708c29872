"""A catalogue that has grown after a run: evaluate ranks it, recommend lists its new items, and what is refused."""

import json

import pytest

from grpo_jax.evaluate import main as evaluate
from grpo_jax.recommend import main as recommend
from grpo_jax.train import main as train

TITLES = ("red soap", "blue soap", "rosé cream", "hand cream", "nail brush", "shaving brush", "night palette")
ITEMS = "id\ttitle\n" + "".join(f"{name}\t{title}\n" for name, title in zip("abcdefg", TITLES, strict=True))
USERS = "".join(f"u{n} {' '.join('abcdefg'[n % 3 : n % 3 + 5])}\n" for n in range(9))
NEW = "blue soap rosé cream hand cream"  # words of a history
OPTIONS = {
    "report_to": "[]",
    "task.pairs": "next",
    "policy.new.width": 16,
    "warm_start.steps": 0,
    "sampling.group_size": 2,
    "sampling.max_new_tokens": 8,
    "training.prompts_per_batch": 2,
    "training.max_steps": 1,
    "evaluation.prompts": 9,
    "evaluation.every": 0,
}
WRITES = {
    "query": {"task.writes": "query", "task.prior.history": 50, "sampling.group": "samples"},
    "title": {"task.writes": "title", "task.listed": 0, "task.prior.history": 500, "sampling.group": "distinct"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("growing")
    (folder / "items.tsv").write_text(ITEMS)
    (folder / "sequential.txt").write_text(USERS)
    (folder / "grown.tsv").write_text(f"id\ttitle\nnew\t{NEW}\n{ITEMS.split(chr(10), 1)[1]}")  # rows move
    (folder / "less.tsv").write_text(ITEMS.replace("c\trosé cream\n", ""))
    copies = "".join(
        f"{name}{copy}\t{title}\n" for copy in range(10) for name, title in zip("abcdefg", TITLES, strict=True)
    )
    (folder / "copies.tsv").write_text(ITEMS + copies)
    return folder


@pytest.fixture(scope="module", params=WRITES)
def run(request, folder):
    run, files = folder / request.param, {"source": folder / "sequential.txt", "catalogue": folder / "items.tsv"}
    options = OPTIONS | WRITES[request.param] | {f"task.{name}": path for name, path in files.items()}
    words = [f"--{name}={value}" for name, value in options.items()]
    assert train(["--config", "recommendation_quick", f"--run_dir={run}", *words]) == 0
    return run


def test_what_has_grown_is_ranked_at_once(run, folder, capsys):
    """Ten copies of every title stand before the target, where seven items would leave none outside the first ten."""
    assert evaluate(["--run", str(run), "--catalogue", str(folder / "copies.tsv"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {row["method"]: row["HR@10"]["mean"] for row in report["table"]}
    assert report["prompts"] == 9 and found["oracle: own title"] == found["prior alone"] == 0
    # A letter and its accent are one character in the file, and two in the question.
    asked = ["--history", "blue soap | rose\u0301 cream | hand cream", "--catalogue", str(folder / "grown.tsv")]
    assert recommend(["--run", str(run), *asked, "--k", "3", "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert [item["item"] for item in items[:2]] == ["new", "a"]
    assert items[0]["together"] == [] and set(items[1]["together"]) == {"blue soap", "rosé cream"}  # of the run's users


def test_a_catalogue_that_lost_items_is_refused(run, folder, capsys):
    assert evaluate(["--run", str(run), "--catalogue", str(folder / "less.tsv")]) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: catalogue: expected all 7 items of ") and written.count("\n") == 1
    assert "less.tsv without 1 of them, the first 'c'" in written
