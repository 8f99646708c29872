"""The policies' peer in PyTorch: a run of the script on a small world."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

pytestmark = pytest.mark.wide  # a script of the benchmarks


def load_peer():
    path = Path(__file__).parents[3] / "benchmarks" / "recommendation" / "sasrec.py"
    spec = importlib.util.spec_from_file_location("sasrec", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer = load_peer()


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
