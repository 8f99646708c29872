"""The cache of compiled programs, kept between runs."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import jax

from grpo_jax.errors import complain

MOST_PROGRAMS = 2000


def enable_compile_cache(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Let JAX cache compiled programs in `~/.cache/grpo_jax/programs`; keep the latest 2,000 of earlier processes.

    Small programs are cached too: a start has over a hundred. JAX_COMPILATION_CACHE_DIR and
    JAX_ENABLE_COMPILATION_CACHE=false take precedence. Each kind of processor has its own folder, since machines may
    share home directories but not programs. A folder that other users can write is not used. Returns the folder; None
    if nothing was changed.
    """
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue] made at run time
    if folder or {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"} & environment.keys():
        return None
    try:
        folder = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_jax/programs" / _processor()
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # no home directory
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        others = f"since others may write {folder}: remove it, or chmod 700 it"
        complain(f"warning: compiled programs are not kept, {others}")
        return None
    with suppress(OSError):  # another process may remove entries too
        entries = sorted(folder.glob("*-cache"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in entries[MOST_PROGRAMS:]:
            path.unlink()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in environment:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def _processor() -> str:
    kind = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        can = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        kind += "-" + hashlib.sha256(f"2{can}".encode()).hexdigest()[:12]  # JAX cannot read entries of a first format
    return kind
