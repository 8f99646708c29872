"""Measures against ranx, run as plain Python: compiling its loops takes half a minute."""

import os
import warnings
from unittest import mock

import numpy as np
import pytest

from grpo_jax.tasks.recommendation import metrics

with warnings.catch_warnings(), mock.patch.dict(os.environ, NUMBA_DISABLE_JIT="1"):  # numba reads it once, here
    warnings.simplefilter("ignore")
    ranx = pytest.importorskip("ranx")

MEASURES = {
    "ndcg": metrics.ndcg,
    "ndcg@5": lambda rank: metrics.ndcg(rank, k=5),
    "ndcg@10": lambda rank: metrics.ndcg(rank, k=10),
    "hit_rate@5": lambda rank: metrics.hit(rank, k=5),
    "hit_rate@10": lambda rank: metrics.hit(rank, k=10),
    "mrr": metrics.mrr,
    "mrr@10": lambda rank: metrics.mrr(rank, k=10),
}


@pytest.mark.filterwarnings("ignore")
def test_measures_agree_with_ranx():
    rng = np.random.default_rng(0)
    scores = rng.permuted(np.tile(np.arange(40.0), (25, 1)), axis=1)  # no two alike: ranx knows no rule for ties
    targets = rng.integers(0, 40, 25)
    ranks = metrics.rank_of(metrics.count_better(scores, targets, [[]] * 25))
    qrels = ranx.Qrels({f"u{u}": {f"i{target}": 1} for u, target in enumerate(targets)})
    run = ranx.Run({f"u{u}": {f"i{i}": score for i, score in enumerate(row)} for u, row in enumerate(scores)})
    ranx.evaluate(qrels, run, list(MEASURES))
    for name, measure in MEASURES.items():
        theirs = [run.scores[name][f"u{u}"] for u in range(25)]
        np.testing.assert_allclose(measure(ranks), theirs, rtol=0, atol=1e-12, err_msg=name)
