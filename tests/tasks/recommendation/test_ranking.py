"""A policy that ranks the catalogue itself: what is written, what is listed, and a run through the command."""

import itertools
import json

import numpy as np
import pyarrow.parquet as parquet
import pytest
import yaml

from grpo_jax.evaluate import main as evaluate_main
from grpo_jax.recommend import load_recommender
from grpo_jax.recommend import main as recommend_main
from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation.dummy import make_world
from grpo_jax.tasks.recommendation.metrics import ndcg
from grpo_jax.tasks.recommendation.ranking.items import (
    FUSED_RANK,
    LISTED_RANK,
    completion_ranks,
    item_word,
    items_of,
    ranking_columns,
)
from grpo_jax.tasks.recommendation.ranking.prior import PriorSection, fused_scores, make_prior
from grpo_jax.tasks.recommendation.sequences import UserSequence
from grpo_jax.train import main

TITLES = ["Red soap", "Blue soap", "", "Green brush", "red Soap!"]

RUN = {
    "task": {
        "kind": "recommendation",
        "source": "dummy",
        "dummy_users": 120,
        "dummy_items": 280,
        "writes": "item",
        "template": "{items}",
        "training_targets": "apart",
        "listed": 30,
        "prior": {"history": 1.0, "together": 2.0},
    },
    "policy": {"path": "new", "new": {"width": 16, "layers": 1, "heads": 2, "window": 16}, "remat": "none"},
    "warm_start": {"steps": 8, "batch": 16, "learning_rate": 5e-3},
    "sampling": {"group_size": 4, "group": "distinct", "max_new_tokens": 2},
    "data": {"max_prompt_tokens": 12},
    "training": {"prompts_per_batch": 8, "max_steps": 2, "save_every": 0},
    "rewards": [{"name": "ndcg"}],
    "evaluation": {"prompts": 24, "validation_prompts": 8, "every": 1, "sampled": False},
}


def row(history, target):
    return Row(1, "", {"history": tuple(history), "target_row": target})


def test_titles_that_say_the_same_are_one_text_and_blank_ones_none():
    items = items_of(TITLES, "title")
    assert items.texts == ["Red soap", "Blue soap", "Green brush"] and items.rows.tolist() == [0, 1, 3]
    assert [items.row_of(text) for text in ("RED  soap", "green brush", "soap", "")] == [0, 3, -1, -1]
    assert items_of(TITLES, "item").texts == [item_word(place) for place in range(5)]


def test_a_ranking_leaves_the_history_out_and_puts_what_is_not_listed_last():
    items = items_of([f"title {place}" for place in range(6)], "item")
    rows = [row([0, 1], 2), row([0], 5), row([3], 3)]
    numbers = np.array([[0, 1, 4, 2], [0, 1, 2, 3], [0, 3, 1, 2]])
    columns = ranking_columns(items, None, rows, numbers, np.zeros((3, 4)))
    assert columns == {LISTED_RANK: [2, 6, 2]}  # a target in the history stays
    assert completion_ranks(items, ["", "", ""], columns).tolist() == [2, 6, 2]
    alone = {"target_row": [2, 5]}
    assert completion_ranks(items, ["item_2", "item_1"], alone).tolist() == [1, 6]


def test_the_prior_is_what_its_equation_says():
    titles = ["red soap", "blue soap", "green brush", "red brush"]
    users = [UserSequence("a", (0, 1, 2, 3)), UserSequence("b", (0, 1, 3, 2)), UserSequence("c", (1, 2, 3, 0))]
    known = make_prior(PriorSection(history=2.0, together=3.0, decay=0.5), titles, users)([[0, 1]])
    together = make_prior(PriorSection(together=3.0, decay=0.5), titles, users)([[0, 1]])
    # Taken in training: 0 and 1 by a and b, 1 and 2 by c.
    cosine = {(0, 1): 2 / np.sqrt(2 * 3), (1, 2): 1 / np.sqrt(3 * 1)}
    expected = 3.0 * np.array([cosine[0, 1], 0.5 * cosine[0, 1], cosine[1, 2], 0.0])
    np.testing.assert_allclose(together[0], expected, rtol=1e-6)
    text = (known - together)[0] / 2.0
    assert text.argmax() == 1 and text[2] == 0 and 0 < text[3] < text[0] < 1.0001


