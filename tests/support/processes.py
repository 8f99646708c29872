"""The training command as several processes of this machine, joined through the environment."""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support import xla
from support.text_task import Place, environment, finish, wait_for

END = 600  # seconds; only a hang takes that long


def announcement(count: int) -> dict[str, str]:
    """Return the environment by which `count` processes find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}


def start(
    place: Place,
    run: Path,
    *arguments: str,
    judge: str = "work:0",
    last: tuple[str, ...] = (),
    folders: Sequence[Path] = (),
) -> list[subprocess.Popen]:
    """Two processes on a device each; the second perhaps with arguments of its own, both in folders of their own."""
    config = [] if "--resume" in arguments else ["--config", str(place.config)]
    mesh = "--policy.mesh.fsdp=2"
    command = [sys.executable, "-m", "grpo_jax.train", *config, "--run_dir", str(run), mesh, *arguments]
    told = announcement(2) | {"XLA_FLAGS": xla.devices(1)}
    return [
        subprocess.Popen(
            [*command, *last] if number else command,
            env=environment(run, judge) | told | {"JAX_PROCESS_ID": str(number)},
            cwd=folders[number] if folders else place.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]


def held(processes: list[subprocess.Popen], run: Path) -> None:
    """Waits until the judge holds the run."""
    wait_for((run / "held").exists, processes[0])


def ended(processes: list[subprocess.Popen]) -> list[subprocess.CompletedProcess]:
    """Return the output of each, once all have ended by themselves."""
    deadline = time.monotonic() + END
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    still = [number for number, process in enumerate(processes) if process.poll() is None]
    for process in processes:
        process.kill()
    assert not still, (still, [finish(process) for process in processes])
    return [finish(process) for process in processes]


def lines(text: str) -> list[str]:
    """What grpo_jax and Python wrote; the libraries beneath log in forms of their own."""
    return [line for line in text.splitlines() if line.startswith(("error", "Traceback"))]
