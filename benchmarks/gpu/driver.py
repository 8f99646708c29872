"""Run the parts one after the other, each in its own process; write their results and print a table."""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outcome import Figures, keep, work

HERE = Path(__file__).resolve().parent
BUDGET = 480.0
"""Seconds of all parts together."""
LIMIT = 115.0
"""Default limit of a part in seconds, after which it is ended; its results so far count."""
LEAST = 10.0
"""Smallest remaining seconds to begin a part."""
SHARE = 0.8
"""Share of a part's seconds after which it begins no further measurement."""


class Part(NamedTuple):
    """A file beside this one, its measurements to run, and its limit in seconds."""

    module: str
    arguments: tuple[str, ...] = ()
    limit: float = LIMIT


PARTS = {
    "plan": Part("plan"),
    "correctness": Part("correctness", limit=230.0),
    "handover": Part("handover"),
    "iteration": Part("iteration", limit=150.0),
    "decode-0.5B": Part("decode", ("0.5B",)),
    "decode-7B": Part("decode", ("7B",)),
    "update": Part("update"),
    "long": Part("long", limit=150.0),
    "resuming": Part("resuming"),
    "decode-1.5B": Part("decode", ("1.5B",)),
}
"""By importance: there may be no time for the last ones."""
TINY = (("plan", "correctness", "handover", "iteration", "decode-0.5B", "update", "long"), ("resuming",))
"""By process, because imports dominate tiny parts. Other sizes would be the same tiny shape."""


def describe() -> Figures:
    """Describe this machine, its first device and packages, in a process of its own, which takes the GPU."""
    import jax
    from iteration_work import versions

    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "diffusers", "vllm", "qwix", "grpo_jax")
    return {
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "driver": _driver(),
        "versions": {"python": sys.version.split()[0], **versions(packages)},
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment(programs: str) -> dict[str, str]:
    """Return a part's environment: no preallocation, and a shared cache of compiled programs.

    Nothing is fetched from a network.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")  # correctness compares with the CPU
    beside = {"JAX_PLATFORMS": f"{platforms},cpu"} if platforms and "cpu" not in platforms else {}
    return {
        "JAX_COMPILATION_CACHE_DIR": programs,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **os.environ,
        **beside,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class Told(NamedTuple):
    """Result of a process: its JSON, or None; its error ("" for none); its last output."""

    found: Any
    ending: str
    said: str


def run_worker(words: Sequence[str], seconds: float, folder: Path) -> Told:
    """Run this script in a process of its own; end it with its children after the limit."""
    out, log = folder / "out.json", folder / "log.txt"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(HERE), *words, "--out", str(out)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=environment(str(folder / "programs")), stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
            ending = "" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            ending = f"ended after {seconds:.0f} s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else None
    return Told(found, ending, log.read_text(encoding="utf-8", errors="replace")[-4000:])


def run_parts(names: Sequence[str], tiny: bool, left: float, folder: Path) -> dict[str, Figures]:
    """Return the results of parts in one process, its seconds, and its output after a failure."""
    seconds, start = min(sum(PARTS[name].limit for name in names), left), time.monotonic()
    if seconds < LEAST:
        return {name: {"skipped": "no time was left", "measurements": {}} for name in names}
    words = ["--worker", *names, "--seconds", str(SHARE * seconds / len(names)), *(["--tiny"] if tiny else [])]
    told = run_worker(words, seconds, folder)
    parts = {name: {"measurements": (told.found or {}).get(name, {})} for name in names}
    for part in parts.values():
        part["seconds"] = time.monotonic() - start
        if told.ending:
            part["failed"] = told.ending
        if told.ending or any("failed" in row for row in part["measurements"].values()):
            part["said"] = told.said
    return parts


def do_parts(names: Sequence[str], tiny: bool, seconds: float, out: Path) -> None:
    """Do a worker's work; the file always has all results so far."""
    found: dict[str, dict[str, Figures]] = {}

    def tell(name: str, rows: dict[str, Figures]) -> None:
        found[name] = rows
        keep(found, out)

    for name in names:
        part = PARTS[name]
        try:
            measurements = importlib.import_module(part.module).measurements(tiny, *part.arguments)
        except ModuleNotFoundError as error:
            tell(name, {"all of it": {"skipped": f"the package {error.name} is not installed"}})
            continue
        work(measurements, seconds, functools.partial(tell, name))


def is_well(part: Figures) -> bool:
    """Whether nothing failed, and nothing disagreed."""
    rows = part["measurements"].values()
    return "failed" not in part and not any("failed" in row or row.get("agrees") is False for row in rows)


def table(parts: dict[str, Figures]) -> str:
    """A line for each measurement, and for each part that was left out or ended early."""
    lines = ["| part | measurement | result | figures |", "|---|---|---|---|"]
    for name, part in parts.items():
        for row, figures in part["measurements"].items():
            lines.append(f"| {name} | {row} | {_result(figures)} | {_listed(figures)} |")
        for word in ("skipped", "failed"):
            if word in part:
                lines.append(f"| {name} | | {word}: {part[word]} | |")
    return "\n".join(lines)


def _result(figures: Figures) -> str:
    for word in ("skipped", "failed"):
        if word in figures:
            return f"{word}: {figures[word]}".replace("|", "/")
    return {True: "agrees", False: "**differs**", None: ""}[figures.get("agrees")]


def _listed(figures: Figures) -> str:
    hidden = ("skipped", "failed", "agrees", "took")
    shown = [f"{key.replace('_', ' ')} {_number(value)}" for key, value in figures.items() if key not in hidden]
    return ", ".join(word for word in shown if not word.endswith(" None")).replace("|", "/")


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; taken without asking where JAX sees no GPU")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="these alone, in this order")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of all parts together")
    parser.add_argument("--out", type=Path, default=HERE.with_suffix(".json"), help="JSON file to write")
    parser.add_argument("--worker", nargs="+", choices=[*PARTS, "describe"], help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=LIMIT, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if anything failed or disagreed."""
    chosen = options(arguments)
    if chosen.worker == ["describe"]:
        keep(describe(), chosen.out)
        return 0
    if chosen.worker:
        do_parts(chosen.worker, chosen.tiny, chosen.seconds, chosen.out)
        return 0
    return drive(chosen)


def drive(chosen: argparse.Namespace) -> int:
    """Describe the machine, run the parts, write and print."""
    deadline = time.monotonic() + chosen.budget
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = run_worker(["--worker", "describe"], 120, folder)
        if asked.found is None:
            print(f"JAX did not start ({asked.ending}):\n{asked.said}", file=sys.stderr)
            return 1
        report = asked.found | {"date": datetime.date.today().isoformat(), "tiny": chosen.tiny, "parts": {}}
        if report["backend"] != "gpu" and not chosen.tiny:
            report["tiny"] = True
            print("JAX sees no GPU: tiny sizes on the CPU, which say nothing of a card.", flush=True)
        apart = [(part,) for part in chosen.parts or PARTS]
        for names in TINY if report["tiny"] and not chosen.parts else apart:
            print(f"{', '.join(names)} …", file=sys.stderr, flush=True)
            report["parts"] |= run_parts(names, report["tiny"], deadline - time.monotonic(), folder)
            keep(report, chosen.out)
    print(f"{report['device']}, jax {report['versions']['jax']}, {report['date']}\n\n{table(report['parts'])}")
    return 0 if all(map(is_well, report["parts"].values())) else 1