def test_what_is_not_listed_is_level_with_the_last_that_is():
    fused = fused_scores(np.array([[2, 0]]), np.array([[-1.0, -3.0]]), np.array([[0.0, 0.5, 0.0, 4.0]]))
    assert fused.tolist() == [[-3.0, -2.5, -1.0, 1.0]]
    items = items_of(["a b", "c d", "e f", "g h"], "item")
    columns = ranking_columns(
        items,
        lambda histories: np.array([[0.0, 0.5, 0.0, 4.0]]),
        [row([3], 2)],
        np.array([[2, 0]]),
        np.array([[-1.0, -3]]),
    )
    assert columns[FUSED_RANK] == [1.0]  # the only better one is in the history


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranking")
    (folder / "config.yaml").write_text(yaml.safe_dump(RUN))
    assert main([f"--config={folder / 'config.yaml'}", f"--run_dir={folder / 'run'}"]) == 0
    return folder / "run"


def test_a_group_is_distinct_items_and_rewards_are_those_of_hits(run):
    tables = [parquet.read_table(path).to_pylist() for path in sorted((run / "completions").glob("*.parquet"))]
    assert len(tables) == 2
    for table in tables:
        groups = [table[start : start + 4] for start in range(0, len(table), 4)]
        for group in groups:
            texts = [line["completion"] for line in group]
            assert len(set(texts)) == 4 and all(text.startswith("item_") for text in texts)
        lowest = float(ndcg(np.array([280.0]))[0])
        assert all(line["reward/ndcg"] in (1.0, pytest.approx(lowest)) for line in table)


def test_the_table_tells_policy_prior_and_both_apart(run):
    summary = json.loads((run / "summary.json").read_text())
    names = [line["method"] for line in summary["findings"]] if "findings" in summary else []
    text = (run / "train.log").read_text()
    for name in ("prior alone", "policy, before", "policy, before + prior", "policy, after", "policy, after + prior"):
        assert name in text or name in names
    before = summary["evaluation"]["ndcg@10"]["before"]
    assert 0 <= before <= 1 and summary["evaluation"]["ndcg@10"]["oracle"] == 1


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--sampling.max_new_tokens=1"], "sampling.max_new_tokens: expected at least 2"),
        (["--task.listed=281"], "at most 280"),
        (["--data.allowed_tokens=ascii"], "data.allowed_tokens"),
        (["--sampling.stop=[x]"], "sampling.stop"),
        (["--task.pairs=lessons"], "pairs"),
        (["--task.template={history} {items}", "--task.writes=title"], "template"),
        (["--task.writes=query", "--task.template={history}"], "prior.together: expected 0: a query is made of words"),
        (["--task.prior.decay=2"], "prior.decay"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(words, wrong, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(RUN))
    assert main([f"--config={tmp_path / 'config.yaml'}", f"--run_dir={tmp_path / 'run'}", *words]) == 2
    assert wrong in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_trained_run_recommends_and_says_why(run, capsys, tmp_path):
    titles = make_world(users=120, items=280, length=8, fickle=0.1, noise=0.02, seed=0).catalogue.titles
    asked = load_recommender(run)
    found = asked([titles[3], "i7"], 5)
    assert len(found) == 5 and not {"i3", "i7"} & {item.item for item in found}
    assert all(one.score >= other.score for one, other in itertools.pairwise(found))
    for item in found:
        assert set(item.words) <= set(item.title.split()) & set(f"{titles[3]} {titles[7]}".split())
    assert recommend_main(["--run", str(run), "--history", f"{titles[3]} | i7", "--k", "5"]) == 0
    printed = capsys.readouterr().out
    assert all(item.title in printed for item in found)
    (tmp_path / "histories.txt").write_text(f"{titles[3]}|i7\n\n{titles[1]}\n")
    assert recommend_main(["--run", str(run), "--file", str(tmp_path / "histories.txt"), "--k", "5"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [item["item"] for item in first["items"]] == [item.item for item in found]
    assert second["history"] == [titles[1]]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--history", "no such thing at all"], "history: no item is called 'no such thing at all'"),
        (["--history", " | "], "history: expected at least one title"),
        (["--history", "i1", "--k", "0"], "--k: expected a number >= 1"),
        (["--history", "i1", "--catalogue", "other.tsv"], "catalogue: expected the run's"),
        (["--file", "absent.txt"], "--file: cannot read"),
        (["--history", "i1", "--checkpoint", "99"], "99"),
    ],
)
def test_what_cannot_be_recommended_is_said(run, words, wrong, capsys):
    if "--catalogue" in words:
        assert evaluate_main(["--run", str(run), *words[2:]]) == 2
        assert wrong in capsys.readouterr().err
    assert recommend_main(["--run", str(run), *words]) == 2
    assert wrong in capsys.readouterr().err
