"""The page's section on one's own catalogue: its commands, with files of the shown forms.

The run itself is wide: test_recommendation_run.py has one, and ranking/test_ranking_titles.py asks a recommender.
"""

import itertools
import json
import re
import shlex
from importlib import import_module

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.imports import ROOT
from support.shop_files import write_shop

from bridges.retrieval.encoders import catalogue_identity
from grpo_jax.config.command_line import find_config, load_config
from grpo_jax.errors import UserError
from grpo_jax.recommend import load_recommender
from grpo_jax.recommend import main as recommend_main
from grpo_jax.tasks.recommendation.dataset import make_world
from grpo_jax.tasks.recommendation.loading import item_vectors, make_recommender
from grpo_jax.tasks.recommendation.sections import PriorSection
from grpo_jax.train import main

PAGE = (ROOT / "docs" / "recommendation.md").read_text().partition("## Your own catalogue")[2].partition("\n## ")[0]
WORLD = make_world(users=200, items=280, seed=0)
TITLES = WORLD[0].titles
SHORT = [
    *("--policy.new.width=16", "--policy.new.layers=1", "--sft.steps=3", "--training.max_steps=1"),
    *("--training.save_every=0", "--training.prompts_per_batch=8", "--sampling.group_size=4"),
    *("--evaluation.prompts=16", "--evaluation.validation_prompts=8", "--evaluation.every=1", "--report_to=[]"),
]


def commands():
    """The page's calls as words, without what installs."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("python -m ")]


def call(words, *more):
    return import_module(words[0]).main([*words[1:], *more])


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """The dummy world as a user's files."""
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder, WORLD)
    histories = {user.user: [WORLD[0].ids[row] for row in user.items] for user in WORLD[1].users}
    (folder / "histories.txt").write_text("".join(" | ".join(items[:3]) + "\n" for items in [*histories.values()][:2]))
    return folder


@pytest.fixture(scope="module")
def run(shop):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shop)
        assert call(commands()[0], *SHORT) == 0
    return shop / "runs" / "shop"


@pytest.fixture(scope="module")
def summary(run):
    return json.loads((run / "summary.json").read_text())


@pytest.mark.wide
def test_the_commands_of_the_page_recommend(shop, run, monkeypatch, capsys):
    monkeypatch.chdir(shop)
    assert all(line in (shop / "items.tsv").read_text() for line in re.findall(r"^i\d+\t.*$", PAGE, re.MULTILINE))
    _, _, one, many = commands()
    assert call(one) == 0
    answered = capsys.readouterr().out
    assert sum(title in answered for title in TITLES) >= 5
    assert call(many) == 0
    assert [len(json.loads(line)["items"]) for line in capsys.readouterr().out.splitlines()] == [5, 5]


@pytest.mark.wide
def test_words_of_items_begin_where_their_titles_lie(run):
    tokenizer = json.loads((run / "policy_start" / "tokenizer.json").read_text())
    tensors = load_file(run / "policy_start" / "model.safetensors")
    start = tensors["model.embed_tokens.weight"]
    for word, vector in item_vectors(TITLES, 16).items():
        row, near = start[tokenizer["model"]["vocab"][word]], vector[:-1] / np.linalg.norm(vector[:-1])
        np.testing.assert_allclose(row, np.append(near, 1) / np.sqrt(2), atol=1e-6)  # the last is the same in all items
    # The first layer begins by passing on what it reads, but for that: a history by a mean of its items.
    value, out = (tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "vo")
    np.testing.assert_allclose(out @ value, np.diag([1.0] * 15 + [0.0]) / 4, atol=1e-6)


@pytest.mark.wide
def test_the_table_tells_policy_prior_and_both_apart(run, summary):
    listed = ["prior alone", *(f"policy, {when}{kind}" for when in ("before", "after") for kind in ("", " + prior"))]
    measured, text = {line["method"] for line in summary["table"]}, (run / "train.log").read_text()
    for name in listed:
        assert name in text and name in measured and name.replace("before + prior", "before") in PAGE
    differences = {line["method"]: line["NDCG@10"]["mean"] for line in summary["differences"]}
    ndcg10 = {line["method"]: line["NDCG@10"]["mean"] for line in summary["table"]}
    for one, other in (("after", "before"), ("after + prior", "before + prior")):
        name = f"policy, {one} − policy, {other}"
        assert differences[name] == pytest.approx(ndcg10[f"policy, {one}"] - ndcg10[f"policy, {other}"])
    added = ndcg10["policy, after + prior"] - ndcg10["prior alone"]
    assert differences["policy, after + prior − prior alone"] == pytest.approx(added)
    assert 0 <= summary["evaluation"]["ndcg@10"]["before"] <= 1 == summary["evaluation"]["ndcg@10"]["oracle"]


@pytest.mark.wide
def test_a_trained_run_recommends(shop, run, monkeypatch):
    monkeypatch.chdir(shop)
    asked = load_recommender(run)
    found = asked([TITLES[3], "i7"], 5)
    assert len(found) == 5 and not {"i3", "i7"} & {item.item for item in found}
    assert all(one.score >= other.score for one, other in itertools.pairwise(found))
    # The width is that of the run's longest prompt: a longer history compiles nothing. What repeats counts once.
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    assert len(asked(TITLES[20:27], 5)) == 5 and not [event for event in compiled if "backend_compile" in event]
    assert asked(["i7"] * 50 + [TITLES[3]] * 2 + ["i7"], 5) == found


