"""A policy that ranks the catalogue itself: what is written, what is listed, and a run through the command."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as parquet
import pytest
import yaml
from safetensors.numpy import load_file

from grpo_jax.evaluate import main as evaluate_main
from grpo_jax.recommend import load_recommender
from grpo_jax.recommend import main as recommend_main
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.rollout import Judgement
from grpo_jax.tasks.recommendation.baselines import fused_scores, make_parts, make_prior
from grpo_jax.tasks.recommendation.catalogue import UserSequence, item_word, items_of
from grpo_jax.tasks.recommendation.dataset import ranking_everything
from grpo_jax.tasks.recommendation.dummy import make_world
from grpo_jax.tasks.recommendation.loading import item_vectors
from grpo_jax.tasks.recommendation.metrics import count_better, hit, ndcg, rank_of
from grpo_jax.tasks.recommendation.recommending import grid, weigh
from grpo_jax.tasks.recommendation.report import policy_ranks
from grpo_jax.tasks.recommendation.rewards import (
    FUSED_FIRST,
    FUSED_RANK,
    LISTED_FIRST,
    LISTED_RANK,
    completion_ranks,
    ranking_columns,
)
from grpo_jax.tasks.recommendation.task import PriorSection
from grpo_jax.train import main

TITLES = ["Red soap", "Blue soap", "", "Green brush", "red Soap!"]

RUN = {
    "task": {
        "kind": "recommendation",
        "source": "dummy",
        "dummy_users": 120,
        "dummy_items": 280,
        "dummy_length": 12,
        "history_items": 12,
        "writes": "item",
        "template": "{items}",
        "training_targets": "apart",
        "listed": 30,
        "prior": {"history": 1.0, "together": 2.0},
    },
    "policy": {"path": "new", "new": {"width": 16, "layers": 1, "heads": 2, "window": 16}, "remat": "none"},
    "warm_start": {"steps": 8, "batch": 16, "learning_rate": 5e-3},
    "sampling": {"group_size": 4, "group": "distinct", "max_new_tokens": 2},
    "data": {"max_prompt_tokens": 14},
    "training": {"prompts_per_batch": 8, "max_steps": 2, "save_every": 0},
    "rewards": [{"name": "ndcg"}],
    "evaluation": {"prompts": 24, "validation_prompts": 8, "every": 1, "sampled": False},
}


def row(history, target):
    return Row(1, "", {"history": tuple(history), "target_row": target, "excluded": tuple(history)})


def test_titles_that_say_the_same_are_one_text_and_blank_ones_none():
    items = items_of(TITLES)
    assert items.texts == ["Red soap", "Blue soap", "Green brush"] and items.rows.tolist() == [0, 1, 3]
    assert [items.row_of(text) for text in ("RED  soap", "green brush", "soap", "")] == [0, 3, -1, -1]
    assert items_of([item_word(place) for place in range(5)]).row_of("item_4") == 4


def test_a_ranking_leaves_the_history_out_and_puts_what_is_not_listed_last():
    items = items_of([item_word(place) for place in range(6)])
    rows = [row([0, 1], 2), row([0], 5), row([3], 3)]
    numbers = np.array([[0, 1, 4, 2], [0, 1, 2, 3], [0, 3, 1, 2]])
    columns = ranking_columns(items, None, rows, numbers, np.zeros((3, 4)))
    assert columns[LISTED_RANK] == [2, 6, 2]  # a target in the history stays, but nobody is told to take it again
    assert columns[LISTED_FIRST] == [[4, 2], [1, 2, 3], [0, 1, 2]]
    judgement = Judgement(
        np.zeros((3, 1, 1, 1)), np.array([2.0, 6.0, 2.0]).reshape(3, 1, 1, 1), np.zeros((3, 1), int), columns
    )
    found = policy_ranks("before", {"greedy": judgement, "oracle": judgement})
    assert found == {"before": {"rank": [2, 6, 2], "recommended": [0, 1, 2, 3, 4], "times": [1, 2, 3, 1, 1]}}
    assert json.loads(json.dumps(found)) == found  # goes into checkpoints
    assert completion_ranks(items, ["", "", ""], columns).tolist() == [2, 6, 2]
    alone = {"target_row": [2, 5]}
    assert completion_ranks(items, ["item_2", "item_1"], alone).tolist() == [1, 6]


def test_the_prior_is_what_its_equation_says():
    titles = ["red soap", "blue soap", "green brush", "red brush"]
    users = [UserSequence("a", (0, 1)), UserSequence("b", (0, 1)), UserSequence("c", (1, 2))]
    known = make_prior(PriorSection(history=2.0, together=3.0, decay=0.5), titles, users)([[0, 1]])
    together = make_prior(PriorSection(together=3.0, decay=0.5), titles, users)([[0, 1]])
    # Taken in training: 0 and 1 by a and b, 1 and 2 by c.
    cosine = {(0, 1): 2 / np.sqrt(2 * 3), (1, 2): 1 / np.sqrt(3 * 1)}
    expected = 3.0 * np.array([cosine[0, 1], 0.5 * cosine[0, 1], cosine[1, 2], 0.0])
    np.testing.assert_allclose(together[0], expected, rtol=1e-6)
    text = (known - together)[0] / 2.0
    assert text.argmax() == 1 and text[2] == 0 and 0 < text[3] < text[0] < 1.0001


def test_titles_without_a_word_resemble_nothing():
    assert make_prior(PriorSection(history=1.0), ["?", "! …", ""], [])([[0, 1]]).tolist() == [[0.0, 0.0, 0.0]]


def test_what_is_not_listed_is_level_with_the_last_that_is():
    fused = fused_scores(np.array([[2, 0]]), np.array([[-1.0, -3.0]]), np.array([[0.0, 0.5, 0.0, 4.0]]))
    assert fused.tolist() == [[-3.0, -2.5, -1.0, 1.0]]
    items = items_of(["a b", "c d", "e f", "g h"])
    columns = ranking_columns(
        items,
        lambda histories: np.array([[0.0, 0.5, 0.0, 4.0]]),
        [row([3], 2)],
        np.array([[2, 0]]),
        np.array([[-1.0, -3]]),
    )
    assert columns[FUSED_RANK] == [1.0]  # the only better one is in the history
    assert columns[FUSED_FIRST] == [[0, 1, 2]]


def test_items_of_the_history_are_ranked_where_nothing_is_excluded():
    items, prior = items_of(["a b", "c d", "e f", "g h"]), np.array([[0.0, 0.5, 0.0, 4.0]])
    asked = [row([3], 2)], np.array([[3, 2, 0]]), np.array([[-1.0, -2.0, -3.0]])
    without = ranking_columns(items, lambda histories: prior, *asked)
    assert (without[LISTED_RANK], without[FUSED_RANK]) == ([1], [1.0])
    everything = ranking_columns(items, lambda histories: prior, ranking_everything(asked[0]), *asked[1:])
    assert (everything[LISTED_RANK], everything[FUSED_RANK]) == ([2], [2.0])
    assert everything[LISTED_FIRST] == [[3, 2, 0]] and everything[FUSED_FIRST] == [[0, 1, 2, 3]]


def test_a_grid_of_priors_earns_what_each_of_them_earns_alone():
    rng = np.random.default_rng(0)
    titles = [f"{color} {thing}" for color in ("red", "blue", "green") for thing in ("soap", "brush", "mask", "oil")]
    users = [UserSequence(str(user), tuple(rng.permutation(12)[:7].tolist())) for user in range(30)]
    rows = [row(user.items[:-2], user.items[-2]) for user in users]
    histories, targets = [list(one.columns["history"]) for one in rows], np.array([user.items[-2] for user in users])
    listed = np.stack([rng.permutation(12)[:8] for _ in rows])
    scores = -np.sort(rng.exponential(3.0, (30, 8)).astype(np.float32), axis=1)
    nothing = np.zeros((30, 12), np.float32)

    def own(start, stop):
        return fused_scores(listed[start:stop], scores[start:stop], nothing[start:stop])

    points = grid()
    assert points[0] == PriorSection() and len(set(points)) == len(points) > 25
    # So many items that few rows are scored at once.
    found = weigh(own, make_parts(titles, users), rows, points, items=2**20)
    assert {one.prior for one in found} == set(points)
    assert all(one.ndcg >= other.ndcg for one, other in itertools.pairwise(found))
    assert len({one.ndcg for one in found}) > 10
    for one in found:
        fused = fused_scores(listed, scores, make_prior(one.prior, titles, users)(histories))
        rank = rank_of(count_better(fused, targets, histories))
        assert (one.ndcg, one.hit) == pytest.approx((ndcg(rank, k=10).mean(), hit(rank, k=10).mean()))


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


def test_words_of_items_begin_where_their_titles_lie(run):
    """Nearer to items that share words; and the run's policy began so."""
    titles = make_world(users=2, items=280, length=4).catalogue.titles
    vectors = item_vectors(titles, 32)
    table = np.stack([vectors[item_word(row)] for row in range(len(titles))])
    np.testing.assert_allclose(np.linalg.norm(table, axis=1), 1, rtol=1e-5)
    shared = np.array([[len({*one.split()} & {*other.split()}) for other in titles] for one in titles])
    pairs = np.triu_indices(len(titles), 1)
    assert np.corrcoef(shared[pairs], (table @ table.T)[pairs])[0, 1] > 0.7

    tokenizer = json.loads((run / "policy_start" / "tokenizer.json").read_text())
    width = yaml.safe_load((run / "config.yaml").read_text())["policy"]["new"]["width"]
    start = load_file(run / "policy_start" / "model.safetensors")["model.embed_tokens.weight"]
    for word, vector in item_vectors(titles, width).items():
        np.testing.assert_allclose(start[tokenizer["model"]["vocab"][word]], vector, atol=1e-6)


