"""The notebook of examples: its imports and links hold, and its cells run in order."""

import json
import os
import re
import subprocess
import sys

import pytest
from support import import_checks
from support.imports import ROOT

CELLS = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
TEXT = {
    kind: "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == kind)
    for kind in ("code", "markdown")
}
LINK = r"https://[\w.]+/(?:github/)?grpo-jax/grpo_jax/blob/main/([\w./]+)"


def test_its_imports_and_links_hold(tmp_path):
    script = tmp_path / "cells.py"
    script.write_text(TEXT["code"])
    assert not list(import_checks.dangling(script))
    links = re.findall(LINK, TEXT["markdown"] + (ROOT / "docs" / "one_gpu.md").read_text())
    assert "examples/quickstart.ipynb" in links and all((ROOT / link).is_file() for link in links)


@pytest.mark.slow
@pytest.mark.wide
def test_its_cells_run_in_order(tmp_path):
    pytest.importorskip("matplotlib", reason="the notebook plots with it")
    short = TEXT["code"].replace("STEPS = 60", "STEPS = 2")
    assert short != TEXT["code"]
    variables = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", short], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny fuzzy crimson donut" in done.stdout
    for name, steps in (("miniature", 2), ("words", 1)):
        rows = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        assert len(rows) == steps and (tmp_path / "runs" / name / "report.html").is_file()
