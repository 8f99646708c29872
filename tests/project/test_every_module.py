"""Whatever is imported anywhere is there: modules that no other test loads, imports inside functions, scripts."""

import os
import subprocess
import sys

import pytest
from support import import_checks
from support.imports import ROOT


def test_every_import_leads_somewhere():
    """In a process of its own: it loads everything there is."""
    script = [sys.executable, str(ROOT / "tests" / "support" / "import_checks.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from grpo_jax.training.update import make_updates", "grpo_jax.training.update has no make_updates"),
        ("def later():\n    from bridges.miniature import train_painter", "bridges.miniature has no train_painter"),
        ("import grpo_jax.loop", "no module grpo_jax.loop"),
        ("from grpo_jax.core import losses\nlosses.no_loss()", "losses has no no_loss"),
        ("from support.text_task import nothing", "support.text_task has no nothing"),
        ("import beside\nbeside.other()", "beside has no other"),
        ("from grpo_jax.core import losses\nlosses.grpo_loss\nimport beside\nbeside.there", None),
    ],
)
def test_the_reader_sees_what_is_not_there(source, found, tmp_path):
    (tmp_path / "beside.py").write_text("there = 1\n")
    (tmp_path / "script.py").write_text(source)
    lines = list(import_checks.dangling(tmp_path / "script.py"))
    assert (found in lines[0] and len(lines) == 1) if found else not lines
