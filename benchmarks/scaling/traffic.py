"""Count what process 0 of a run tells the others: calls and bytes of `models.broadcast` in each iteration.

    python benchmarks/scaling/traffic.py 2 4

Runs three iterations of a tiny text task over so many processes of this machine, a device each, and prints what each
iteration took. It must not grow with the number of processes, but for the rewards of their prompts.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
COUNTED = """
import json, os, sys
from jax.experimental import multihost_utils
sent, real = [], multihost_utils.broadcast_one_to_all
def counted(array):
    sent.append(array.nbytes)
    return real(array)
multihost_utils.broadcast_one_to_all = counted
from grpo_jax.train import run
from grpo_jax.config.command_line import parse
marks = []
run(parse(sys.argv[1:]), on_iteration=lambda *_: marks.append((len(sent), sum(sent))))
if os.environ.get("JAX_PROCESS_ID") == "0":
    print("COUNTED", json.dumps(marks))
from grpo_jax.runs.several import part
part()
"""


def traffic(processes: int, folder: Path) -> list[tuple[int, int]]:
    """Return the calls and bytes of each iteration after the first, whose start is counted with it."""
    from support import xla
    from support.processes import announcement, ended
    from support.recorded_runs import text_config

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    arguments = ["--config", str(text_config(folder)), "--report_to", "[]", "--training.max_steps", "3"]
    arguments += ["--training.prompts_per_batch", "8", "--training.minibatches", "1", "--evaluation.every", "0"]
    arguments += ["--policy.mesh.fsdp", str(processes), "--run_dir", str(folder / "run")]
    environment = os.environ | announcement(processes)[0] | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": xla.devices(1)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", COUNTED, *arguments]
    done = ended(
        [
            subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(number)}, cwd=ROOT, **pipes)
            for number in range(processes)
        ]
    )
    lines = [line for line in done[0].stdout.splitlines() if line.startswith("COUNTED")]
    if not lines:
        raise SystemExit(f"the run ended with {done[0].returncode}: {done[0].stderr[-2000:]}")
    (line,) = lines
    marks = json.loads(line.removeprefix("COUNTED"))
    return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks)]


def main() -> None:
    """The command."""
    for count in map(int, sys.argv[1:] or ["2", "4"]):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{count} processes: calls and bytes by iteration {traffic(count, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
