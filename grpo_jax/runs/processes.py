"""Processes of a run: the compilation cache, and how several processes join, compare their inputs and end together.

If one is silent for `SILENT_SECONDS`, the others end with a line; JAX ends them if it is the first. `join_processes`
is also for custom programs around `grpo_jax.training.update` and `grpo_jax.models.sharding` (docs/scaling.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from grpo_jax.config.fields import flat, require
from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, UserError, complain, one_line
from grpo_jax.models.broadcast import (
    ALIVE,
    announce_exit,
    distributed_client,
    exchange,
    from_main_process,
    is_reported,
    on_all_processes,
    process_count,
    process_index,
)
from grpo_jax.runs.directory import LOCK

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SILENT_SECONDS = 100.0
"""As JAX's own limit, which a process on a loaded machine keeps; JAX's is twice as long here, since it aborts."""
_LEAVING_SECONDS = 10
_SHARED_SECONDS = 10.0  # longest delay until a network file system shows a new file
_PACKAGES = (
    "grpo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "torch",
    "diffusers", "open_clip_torch",
)  # fmt: skip
_BLOCK = 2**20
_leaving = threading.Lock()


def announced(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the number of processes started together and this one's index, by JAX's variables or SLURM's step."""
    values = [environment[name] for name in VARIABLES if name in environment]
    count = environment.get("SLURM_STEP_NUM_TASKS", "1")
    number = "0" if count == "1" else environment.get("SLURM_PROCID", "0")  # 1 in the batch script of an allocation
    if values:
        whole = len(values) == len(VARIABLES) and re.fullmatch(r".+:[0-9]{1,5}", values[0])
        require(whole, ", ".join(VARIABLES), "all three, the first as HOST:PORT", values)
        count, number = values[1:]
    valid = re.fullmatch("[0-9]{1,9}", count) and re.fullmatch("[0-9]{1,9}", number) and int(number) < int(count)
    require(valid, " and ".join(VARIABLES[1:]), "two numbers, the second below the first", [count, number])
    return int(count), int(number)