@pytest.mark.wide
def test_a_file_is_answered_line_by_line(shop, run, monkeypatch, capsys):
    """What no item is called is skipped with a note, and a history without any gets the popular."""
    monkeypatch.chdir(shop)
    file = shop / "asked.txt"
    wide = "".join(letter if letter == " " else chr(ord(letter) + 0xFEE0) for letter in TITLES[1])
    file.write_text(f"i3|i7\n\nno such thing\n \ni7|{wide}\n")
    assert recommend_main(["--run", str(run), "--file", str(file), "--k", "400"]) == 0
    printed = capsys.readouterr()
    first, second, third = map(json.loads, printed.out.splitlines())
    assert [len(one["items"]) for one in (first, second, third)] == [278, 280, 278] and not printed.err
    assert "note" not in first
    assert second["note"].startswith("history: no item is called 'no such thing'")
    assert "these are the most popular" in second["note"]
    assert third["history"] == ["i7", wide]


@pytest.mark.wide
def test_what_is_excluded_is_never_recommended(shop, run, monkeypatch, capsys):
    monkeypatch.chdir(shop)
    first = [item.item for item in load_recommender(run)(["i3", "i7"], 5)]
    (shop / "sold_out.txt").write_text("\n".join(first))
    assert recommend_main(["--run", str(run), "--history", "i3 | i7", "--exclude", "sold_out.txt", "--json"]) == 0
    found = [item["item"] for item in json.loads(capsys.readouterr().out)["items"]]
    assert len(found) == 10 and not {*first} & {*found}


def test_items_words_are_places_so_another_catalogue_is_refused(shop, tmp_path):
    """A shop may write its items in another order; item_5 would name another one."""
    lines = (shop / "items.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "items.tsv").write_text("".join([lines[0], *lines[:0:-1]]))
    config = load_config(find_config("recommendation_own"))
    files = {"source": str(shop / "sequential.txt"), "catalogue": str(tmp_path / "items.tsv")}
    config = config.replace(task=config.task.replace(**files))
    with pytest.raises(UserError, match=r"task.catalogue: expected that of training \(280 titles, \w+\), got '280 tit"):
        make_recommender(config, None, None, {"catalogue": catalogue_identity(TITLES)})


def test_a_history_may_be_one_title_and_ids_may_be_numbers(tmp_path):
    """A text is no list of letters: "12" is one item, not two."""
    (tmp_path / "items.tsv").write_text("id\ttitle\n" + "".join(f"{n}\tsoap {n}\n" for n in range(20)))
    (tmp_path / "users.txt").write_text("".join(f"u{n} {n} {n + 1} {n + 2} {n + 3}\n" for n in range(15)))
    config = load_config(find_config("recommendation_dummy"))
    files = {"source": str(tmp_path / "users.txt"), "catalogue": str(tmp_path / "items.tsv")}
    config, prompts = config.replace(task=config.task.replace(**files, writes="query")), []
    recommend = make_recommender(config, None, lambda rows: lambda prompt: prompts.append(prompt) or "soap", {})
    assert recommend("12", exclude="13") == recommend(["12"], exclude=[13]) == recommend([12], exclude=["13"])
    assert prompts == ["soap 12"] * 3


def test_items_without_a_word_of_the_query_are_in_the_order_of_popularity():
    """All have the similarity 0 to it, and the catalogue's order is no ranking."""
    fields = {"writes": "query", "dummy_users": 50, "dummy_items": 280}
    config = load_config(find_config("recommendation_dummy"))
    config = config.replace(task=config.task.replace(**fields, prior=PriorSection()))
    answers, notes = iter([f"{TITLES[50]} xqzzv", "xqzzv", TITLES[3], TITLES[50]]), []
    recommend = make_recommender(config, None, lambda rows: lambda prompt: next(answers), {})
    assert recommend([TITLES[3]], 3, note=notes.append)[0].title == TITLES[50] and not notes
    found = recommend([TITLES[3]], 3, note=notes.append)
    assert found == [item for item in recommend([], 4, note=notes.append) if item.title != TITLES[3]][:3]
    assert found[0].score >= 3 and ["these are the most popular" in note for note in notes] == [True, True]
    # A query that finds only the history, and one that finds only one other item.
    alike = [item for item in TITLES if {*item.split()} & {*TITLES[3].split()}]
    assert (
        recommend([TITLES[3]], 3, exclude=alike, note=notes.append)
        == [item for item in recommend([], 280, note=notes.append) if item.title not in alike][:3]
    )
    others = [item for item in TITLES[:50] + TITLES[51:] if {*item.split()} & {*TITLES[50].split()}]
    one, *popular = recommend([TITLES[3]], 3, exclude=others, note=notes.append)
    expected = [
        item._replace(score=0.0)
        for item in recommend([], 280, note=notes.append)
        if item.title not in {TITLES[3], *others}
    ]
    assert one.title == TITLES[50] and popular == [item for item in expected if item.title != TITLES[50]][:2]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--task.source="], "task.source: expected your sequences or events, and their catalogue"),
        (["--task.source=sequential.txt"], "task.catalogue: expected a file with the titles of the items"),
        (["--sampling.max_new_tokens=1"], "sampling.max_new_tokens: expected at least 2"),
        (["--data.forbidden_tokens=[a]"], "data.forbidden_tokens"),
        (["--sampling.stop=[x]"], "sampling.stop"),
        (["--task.template={history} {items}", "--task.writes=title"], "template"),
        (["--task.writes=query", "--task.template={history}"], "prior.together: expected 0: a query is made of words"),
        (
            ["--task.writes=query", "--task.template={history}", "--task.prior.together=0", "--task.prior.following=1"],
            "prior.following: expected 0: a query is made of words",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(words, wrong, tmp_path, capsys):
    small = ["--task.source=dummy", "--task.dummy_users=120", "--task.dummy_items=280", *SHORT]
    assert main(["--config=recommendation_own", f"--run_dir={tmp_path / 'run'}", *small, *words]) == 2
    assert wrong in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