def test_the_table_tells_policy_prior_and_both_apart(run):
    summary = json.loads((run / "summary.json").read_text())
    listed = ["prior alone", *(f"policy, {when}{kind}" for when in ("before", "after") for kind in ("", " + prior"))]
    measured, text = {line["method"] for line in summary["table"]}, (run / "train.log").read_text()
    spread = {line["method"]: line for line in summary["recommended"]}
    for name in listed:
        assert name in text and name in measured
        assert 10 / 280 <= spread[name]["coverage@10"] <= 24 * 10 / 280 and 0 < spread[name]["Gini@10"] < 1
    differences = {line["method"]: line["NDCG@10"]["mean"] for line in summary["differences"]}
    ndcg10 = {line["method"]: line["NDCG@10"]["mean"] for line in summary["table"] if line["group"] == "all"}
    for one, other in (("after", "before"), ("after + prior", "before + prior")):
        name = f"policy, {one} − policy, {other}"
        assert differences[name] == pytest.approx(ndcg10[f"policy, {one}"] - ndcg10[f"policy, {other}"])
    added = ndcg10["policy, after + prior"] - ndcg10["prior alone"]
    assert differences["policy, after + prior − prior alone"] == pytest.approx(added)
    before = summary["evaluation"]["ndcg@10"]["before"]
    assert 0 <= before <= 1 and summary["evaluation"]["ndcg@10"]["oracle"] == 1


