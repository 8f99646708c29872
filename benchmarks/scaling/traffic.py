"""Count what process 0 of a run tells the others.

    python benchmarks/scaling/traffic.py 2 4 8
    python benchmarks/scaling/traffic.py --broadcast 2 8 64

The first runs three iterations of a tiny text task over so many processes of this machine, a device each, and prints
the calls and bytes of `models.broadcast` in each iteration. They must not grow with the number of processes.

The second makes those calls alone, without a policy, and prints the bytes that the first process and the one of the
others that sends most have sent on all their TCP connections (gloo, barriers, the coordinator) for each iteration.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

BROADCAST = """
import json, os, socket, struct
import numpy as np
from grpo_jax.models.broadcast import broadcast
from grpo_jax.runs.processes import join_processes

TCP_INFO, BYTES_SENT = 11, 200  # of Linux: the option, and the place of a counter in what it gives

def sent():
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_SENT)[0]
        except OSError:  # no socket, or of another kind
            pass
    return total

join_processes()
rewards = [np.ones((8, 4, 1, 2), np.float32), np.ones((8, 4, 1, 0), np.float32), np.ones((8, 4), bool)]
marks = []
for _ in range(6):
    for told in (False, None, rewards, False):
        broadcast(told)
    marks.append(sent())
print("COUNTED", json.dumps([after - before for before, after in zip(marks[1:], marks[2:])]), flush=True)
broadcast(None)  # all have counted
os._exit(0)
"""


def counted(processes: int, program: str, arguments: Sequence[str] = ()) -> list[list[Any]]:
    """Run a program in so many processes; return what each has counted."""
    from support import xla
    from support.processes import announcement, ended

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    environment = os.environ | announcement(processes)[0] | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": xla.devices(1)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", program, *arguments]
    done = ended(
        [
            subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(number)}, cwd=ROOT, **pipes)
            for number in range(processes)
        ]
    )
    lines = [line for one in done for line in one.stdout.splitlines() if line.startswith("COUNTED")]
    if not lines:
        raise SystemExit(f"the run ended with {done[0].returncode}: {done[0].stderr[-2000:]}")
    return [json.loads(line.removeprefix("COUNTED")) for line in lines]


def traffic(processes: int, folder: Path) -> list[tuple[int, int]]:
    """Return the calls and bytes of each iteration after the first, whose start is counted with it."""
    from support.recorded_runs import text_config

    arguments = ["--config", str(text_config(folder)), "--report_to", "[]", "--training.max_steps", "3"]
    arguments += ["--training.prompts_per_batch", "8", "--training.minibatches", "1", "--evaluation.every", "0"]
    arguments += ["--policy.mesh.fsdp", str(processes), "--run_dir", str(folder / "run")]
    (marks,) = counted(processes, COUNTED, arguments)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks)]


def main() -> None:
    """The command."""
    words = sys.argv[1:]
    if words[:1] == ["--broadcast"]:
        for count in map(int, words[1:] or ["2", "8", "64"]):
            first, *others = counted(count, BROADCAST)
            most = max(others, key=max)
            print(f"{count} processes: bytes by iteration {first} sent by the first, {most} by another", flush=True)
        return
    for count in map(int, words or ["2", "4", "8"]):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{count} processes: calls and bytes by iteration {traffic(count, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
