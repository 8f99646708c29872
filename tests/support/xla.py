"""XLA's settings from the environment."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
"""Compiles in a quarter of the time; programs of this size run as long as before."""


def known_flags(flags: tuple[str, ...] = QUICK) -> str:
    """Those that the installed XLA knows: over another it ends the process, and they change with its versions."""

    def known(named: str) -> bool:
        environment = os.environ | {"XLA_FLAGS": named, "JAX_PLATFORMS": "cpu"}
        script = [sys.executable, "-c", "import jax; jax.devices()"]
        return subprocess.run(script, env=environment, capture_output=True).returncode == 0

    every = " ".join(flags)
    return every if known(every) else " ".join(filter(known, flags))


KEPT = 2**30
"""Bytes of compiled programs that a test session leaves for the next; a larger folder is begun anew."""


def kept_programs() -> Path:
    """The user's folder of compiled programs of this machine; JAX tells versions and flags apart by their names."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "grpo_jax" / f"test_programs_{platform.node()}"
    if sum(path.stat().st_size for path in folder.glob("*")) > KEPT:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def devices(number: int) -> str:
    """The flags that hold here, and so many simulated devices."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={number}"
