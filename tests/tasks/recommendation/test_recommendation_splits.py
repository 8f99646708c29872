"""What is held out stays out: items that training never sees, a cut in time, and baselines that know no more."""

import csv

import numpy as np
import pytest

from grpo_jax.config import make_config
from grpo_jax.errors import UserError
from grpo_jax.tasks.recommendation.catalogue import UserSequence
from grpo_jax.tasks.recommendation.dataset import items_split, load_dataset, time_split
from grpo_jax.tasks.recommendation.report import findings

ITEMS = 40


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A catalogue, and ratings of 60 users at random times, with the fields that name them."""
    folder, rng = tmp_path_factory.mktemp("splits"), np.random.default_rng(0)
    with (folder / "items.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "title"), *((f"i{n}", f"thing{n} kind{n % 6}") for n in range(ITEMS))])
    lines = [("userId", "movieId", "rating", "timestamp")]
    for user in range(60):
        begun, items = rng.integers(0, 80), rng.choice(ITEMS, rng.integers(4, 11), replace=False)
        lines += [(f"u{user}", f"i{item}", 4, begun + rng.integers(0, 20)) for item in items]
    with (folder / "ratings.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return {"source": str(folder / "ratings.csv"), "catalogue": str(folder / "items.csv")}


def loaded(files, **fields):
    task = make_config(task={"kind": "recommendation", **files, **fields}).task
    return task, load_dataset(task)


def rows_known(dataset):
    """(user, item) of all that reaches training: known sequences, and the rows that are learned and taught from."""
    learned = [row.columns for row in dataset.prompts.train]
    from_rows = {(row["user"], item) for row in learned for item in (*row["history"], row["target_row"])}
    known = {(user.user, item) for user in dataset.known for item in user.items}
    assert from_rows <= known
    return known


def unique(dataset):
    ids = [row.id for part in dataset.prompts for row in part]
    return len(set(ids)) == len(ids)


def test_items_that_are_held_out_are_in_nothing_that_training_knows(files):
    _, dataset = loaded(files, split="items", held_out_items=0.15)
    tested, chosen = ({row.columns["target_row"] for row in part} for part in dataset.prompts[:0:-1])
    assert tested and chosen and not tested & chosen
    held = tested | chosen
    whole = {user.user: user.items for user in dataset.users}
    known = rows_known(dataset)
    assert not {item for _, item in known} & held and unique(dataset)
    # Items that are nobody's last and held out all the same are those that nothing knows.
    gone = {item for items in whole.values() for item in items} - {item for _, item in known}
    assert known == {(user, item) for user, items in whole.items() for item in items if item not in gone}
    asked = {row.columns["user"]: row.columns for part in dataset.prompts[1:] for row in part}
    assert asked.keys() == {user for user, items in whole.items() if items[-1] in gone}
    for user, row in asked.items():
        assert row["history"] == tuple(item for item in whole[user] if item not in gone)
        assert row["target_row"] == whole[user][-1]


def test_which_items_are_held_out_depends_on_their_ids_alone(files):
    ids = [f"i{n}" for n in range(2000)]
    users = [UserSequence(f"u{n}", (n, (n + 1) % 2000, (n + 2) % 2000)) for n in range(2000)]
    split = items_split(users, ids, 0.1)
    tested = {ids[target.item] for target in split.test}
    assert 150 < len(tested) < 250 and 150 < len(split.validation) < 250
    backwards = items_split(
        [user._replace(items=tuple(1999 - i for i in user.items)) for user in users], ids[::-1], 0.1
    )
    assert {ids[::-1][target.item] for target in backwards.test} == tested
    with pytest.raises(UserError, match=r"task\.held_out_items: no user's last item is held out"):
        items_split(users[:3], ids, 1e-9)


def test_nothing_that_training_knows_is_later_than_what_is_asked(files):
    _, dataset = loaded(files, split="time", time_share=0.7)
    times = {(user.user, item): time for user in dataset.users for item, time in zip(*user[1:], strict=True)}
    latest = max(times[pair] for pair in rows_known(dataset))
    validation, test = (
        [times[row.columns["user"], row.columns["target_row"]] for row in part] for part in dataset.prompts[1:]
    )
    assert latest < min(validation) <= max(validation) < min(test) and unique(dataset)
    assert sum(len(user.items) for user in dataset.known) == sum(time <= latest for time in times.values())
    assert 0.6 < sum(len(user.items) for user in dataset.known) / len(times) <= 0.7
    whole = {user.user: user for user in dataset.users}
    for row in (*dataset.prompts.validation, *dataset.prompts.test):
        user, place = whole[row.columns["user"]], len(row.columns["history"])
        assert row.columns["history"] == user.items[:place] and user.items[place] == row.columns["target_row"]
    assert {row.columns["user"] for row in dataset.prompts.test} == {
        user.user for user in dataset.users if user.times[-1] >= min(test)
    }


def test_a_cut_in_time_by_hand():
    users = [
        UserSequence("old", (0, 1, 2), (1, 2, 3)),
        UserSequence("both", (3, 4, 5, 6), (2, 5, 6, 9)),
        UserSequence("new", (7, 8), (8, 9)),
        UserSequence("alone", (9,), (9,)),
    ]
    split = time_split(users, 0.5)  # of ten interactions at 1 2 2 3 5 | 6 8 | 9 9 9
    assert [user.items for user in split.known] == [(0, 1, 2), (3, 4), (), ()]
    assert [target[:3] for target in split.validation] == [("both", (3, 4), 5)]
    assert [target[:3] for target in split.test] == [("both", (3, 4, 5), 6), ("new", (7,), 8)]


@pytest.mark.parametrize("split", ["last", "items", "time"])
def test_every_split_is_measured_and_baselines_count_what_is_known(files, split):
    from bridges.retrieval import open_retriever

    task, dataset = loaded(files, split=split, held_out_items=0.15, time_share=0.7)
    retriever, _ = open_retriever(dataset.catalogue.titles)
    rows = dataset.prompts.test
    found = findings(task, dataset, retriever, rows, {})
    popular = next(row for row in found.records["table"] if row["method"] == "popularity")
    counts = np.zeros(ITEMS)
    for user in dataset.known:
        for item in user.items:
            counts[item] += 1
    hits = []
    for row in rows:
        target, history = row.columns["target_row"], row.columns["history"]
        hits.append(sum(counts[item] >= counts[target] for item in range(ITEMS) if item not in (*history, target)) < 10)
    assert popular["HR@10"]["mean"] == pytest.approx(np.mean(hits)) and popular["users"] == len(rows)
    if split == "items":
        assert {row["group"] for row in found.records["table"]} == {"all", "target ≤ 3"}
