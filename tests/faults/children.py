"""Training commands in forked children: a separate process each, without the seconds of imports.

The process that forks must have imported everything and started no device of JAX: see `benchmarks/campaign.py`.
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How a child ended.

    Attributes:
        code: Its exit code; minus the signal's number where one ended it.
        out: Its standard output.
        err: Its standard error.
    """

    code: int
    out: str
    err: str


PATIENCE = 240.0  # seconds; only a hang takes that long


def preload(names: Sequence[str]) -> None:
    """Imports what runs of these names need."""
    import grpo_jax.runs.trainer
    import grpo_jax.train  # noqa: F401

    if "miniature" in names:
        import diffusers  # noqa: F401
        import open_clip  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)


def run(arguments: Sequence[str], *, before: Callable[[], None], folder: Path) -> Ended:
    """The training command in a child, in which `before` is called first; its output goes to a folder."""

    def act() -> None:
        from grpo_jax.errors import exit_process
        from grpo_jax.train import main

        before()
        exit_process(main(list(arguments)))

    return _fork(act, folder)


def value_of(function: Callable[..., Any], *arguments: Any, folder: Path) -> Any:
    """Return a function's result in a child, which may start JAX."""
    result = folder / "value.pickle"

    def act() -> None:
        result.write_bytes(pickle.dumps(function(*arguments)))
        os._exit(0)

    ended = _fork(act, folder)
    if ended.code != 0:
        raise RuntimeError(f"{function.__name__} failed: {ended.err}")
    return pickle.loads(result.read_bytes())  # our own, of a moment ago


def _fork(act: Callable[[], None], folder: Path) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "stdout", folder / "stderr"]
    pid = os.fork()
    if pid == 0:
        _begin(paths, act)
    started = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return Ended(code, *(path.read_text(errors="replace") for path in paths))
        if time.monotonic() - started > PATIENCE:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _begin(paths: Sequence[Path], act: Callable[[], None]) -> None:
    """The child's life; it never returns."""
    code = 1
    try:
        os.setsid()
        for descriptor, path in zip((1, 2), paths, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        act()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
