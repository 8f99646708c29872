"""The page on one's own catalogue: its commands run as they stand, in a folder with files of the forms it shows."""

import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.tasks.recommendation.dataset import load_dataset
from grpo_jax.tasks.recommendation.dummy import make_world
from grpo_jax.train import main

PAGE = (Path(__file__).parents[3] / "docs" / "own_catalogue.md").read_text()
SHORT = [
    *("--policy.new.width=16", "--policy.new.layers=1", "--warm_start.steps=3", "--training.max_steps=1"),
    *("--training.save_every=0", "--training.prompts_per_batch=8", "--sampling.group_size=4", "--task.listed=20"),
    *("--evaluation.prompts=16", "--evaluation.every=0", "--report_to=[]"),
]


def commands():
    """The page's calls as words, without what installs."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("python -m ")]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """The dummy world as a user's files."""
    folder = tmp_path_factory.mktemp("shop")
    world = make_world(users=200, items=280, seed=0)
    catalogue = world.catalogue
    lines = [f"{name}\t{title}\n" for name, title in zip(catalogue.ids, catalogue.titles, strict=True)]
    (folder / "items.tsv").write_text("item_id\ttitle\n" + "".join(lines))
    histories = [[catalogue.ids[row] for row in user.items] for user in world.sequences.users]
    users = [user.user for user in world.sequences.users]
    texts = [f"{user} {' '.join(items)}\n" for user, items in zip(users, histories, strict=True)]
    (folder / "sequential.txt").write_text("".join(texts))
    (folder / "products.csv").write_text("sku,product_name\n" + "".join(lines).replace("\t", ","))
    bought = [f"{1 + day:02d}T09:00:00+02:00,{user},{item}\n" for user, items in zip(users, histories, strict=True)
              for day, item in enumerate([*items, items[0]])]  # fmt: skip
    table = "".join(f"2026-03-{line}" for line in [*reversed(bought), "01,once,i0\n"])
    (folder / "purchases.csv").write_text("bought_at,customer,sku\n" + table)
    (folder / "histories.txt").write_text("".join(" | ".join(items[:3]) + "\n" for items in histories[:2]))
    return folder


def test_the_commands_of_the_page_train_and_recommend(shop, monkeypatch, capsys):
    monkeypatch.chdir(shop)
    _, train, one, many = commands()
    assert all(line in (shop / "items.tsv").read_text() for line in re.findall(r"^i\d+\t.*$", PAGE, re.MULTILINE))
    assert import_module(train[0]).main([*train[1:], *SHORT]) == 0
    printed = capsys.readouterr().out
    for line in ("popularity", "item-kNN", "prior alone", "policy, before", "policy, after", "policy, after + prior"):
        assert line in printed and line.partition(", decay")[0] in PAGE
    assert import_module(one[0]).main(one[1:]) == 0
    titles = {line.split("\t")[1] for line in (shop / "items.tsv").read_text().splitlines()}
    answered = capsys.readouterr().out
    assert sum(title in answered for title in titles) >= 5
    assert import_module(many[0]).main(many[1:]) == 0
    assert [len(json.loads(line)["items"]) for line in capsys.readouterr().out.splitlines()] == [5, 5]


def test_purchases_under_names_of_their_own_are_the_same_histories(shop, monkeypatch, capsys):
    """Its fields are read as the command reads them; who repeats an item, and who took one, is said."""
    monkeypatch.chdir(shop)
    bought, sequences = [parse(words[1:]) for words in commands()[:2]]
    found = load_dataset(bought.task, columns=bought.data.columns)
    expected = load_dataset(sequences.task)
    assert {user.user: user.items for user in found.users} == {user.user: user.items for user in expected.users}
    assert found.catalogue.titles == expected.catalogue.titles
    assert found.notes[:2] == (
        "200 events repeat an item of the same user and are left out; the first counts",
        "1 users with fewer than 4 items are left out",
    )


def test_without_files_the_config_says_which_are_missing(tmp_path, capsys):
    assert main(["--config=recommendation_own", f"--run_dir={tmp_path / 'run'}"]) == 2
    assert "task.source: expected your sequences or ratings, and their catalogue" in capsys.readouterr().err
    assert main(["--config=recommendation_own", "--task.source=sequential.txt"]) == 2
    assert "task.catalogue: expected a file with the titles of the items" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
