"""A small part of the fault campaign, the same one every time: real runs in processes of their own.

All of it: `python benchmarks/campaign.py`.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from support.text_task import ROOT

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, which this system cannot"),
]

KINDS = {"kills": "kills:2:text", "terminal": "terminal:1", "concurrency": "concurrency:1",
         "corruption": "corruption:20", "disk": "disk:2:cartpole"}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    arguments = [sys.executable, "-m", "faults", str(folder), "1", *KINDS.values()]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(arguments, env=environment, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind": ')]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_promised_holds(outcomes, kind):
    own = [outcome for outcome in outcomes if outcome["kind"] == kind]
    broken = [f"{outcome['case']}: {outcome['note']}" for outcome in own if not outcome["handled"]]
    assert own and not broken, "\n".join(broken)
    different = [f"{outcome['case']}: {outcome['note']}" for outcome in own if outcome["equal"] is False]
    assert not different, "\n".join(different)


def test_there_was_something_to_lose(outcomes):
    """Most of the faults end runs that are then compared."""
    compared = Counter(outcome["kind"] for outcome in outcomes if outcome["equal"])
    least = {"kills": 2, "terminal": 1, "disk": 1, "corruption": 1, "concurrency": 1}
    assert all(compared[kind] >= number for kind, number in least.items()), compared
