"""Compiled programs on disk, for later runs."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import jax

from grpo_jax.errors import complain

_FOLDER, _ENABLED = "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"
_SETTINGS = {  # name in jax.config, which is that of the variable: value
    "jax_persistent_cache_min_compile_time_secs": 0.3,
    "jax_compilation_cache_max_size": 2 * 2**30,  # bytes; what was not used for longest goes first
}


def enable_compile_cache(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Let JAX keep what it compiles for 0.3 s or longer in `~/.cache/grpo_jax/programs`, at most 2 GiB.

    JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=false take precedence. Each kind of processor has a
    folder of its own, since machines share homes but not programs. A folder that others may write is not used, since
    what lies there is run. Return the folder; None where nothing was changed.
    """
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue] made at run time
    if folder or _FOLDER in environment or _ENABLED in environment:
        return None
    try:
        cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "grpo_jax" / "programs" / _processor()
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # nobody's home
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        _warn(f"warning: compiled programs are not kept, since others may write {folder}: remove it, or chmod 700 it")
        return None
    _remove_half_entries(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in _SETTINGS.items():
        if name.upper() not in environment:
            jax.config.update(name, value)
    return folder


def _remove_half_entries(folder: Path) -> None:
    """Remove entries without the time of their use, as a kill leaves them: one of them blocks all further writes."""
    for entry in folder.glob("*-cache"):
        if not entry.with_name(f"{entry.name.removesuffix('-cache')}-atime").exists():
            entry.unlink(missing_ok=True)


_warn = functools.cache(complain)  # once for each text


def _processor() -> str:
    kind = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        can = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        format_of_entries = "2"  # those of 1, which may lie beside them, are none that JAX can read
        kind += "-" + hashlib.sha256((format_of_entries + can).encode()).hexdigest()[:12]
    return kind
