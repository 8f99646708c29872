"""A small part of the fault campaign, the same one every time: real runs in processes of their own.

All of it: `python benchmarks/campaign.py`.
"""

import json
import os
import subprocess
import sys

import pytest
from support.text_task import ROOT

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, which this system cannot"),
]


@pytest.mark.wide  # half a minute each; a killed warm start goes on in the tests of recommendation
@pytest.mark.parametrize("kind", ["kills:1:cartpole", "kills:2:text", "disk:2:cartpole"])
def test_what_was_promised_holds(kind, tmp_path):
    arguments = [sys.executable, "-m", "faults", str(tmp_path), "1", kind]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(arguments, env=environment, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind": ')]
    wrong = [outcome for outcome in outcomes if not outcome["handled"] or outcome["equal"] is False]
    assert len(outcomes) == int(kind.split(":")[1]) and not wrong, wrong
    assert any(outcome["equal"] for outcome in outcomes)  # there was something to lose
