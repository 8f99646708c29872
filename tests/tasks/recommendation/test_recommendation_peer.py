"""The peer of the policies in PyTorch: what its parts compute, and a run of the script on a small world."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from grpo_jax.rollout.data import Row

pytestmark = pytest.mark.wide  # a script of the benchmarks


def load_peer():
    path = Path(__file__).parents[3] / "benchmarks" / "recommendation" / "sasrec.py"
    spec = importlib.util.spec_from_file_location("sasrec", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer = load_peer()


def small_model():
    torch.manual_seed(0)
    return peer.SASRec(20, width=8, layers=2, heads=2, length=6, dropout=0.5, temperature=0.1).eval()


def test_drawing_every_item_is_the_softmax_over_all():
    torch.manual_seed(0)
    states, targets, table = torch.randn(7, 4), torch.randint(0, 10, (7,)), torch.randn(10, 4)
    exact = torch.nn.functional.cross_entropy(states @ table.T, targets)
    # The target counts once, however often it is drawn; of two draws of an item each stands for half of it.
    for draws in (1, 2):
        drawn = torch.arange(10).repeat(draws)
        torch.testing.assert_close(peer.sampled_softmax(states, targets, drawn, table), exact)


def test_a_history_is_scored_alone_as_among_others_and_by_its_newest_items():
    model, rng = small_model(), np.random.default_rng(0)
    rows = [Row(0, "", {"history": tuple(rng.integers(0, 20, length).tolist())}) for length in (3, 1, 9, 6, 2)]
    together = peer.scorer(model, rows, 6)(0, 5)
    with torch.inference_mode():
        for row, scores in zip(rows, together, strict=True):
            state = model(torch.tensor([row.columns["history"][-6:]]))[0, -1]
            assert state.norm() == pytest.approx(10.0)
            cosines = torch.cosine_similarity(model.items.weight, state[None])
            expected = torch.log_softmax(cosines / 0.1, 0).numpy()
            np.testing.assert_allclose(scores, expected, atol=1e-5)
    items = torch.randint(0, 20, (1, 6))
    changed = items.clone()
    changed[0, 4:] = (changed[0, 4:] + 1) % 20
    before, after = model(items)[0], model(changed)[0]
    torch.testing.assert_close(before[:4], after[:4])  # nothing of what comes later
    assert not torch.allclose(before[4], after[4])


def test_it_learns_a_small_world_and_its_ranks_are_the_projects(tmp_path, capsys):
    task = {"kind": "recommendation", "source": "dummy", "dummy_users": 300, "dummy_items": 280}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"task": task}))
    words = [f"--config={tmp_path / 'config.yaml'}", "--epochs=14", "--batch=32", "--width=32", "--rate=1e-2"]
    words += ["--limit=250", "--validation=100", "--dropout=0.1"]
    peer.main([*words, f"--json={tmp_path / 'report.json'}", f"--ranks={tmp_path / 'ranks.npy'}"])
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    lines = {line["method"]: line for line in report["table"]}
    assert list(lines) == ["SASRec", "SASRec + prior"]
    assert all(line["users"] == 250 and line["method"] in printed.err for line in lines.values())
    ranks = np.load(tmp_path / "ranks.npy")
    assert ranks.shape == (2, 250) and ranks.min() >= 1 and ranks.max() <= 280
    for rank, line in zip(ranks, lines.values(), strict=True):
        assert line["HR@10"]["mean"] == pytest.approx((rank <= 10).mean())
    assert lines["SASRec"]["HR@10"]["mean"] > 0.2  # by chance .036
