"""Which prompts a batch has: in the order of a column, or by how far their rewards spread."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.text_task import assert_same_run, rewound, rows, train_here

from grpo_jax.errors import UserError
from grpo_jax.rollout.data import (
    Row,
    batch_at,
    column_levels,
    curriculum_order,
    further_batch_at,
    informative_batch_at,
)
from grpo_jax.training.state import Spreads

SIZE, ROWS = 4, 14


def spreads_of(std, seen=0):
    return Spreads(np.asarray(std, np.float32), np.broadcast_to(np.int32(seen), (len(std),)))


def drawn(spreads, iteration=0, number=0, half_life=1e9, seed=0):
    return informative_batch_at(seed, iteration, number, batch_size=SIZE, spreads=spreads, half_life=half_life)


def test_a_curriculum_goes_from_low_to_high_in_every_epoch_and_equals_change_places():
    levels = np.array([3, 1, 2, 2, 2, 2, 9, 8, 7, 6, 5, 4.5, 4, 3.5])
    order_of = curriculum_order(levels)
    epochs = [[batch_at(0, 3 * epoch + batch, batch_size=SIZE, n=ROWS, order=order_of) for batch in range(3)]
              for epoch in range(4)]  # fmt: skip
    orders = {tuple(np.concatenate(batches).tolist()) for batches in epochs}
    assert len(orders) > 1
    for order in orders:
        assert levels[list(order)].tolist() == sorted(levels)[: 3 * SIZE] and len(set(order)) == 3 * SIZE
    np.testing.assert_array_equal(further_batch_at(0, 1, 0, batch_size=SIZE, n=ROWS, order=order_of), epochs[0][1])


def test_levels_are_numbers_of_every_row():
    table = [Row(1, "a", {"hard": "2.5"}), Row(2, "b", {"hard": 1})]
    assert column_levels(table, "") is None
    np.testing.assert_array_equal(column_levels(table, "hard"), [2.5, 1])
    for wrong in ({}, {"hard": "x"}, {"hard": None}, {"hard": float("nan")}):
        with pytest.raises(UserError, match=r"data\.curriculum: expected a number in the column 'hard'.* in row 3"):
            column_levels([*table, Row(3, "c", wrong)], "hard")


def test_prompts_are_drawn_in_proportion_to_their_spread():
    """Of one row alone the shares are the spreads'; a batch has no row twice."""
    std = np.array([0.1, 0.2, 0.3, 0.4])
    first = [
        informative_batch_at(seed, 5, 0, batch_size=1, spreads=spreads_of(std, 5), half_life=3)[0]
        for seed in range(4000)
    ]
    np.testing.assert_allclose(np.bincount(first) / 4000, std, atol=0.025)
    spreads = spreads_of(np.linspace(0, 1, ROWS))
    draws = [drawn(spreads, 3, number) for number in range(4)]
    assert sorted(np.concatenate(draws)[:ROWS]) == list(range(ROWS)) and all(len({*draw}) == SIZE for draw in draws)
    np.testing.assert_array_equal(drawn(spreads, 3, 1), draws[1])
    assert not np.array_equal(drawn(spreads, 4), draws[0]) and not np.array_equal(drawn(spreads, 3, seed=1), draws[0])


def test_what_was_seen_is_forgotten_by_half_lives_and_unseen_prompts_have_the_mean():
    std, seen = np.array([0.0, 0.8, 123.0], np.float32), np.array([0, 0, -1], np.int32)

    def shares(iteration):
        spreads = Spreads(std, seen)
        first = [
            informative_batch_at(seed, iteration, 0, batch_size=1, spreads=spreads, half_life=2)[0]
            for seed in range(4000)
        ]
        return np.bincount(first, minlength=3) / 4000

    # weights mean + (std - mean) / 2^(t / 2), with the mean .4 of those seen
    for iteration, weights in ((0, [0, 0.8, 0.4]), (2, [0.2, 0.6, 0.4]), (4, [0.3, 0.5, 0.4])):
        np.testing.assert_allclose(shares(iteration), np.array(weights) / sum(weights), atol=0.025)


@pytest.mark.parametrize("spreads", [spreads_of(np.zeros(ROWS)), spreads_of(np.zeros(ROWS), -1)])
def test_where_nothing_is_known_or_nothing_spreads_all_prompts_are_alike(spreads):
    counts = np.bincount(np.concatenate([drawn(spreads, 1, seed=seed) for seed in range(2000)]), minlength=ROWS)
    np.testing.assert_allclose(counts / 2000, SIZE / ROWS, atol=0.05)


def some_judge(place, tmp_path):
    """A judge for whose reward half of the prompts have groups that do not spread."""
    some = "    return [v if w in 'acegikmo' else 1.0 for v, w in zip(letters(prompts, completions, wish), wish)]\n"
    judge = tmp_path / "judge.py"
    judge.write_text(f"{place.judge.read_text()}\ndef some(prompts, completions, wish, **columns):\n{some}")
    return f"--rewards={judge}:some"


@pytest.mark.parametrize("dead_groups", ["keep", "resample"])
def test_a_run_draws_what_teaches_and_goes_on_exactly(place, tmp_path, dead_groups):
    words = [some_judge(place, tmp_path), "--data.held_out=0", "--data.informative_half_life=1000", "--seed=1"]
    words += ["--training.max_steps=12", "--training.inner_epochs=1", "--training.minibatches=1"]
    words += ["--evaluation.every=0", "--training.save_every=6", f"--algorithm.dead_groups={dead_groups}"]
    whole = tmp_path / "whole"
    assert train_here(place.config, whole, *words) == 0
    table = rows(whole)
    assert table[0]["prompts_seen"] == (SIZE * table[0].get("draws", 1)) / 16
    seen = [row["prompts_seen"] for row in table]
    assert seen == sorted(seen) and seen[-1] > 0.8
    dead = [row["dead_groups/total"] for row in table]
    if dead_groups == "keep":
        assert np.mean(dead[6:]) < 0.3  # .5 of the prompts
    again = rewound(whole, tmp_path / "again", 6)
    assert train_here(place.config, again, "--resume") == 0
    assert_same_run(again, whole)


def test_a_run_with_a_curriculum_and_what_is_refused(place, tmp_path, capsys):
    lines = [json.loads(line) for line in (place.folder / "prompts.jsonl").read_text().splitlines()]
    file = tmp_path / "graded.jsonl"
    file.write_text("".join(json.dumps({**line, "hard": -number}) + "\n" for number, line in enumerate(lines)))
    words = [f"--data.prompts={file}", "--data.held_out=0", "--data.curriculum=hard", "--evaluation.every=0"]
    words += ["--training.max_steps=2", "--training.inner_epochs=1", "--training.minibatches=1"]
    run = tmp_path / "run"
    assert train_here(place.config, run, *words) == 0
    drawn = [pq.read_table(run / "completions" / f"step_{step:06d}.parquet")["prompt"].to_pylist() for step in (1, 2)]
    assert [sorted({text[0] for text in prompts}) for prompts in drawn] == [list("mnop"), list("ijkl")]
    for wrong, said in (
        (["--data.curriculum=wish"], "data.curriculum: expected a number in the column 'wish' of every row, got 'a'"),
        (["--data.informative_half_life=5"], "data.informative_half_life: expected 0 with data.curriculum"),
        (
            ["--data.curriculum=", "--data.informative_half_life=5", "--training.lag=1"],
            "expected 0 with training.lag 1",
        ),
    ):
        assert train_here(place.config, tmp_path / "not", *words, *wrong) == 2
        assert said in capsys.readouterr().err
