"""A small, constant part of the fault campaign; `python benchmarks/campaign.py` runs all of it."""

import json
import os
import subprocess
import sys

import pytest
from support.imports import ROOT

pytest.importorskip("torch")
from faults.fuzz import config, folders, prompts


@pytest.mark.parametrize(
    ("campaign", "count"),
    [(config.campaign, 100), (prompts.campaign, 200), (folders.campaign, 20)],
    ids=["config", "prompts", "folders"],
)
def test_every_case_works_or_is_one_line(campaign, count, tmp_path):
    outcomes = list(campaign(tmp_path, 20, count))
    assert len(outcomes) == count
    broken = [f"{outcome.case}: {outcome.note}" for outcome in outcomes if not outcome.handled]
    assert not broken, "\n".join(broken[:10])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, which this system cannot")
@pytest.mark.wide  # half a minute each; a killed SFT goes on in the tests of recommendation
@pytest.mark.parametrize("kind", ["kills:2:text"])
def test_what_was_promised_holds(kind, tmp_path):
    out = tmp_path / "out.json"
    arguments = [sys.executable, ROOT / "benchmarks" / "campaign.py", "--seed", "1", "--kinds", kind, "--out", out]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    outcomes = json.loads(out.read_text())["outcomes"]
    assert len(outcomes) == int(kind.split(":")[1])
    assert any(outcome["equal"] for outcome in outcomes)  # there was something to lose