def test_runs_stand_beside_each_other_with_the_numbers_of_their_summaries(run, tmp_path, capsys):
    script = Path(__file__).parents[4] / "benchmarks" / "recommendation" / "seeds.py"
    command = [sys.executable, str(script), str(run), str(run), "--group", "target ≤ 3", "--json", "found.json"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    found, summary = json.loads((tmp_path / "found.json").read_text()), json.loads((run / "summary.json").read_text())
    assert [one["seed"] for one in found] == [0, 0] and len(found[0]["table"]) == len(summary["table"])
    for entry, group, sign in (("table", "target ≤ 3", ""), ("differences", "all", "+")):
        row = next(row for row in summary[entry] if "after" in row["method"] and row["group"] == group)
        cell = "{:{sign}.4f} [{:{sign}.4f}, {:{sign}.4f}]".format(*row["NDCG@10"].values(), sign=sign)
        cell = cell.replace("0.", ".")
        assert f"| {row['method']} | {cell} | {cell} |" in printed
    wrong = subprocess.run([*command[:2], str(tmp_path)], capture_output=True, text=True)
    assert wrong.returncode == 1 and "expected a run that ended" in wrong.stderr and "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--sampling.max_new_tokens=1"], "sampling.max_new_tokens: expected at least 2"),
        (["--task.listed=281"], "task.listed: expected at most 280"),
        (["--sampling.top_k=5"], "sampling.top_k: expected 0"),
        (
            ["--sampling.group=samples", "--rewards=[{name: rank_penalty}]"],
            "rewards.rank_penalty: expected",
        ),
        (["--data.allowed_tokens=ascii"], "data.allowed_tokens"),
        (["--sampling.stop=[x]"], "sampling.stop"),
        (["--task.pairs=lessons"], "pairs"),
        (["--task.template={history} {items}", "--task.writes=title"], "template"),
        (["--task.writes=query", "--task.template={history}"], "prior.together: expected 0: a query is made of words"),
        (["--task.prior.decay=2"], "prior.decay"),
        (["--task.item_start=random", "--task.writes=title", "--task.template={history}"], "item_start"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(words, wrong, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(RUN))
    assert main([f"--config={tmp_path / 'config.yaml'}", f"--run_dir={tmp_path / 'run'}", *words]) == 2
    assert wrong in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_trained_run_recommends_and_says_why(run, capsys, tmp_path):
    titles = make_world(users=120, items=280, length=12, fickle=0.1, noise=0.02, seed=0).catalogue.titles
    asked = load_recommender(run)
    found = asked([titles[3], "i7"], 5)
    assert len(found) == 5 and not {"i3", "i7"} & {item.item for item in found}
    assert all(one.score >= other.score for one, other in itertools.pairwise(found))
    for item in found:
        assert set(item.words) <= set(item.title.split()) & set(f"{titles[3]} {titles[7]}".split())
    assert recommend_main(["--run", str(run), "--history", f"{titles[3]} | i7", "--k", "5"]) == 0
    printed = capsys.readouterr().out
    assert all(item.title in printed for item in found)
    # The width is that of the run's longest prompt: a longer history compiles nothing. What repeats counts once.
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    assert len(asked(titles[20:31], 5)) == 5 and not [event for event in compiled if "backend_compile" in event]
    assert asked(["i7"] * 50 + [titles[3]] * 2 + ["i7"], 5) == found


def test_a_file_is_answered_line_by_line(run, capsys, tmp_path):
    """What cannot be answered says why under its number in the file, and the next is asked; too few items are said."""
    file = tmp_path / "histories.txt"
    title = make_world(users=2, items=280).catalogue.titles[1]
    wide = "".join(letter if letter == " " else chr(ord(letter) + 0xFEE0) for letter in title)
    file.write_text(f"i3|i7\n\nno such thing\n \ni7|{wide}\n")
    assert recommend_main(["--run", str(run), "--file", str(file), "--k", "400"]) == 0
    printed = capsys.readouterr()
    first, second, third = map(json.loads, printed.out.splitlines())
    assert [len(one["items"]) for one in (first, second, third)] == [278, 0, 278] and "note" not in second
    assert first["note"].startswith("278 of 400 items: the run's rankings list no more")
    assert second["error"].startswith(f"{file}:3: history: no item is called 'no such thing'")
    assert printed.err.startswith("note: 1 of 3 lines could not be answered: ") and printed.err.count("\n") == 1
    assert third["history"] == ["i7", wide]
    file.write_text("\nnothing\n")
    assert recommend_main(["--run", str(run), "--file", str(file)]) == 2
    assert f"none of 1 lines could be answered: {file}:2: history: no item" in capsys.readouterr().err


def test_a_prior_is_chosen_on_validation_users_by_the_policys_own_ranking(run, capsys):
    assert recommend_main(["--run", str(run), "--choose_prior", "--users", "40"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("40 validation users") and said[0].endswith("no test user was looked at")
    earned, (best, *others) = [float(line.split()[0]) for line in said[2:12]], said[2:12]
    assert earned == sorted(earned, reverse=True) and len(others) == 9
    chosen = yaml.safe_load("\n".join(line for line in said if line.startswith("  prior:")))["prior"]
    assert [float(word) for word in best.split()[2:5]] == list(chosen.values())
    alone = next(float(line.split()[0]) for line in said if line.endswith("the policy alone"))
    assert earned[0] > alone and any(line.endswith("the run's") for line in said)
    # The run measured its policy alone on its first 8 validation users, which are those of the default.
    assert recommend_main(["--run", str(run), "--choose_prior", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    alone = next(one for one in found if not one["history"] and not one["together"])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert alone["ndcg@10"] == pytest.approx(metrics[-1]["validation/ndcg@10"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--choose_prior", "--k", "5"], "--k: does not go with --choose_prior"),
        (["--choose_prior", "--users", "0"], "--users: expected a number >= 1"),
        (["--history", "i1", "--users", "5"], "--users: goes with --choose_prior alone"),
        (["--history", "no such thing at all"], "history: no item is called 'no such thing at all'"),
        (["--history", " | "], "history: expected at least one title"),
        (["--history", "i1", "--k", "0"], "--k: expected a number >= 1"),
        (["--history", "i1", "--catalogue", "other.tsv"], "catalogue: expected the run's"),
        (["--file", "absent.txt"], "--file: absent.txt: cannot be read"),
        (["--history", "i1", "--checkpoint", "99"], "99"),
    ],
)
def test_what_cannot_be_recommended_is_said(run, words, wrong, capsys):
    if "--catalogue" in words:
        assert evaluate_main(["--run", str(run), *words[2:]]) == 2
        assert wrong in capsys.readouterr().err
    assert recommend_main(["--run", str(run), *words]) == 2
    assert wrong in capsys.readouterr().err
