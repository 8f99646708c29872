"""Several processes that run one program: how they join, compare themselves, and end together.

Where one dies or freezes, JAX ends the others within `HEARTBEAT_SECONDS`. `join_processes` is also for a program of
one's own around `grpo_jax.training.update` and `grpo_jax.models.sharding` (docs/scaling.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from grpo_jax.config.fields import require
from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, UserError, complain, one_line, short_repr
from grpo_jax.models.broadcast import exchange, from_main_process, is_told, process_count, process_index, together
from grpo_jax.runs.directory import LOCK

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
HEARTBEAT_SECONDS = 20
_LEAVING_SECONDS = 10
_SHARED_SECONDS = 10.0  # how long a network file system may hide a new file
_PACKAGES = ("grpo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")
_BLOCK = 2**20


def announced(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return how many processes were started together and which this is, by JAX's variables or SLURM's step."""
    given = [environment[name] for name in VARIABLES if name in environment]
    count, number = environment.get("SLURM_STEP_NUM_TASKS", "1"), environment.get("SLURM_PROCID", "0")
    if count == "1":
        number = "0"  # of an allocation's batch script
    if given:
        if len(given) < len(VARIABLES) or not re.fullmatch(r".+:[0-9]{1,5}", given[0]):
            raise UserError(f"{', '.join(VARIABLES)}: expected all three, the first as HOST:PORT, got {given}")
        count, number = given[1:]
    if not (re.fullmatch("[0-9]{1,9}", count) and re.fullmatch("[0-9]{1,9}", number) and int(number) < int(count)):
        names = " and ".join(VARIABLES[1:])
        raise UserError(f"{names}: expected two numbers, the second below the first, got {count} and {number}")
    return int(count), int(number)


def join_processes(environment: Mapping[str, str] = os.environ, *, timeout: int = 300) -> int:
    """Join the processes that were started together, and return their number. Call it before any other use of JAX.

    Afterwards `jax.devices()` are those of all processes, and every process must run the same computations. On CPUs
    they communicate through gloo. Raises UserError if they are not all there within `timeout` seconds.
    """
    count, number = announced(environment)
    if count == 1 or jax.distributed.is_initialized():
        return count
    options: dict[str, Any] = {"cluster_detection_method": "slurm"}
    if VARIABLES[0] in environment:
        options = {"coordinator_address": environment[VARIABLES[0]], "num_processes": count, "process_id": number}
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    options |= {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS, "shutdown_timeout_seconds": _LEAVING_SECONDS}
    in_main = threading.current_thread() is threading.main_thread()
    # While JAX waits, no handler of Python's would be called.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if in_main else None
    try:
        jax.distributed.initialize(**options, initialization_timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the {count} processes could not join within {timeout} s: {one_line(error)}") from error
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    return count


def join(config: Any) -> Any:
    """Join the processes that the environment announces, and return the config with the run_dir of process 0.

    Raises UserError in all processes if they differ in what must be the same.
    """
    count, _ = announced()
    if count == 1:
        return config
    if not isinstance(config, Config):
        raise UserError(f"task: this one runs in one process, and {count} were started: start one (srun --ntasks=1)")
    require_for_processes(config, count)
    join_processes()
    require_same(start_facts(config))
    return config.replace(run_dir=exchange(str(config.run_dir))[0])


def require_for_processes(config: Config, count: int) -> None:
    """Refuse what a policy over so many processes does not take."""
    mesh, async_level = config.policy.mesh, config.training.async_level
    require(mesh.size % count == 0, "policy.mesh", f"fsdp x tensor a multiple of the {count} processes", mesh.size)
    require(
        count == 1 or async_level == 0, "training.async_level", f"0 with a policy over {count} processes", async_level
    )


def require_same(facts: Mapping[str, str]) -> None:
    """Compare facts by name over all processes. Raises UserError in all, with the first that differs."""
    if process_count() == 1:
        return
    first, *others = map(json.loads, exchange(json.dumps(facts)))
    for number, other in enumerate(others, 1):
        for name in (name for name in {**first, **other} if first.get(name) != other.get(name)):
            got = f"{first.get(name, 'nothing')} in process 0 and {other.get(name, 'nothing')} in process {number}"
            raise UserError(f"{name}: expected the same in all processes, got {got}")


def start_facts(config: Config) -> dict[str, str]:
    """Return the config, with the digest of a file or folder in place of its path, the code and the packages."""
    facts = {name: _fact(value) for name, value in _flat(config.model_dump()) if name != "run_dir"}
    facts["the code of grpo_jax"] = _digest(Path(__file__).parents[1].rglob("*.py"))
    return facts | {f"the version of {d.name}": d.version for d in metadata.distributions() if d.name in _PACKAGES}


def _flat(values: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            if ".py:" in str(key):  # a class in a file, with its share
                yield f"{name}: {key}", key
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for place, value in enumerate(values):
            yield from _flat(value, f"{name}[{place}]")
    else:
        yield name, values


def _fact(value: object) -> str:
    file, colon, member = value.rpartition(":") if isinstance(value, str) and ".py:" in value else (value, "", "")
    if not isinstance(file, str) or not os.path.exists(file):
        return short_repr(value)
    files = Path(file).rglob("*") if os.path.isdir(file) else [Path(file)]
    return f"files{colon}{member} of digest {_digest(files)}"


def _digest(paths: Iterable[Path]) -> str:
    """Digest the sorted files, of large ones 64 blocks that are spread evenly."""
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for place in range(0, size, max(_BLOCK, size // 64)):
                file.seek(place)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:12]


def require_shared(folder: Path) -> None:
    """Refuse a run directory that a process does not see as process 0 does: each writes its parts of a checkpoint."""
    if process_count() == 1:
        return
    lock = folder / LOCK
    held = from_main_process(lock.read_text)

    def look() -> None:
        deadline = time.monotonic() + _SHARED_SECONDS
        while not lock.is_file() or lock.read_text() != held:
            if time.monotonic() > deadline:
                blind = f"process {process_index()} does not see it"
                raise UserError(f"{folder}: expected one folder for all processes, but {blind}")
            time.sleep(0.1)

    together(look)


@contextmanager
def ending_together(run_dir: str) -> Iterator[None]:
    """End with a line if another process is gone; report a mistake of this one that process 0 does not share."""
    try:
        yield
    except Exception as error:
        if process_count() > 1:
            if _is_of_another(error):
                again = f"its last checkpoint is sound; go on with --resume --run_dir {run_dir}"
                complain(f"error: another process of the run is gone: {again}")
                os._exit(1)  # JAX would wait for it, and abort
            if isinstance(error, UserError | StageError) and not is_told():
                complain(f"error: process {process_index()}: {' '.join(str(error).split())}")
        raise


def _is_of_another(error: BaseException | None) -> bool:
    words = ("Gloo", "UNAVAILABLE", "heartbeat", "CoordinationService", "coordination service")
    return error is not None and (any(word in str(error) for word in words) or _is_of_another(error.__cause__))
