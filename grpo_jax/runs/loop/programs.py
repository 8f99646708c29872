"""Compiled programs on the disk: a later run finds those that it needs again."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import jax

_FOLDER, _ENABLED = "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"
_SETTINGS = {  # name in jax.config, which is that of the variable: value
    "jax_persistent_cache_min_compile_time_secs": 0.3,
    "jax_compilation_cache_max_size": 2 * 2**30,  # bytes; what was not used for longest goes first
}


def keep_programs(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Has JAX keep what it compiles for 0.3 s or longer in `~/.cache/grpo_jax/programs`, at most 2 GiB.

    Where JAX is told otherwise, by JAX_COMPILATION_CACHE_DIR or by JAX_ENABLE_COMPILATION_CACHE=false, that holds. Each
    kind of processor has a folder of its own, since homes are shared by machines and programs are not.

    Args:
        environment: XDG_CACHE_HOME in place of `~/.cache`, and JAX's variables.

    Returns:
        The folder; None where this has changed nothing, also where it cannot be made or is another user's.
    """
    if _FOLDER in environment or jax.config.jax_compilation_cache_dir or _ENABLED in environment:
        return None
    try:
        cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "grpo_jax" / "programs" / _processor()
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # what lies there is run
        if folder.stat().st_uid != os.getuid():
            return None
    except (OSError, RuntimeError):  # nobody's home
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in _SETTINGS.items():
        if name.upper() not in environment:
            jax.config.update(name, value)
    return folder


def _processor() -> str:
    """The kind of processor, with all that it can do."""
    kind = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        can = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        kind += "-" + hashlib.sha256(can.encode()).hexdigest()[:12]
    return kind
