"""A policy that ranks the catalogue itself: what is written, what is listed, and the prior beside it."""

import itertools
import json

import numpy as np
import pytest

from grpo_jax.rollout.data import Row
from grpo_jax.rollout.rollout import Judgement
from grpo_jax.tasks.recommendation.baselines import fused_scores, make_parts, make_prior
from grpo_jax.tasks.recommendation.catalogue import UserSequence, item_word, items_of
from grpo_jax.tasks.recommendation.dataset import ranking_everything
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

TITLES = ["Red soap", "Blue soap", "", "Green brush", "red Soap!"]


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
    # 0 was followed by 1 both times, 1 by 2 the one time it was followed.
    following = make_prior(PriorSection(following=2.0, decay=0.5), titles, users)([[0, 1]])
    assert following.tolist() == [[0.0, 1.0, 2.0, 0.0]]


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
    points += [PriorSection(history=2.0, following=3.0, decay=0.5)]
    # So many items that few rows are scored at once.
    found = weigh(own, make_parts(titles, users), rows, points, items=2**20)
    assert {one.prior for one in found} == set(points)
    assert all(one.ndcg >= other.ndcg for one, other in itertools.pairwise(found))
    assert len({one.ndcg for one in found}) > 10
    for one in found:
        fused = fused_scores(listed, scores, make_prior(one.prior, titles, users)(histories))
        rank = rank_of(count_better(fused, targets, histories))
        assert (one.ndcg, one.hit) == pytest.approx((ndcg(rank, k=10).mean(), hit(rank, k=10).mean()))
