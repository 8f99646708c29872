"""A policy that ranks the catalogue: items as texts, ranks, and the prior."""

import json

import numpy as np
from support.rollouts import rollout_of

from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation import baselines
from grpo_jax.tasks.recommendation.baselines import item_scores, make_prior
from grpo_jax.tasks.recommendation.catalogue import UserSequence, item_word, items_of
from grpo_jax.tasks.recommendation.report import policy_ranks
from grpo_jax.tasks.recommendation.rewards import FUSED_RANK, LISTED_RANK, completion_ranks, ranking_columns
from grpo_jax.tasks.recommendation.sections import PriorSection

TITLES = ["Red soap", "Blue soap", "", "Green brush", "red Soap!"]


def row(history, target):
    return Row(1, "", {"history": tuple(history), "target_row": target})


def test_titles_that_say_the_same_are_one_text_and_blank_ones_none():
    items = items_of(TITLES)
    assert items.texts == ["Red soap", "Blue soap", "Green brush"] and items.rows.tolist() == [0, 1, 3]
    assert [items.row_of(text) for text in ("RED  soap", "green brush", "soap", "")] == [0, 3, -1, -1]
    assert items_of([item_word(place) for place in range(5)]).row_of("item_4") == 4


def test_a_ranking_leaves_the_history_out_and_puts_what_is_not_ranked_last():
    items = items_of(["a", "b", "c", "d", "a", "e"])  # the second "a" is no text of its own
    rows = [row([0, 1], 2), row([0], 4), row([3], 3)]
    numbers = np.array([[0, 1, 3, 2, 4], [0, 1, 2, 3, 4], [0, 3, 1, 2, 4]])
    columns = ranking_columns(items, None, rows, numbers, np.tile(-np.arange(5.0), (3, 1)))
    assert columns == {LISTED_RANK: [2, 5, 2]}  # a target in the history stays
    rollout = rollout_of(np.zeros((3, 1, 1, 1)), np.array([2.0, 5.0, 2.0]).reshape(3, 1, 1, 1), columns=columns)
    found = policy_ranks("before", {"greedy": rollout, "oracle": rollout})
    assert found == {"before": [2, 5, 2]}
    assert json.loads(json.dumps(found)) == found  # goes into checkpoints
    assert completion_ranks(items, ["", "", ""], columns).tolist() == [2, 5, 2]
    assert completion_ranks(items, ["c", "b"], {"target_row": [2, 5]}).tolist() == [1, 6]


def test_items_of_equal_scores_rank_before_the_target():
    """Items of equal titles that nobody took keep equal vectors; the catalogue's order must not decide."""
    numbers, scores = np.array([[0, 1, 2, 3]]), np.array([[-1.0, -2.0, -2.0, -2.0]])
    items, rows = items_of(list("abcd")), [row([0], 1)]
    columns = ranking_columns(items, lambda histories: np.zeros((1, 4)), rows, numbers, scores)
    assert columns == {LISTED_RANK: [3], FUSED_RANK: [3]}


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
    # 0 was followed by 1 both times, 1 by 2 the one time it was followed.
    following = make_prior(PriorSection(following=2.0, decay=0.5), titles, users)([[0, 1]])
    assert following.tolist() == [[0.0, 1.0, 2.0, 0.0]]


def test_the_prior_is_added_to_the_score_of_every_item():
    items = items_of(["a b", "c d", "a b", "g h"])  # the third is level with the last
    prior = np.array([[0.0, 0.5, 0.0, 4.0]])
    numbers, scores = np.array([[1, 0, 2]]), np.array([[-1.0, -2.0, -3.0]])
    assert item_scores(items.rows[numbers], scores, 4).tolist() == [[-2.0, -1.0, -3.0, -3.0]]
    columns = ranking_columns(items, lambda histories: prior, [row([3], 0)], numbers, scores)
    assert columns == {LISTED_RANK: [2], FUSED_RANK: [2.0]}  # 3 has the most, and is in the history


def test_items_below_the_last_place_that_counts_are_level(monkeypatch):
    monkeypatch.setattr(baselines, "LISTED", 2)
    scores = np.array([[-3.0, -1.0, -9.0, -2.0]], np.float32)
    assert baselines.floor_scores(scores).tolist() == [[-2.0, -1.0, -2.0, -2.0]]
    columns = ranking_columns(
        items_of(list("abcd")), lambda histories: np.array([[0, 0, 1.5, 0]]), [row([3], 2)], np.array([[1, 3, 0, 2]]),
        np.array([[-1.0, -2.0, -3.0, -9.0]], np.float32),
    )  # fmt: skip
    assert columns == {LISTED_RANK: [3], FUSED_RANK: [1.0]}  # 3 is in the history