def join_processes(environment: Mapping[str, str] = os.environ, *, timeout: int = 300) -> int:
    """Join the processes that were started together, and return their number. Call it before any other use of JAX.

    Afterwards `jax.devices()` are those of all processes, and every process must run the same computations. On CPUs
    they communicate through gloo. Raises UserError if a process is missing after `timeout` seconds.
    """
    count, number = announced(environment)
    if count == 1 or jax.distributed.is_initialized():
        return count
    options: dict[str, Any] = {"cluster_detection_method": "slurm"}
    if VARIABLES[0] in environment:
        options = {"coordinator_address": environment[VARIABLES[0]], "num_processes": count, "process_id": number}
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    options |= {"heartbeat_timeout_seconds": int(2 * SILENT_SECONDS), "shutdown_timeout_seconds": _LEAVING_SECONDS}
    in_main = threading.current_thread() is threading.main_thread()
    # While JAX waits, Python's signal handlers would not run.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if in_main else None
    try:
        jax.distributed.initialize(**options, initialization_timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the {count} processes could not join within {timeout} s: {one_line(error)}") from error
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    return count


def join(config: Config) -> Config:
    """Join the processes that the environment announces, and return the config with the run_dir of process 0.

    Raises UserError in all processes if their inputs differ.
    """
    count, _ = announced()
    if count == 1:
        return config
    mesh, async_level = config.policy.mesh, config.training.async_level
    require(mesh.size % count == 0, "policy.mesh", f"fsdp x tensor a multiple of the {count} processes", mesh.size)
    require(async_level == 0, "training.async_level", f"0 with a policy over {count} processes", async_level)
    require(not config.renderer_learns, "training.learns", f"'rewriter' in {count} processes", config.learns)
    join_processes()
    require_same(start_facts(config))
    return config.replace(run_dir=exchange(str(config.run_dir))[0])


def require_same(facts: Mapping[str, str]) -> None:
    """Compare facts by name over all processes. Raises UserError in all, with the first difference."""
    if process_count() == 1:
        return
    first, *others = map(json.loads, exchange(json.dumps(facts)))
    for number, other in enumerate(others, 1):
        for name in (name for name in {**first, **other} if first.get(name) != other.get(name)):
            values = [one_line(facts.get(name, "nothing")) for facts in (first, other)]
            got = f"{values[0]} in process 0 and {values[1]} in process {number}"
            raise UserError(f"{name}: expected the same in all processes, got {got}")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect a run's results."""
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def start_facts(config: Config) -> dict[str, str]:
    """Return the config by field with digests in place of paths, and the versions of code and packages."""
    facts = {name: str(_described(value)) for name, value in flat(config.model_dump()).items()}
    del facts["run_dir"]
    facts["the code of grpo_jax"] = digest_files(Path(__file__).parents[1].rglob("*.py"))
    return facts | {f"the version of {name}": version for name, version in versions().items()}


def _described(value: Any) -> Any:
    """Return a plain value with digests in place of files and folders, including the file of file.py:member."""
    if isinstance(value, dict):
        return {_described(key): _described(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_described(entry) for entry in value]
    path, _, member = value.rpartition(":") if isinstance(value, str) and ".py:" in value else (value, "", "")
    if not isinstance(path, str) or not os.path.exists(path):
        return value
    files = Path(path).rglob("*") if os.path.isdir(path) else [Path(path)]
    return f"{member} of files of digest {digest_files(files)}".removeprefix(" of ")


def digest_files(paths: Iterable[Path]) -> str:
    """Digest the sorted files; of those above 64 MiB, 64 evenly spread blocks of a MiB."""
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
    """Refuse a run directory that the processes do not share: each writes its shards of a checkpoint."""
    if process_count() == 1:
        return
    lock = folder / LOCK
    content = from_main_process(lock.read_text)

    def look() -> None:
        deadline = time.monotonic() + _SHARED_SECONDS
        while not lock.is_file() or lock.read_text() != content:
            if time.monotonic() > deadline:
                shared = f"expected one folder for all processes, but process {process_index()} does not see it"
                raise UserError(f"{folder}: {shared}")
            time.sleep(0.1)

    on_all_processes(look)


@contextmanager
def exit_if_peer_failed(run_dir: str) -> Iterator[None]:
    """End with one line if another process is gone; report this process's own error if process 0 has none."""
    if process_count() == 1:
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=[run_dir, done], daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:
        if _is_of_another(error):
            _leave(run_dir)
        if isinstance(error, UserError | StageError) and not is_reported():
            complain(f"error: process {process_index()}: {' '.join(str(error).split())}")
        raise
    finally:
        done.set()
        watcher.join()


def _watch(run_dir: str, done: threading.Event) -> None:
    """Show the others that this process lives, and leave the run if process 0 misses a sign of another.

    Nobody judges process 0 so: one of its rewards may hold the interpreter lock.
    """
    client, own, last_signs = distributed_client(), str(process_index()), {}
    with suppress(jax.errors.JaxRuntimeError):  # process 0 is gone, and JAX aborts
        while not done.wait(SILENT_SECONDS / 20):
            client.key_value_set(f"{ALIVE}/{own}", str(time.monotonic()), allow_overwrite=True)
            signs, now = dict(client.key_value_dir_get(ALIVE)), time.monotonic()
            for name, sign in signs.items():
                if last_signs.get(name, ("", 0))[0] != sign:
                    last_signs[name] = sign, now
            silent = any(sign != "done" and now - since > SILENT_SECONDS for sign, since in last_signs.values())
            if f"{ALIVE}/gone" in signs or (own == "0" and silent):
                _leave(run_dir)
        client.key_value_set(f"{ALIVE}/{own}", "done", allow_overwrite=True)


def _leave(run_dir: str) -> None:
    """End this process and the others with one line: JAX would wait for one that is gone, and abort."""
    _leaving.acquire()  # by one thread, which ends them all
    again = f"its last checkpoint is sound; continue with --resume --run_dir {run_dir}"
    complain(f"error: another process of the run is gone: {again}")
    announce_exit()
    if process_index() == 0:  # the others talk through it
        time.sleep(SILENT_SECONDS / 10)
    os._exit(1)


def _is_of_another(error: BaseException | None) -> bool:
    words = ("Gloo", "UNAVAILABLE", "heartbeat", "CoordinationService", "coordination service")
    return error is not None and (any(word in str(error) for word in words) or _is_of_another(error.__cause__))
