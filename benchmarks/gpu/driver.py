"""Run the parts one after the other, each in its own process, and print a table of the file that they write."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import outcome
from outcome import Figures, keep
from support.xla import known_flags

HERE = Path(__file__).resolve().parent
LIMIT = 115.0
"""Default limit of a part in seconds, after which it is ended; its results so far count."""
LEAST = 10.0
"""Smallest remaining seconds to begin a part."""
SHARE = 0.8
"""Share of a part's seconds after which it begins no further measurement."""
PATIENCE = 30
"""Times as long limits and budgets of a rehearsal on a CPU, which may be busy."""
SHOWN = 6000
"""Characters of a process's output that are printed when it ended early."""
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "orbax-checkpoint", "numpy"),
    *("torch", "triton", "transformers", "diffusers", "open_clip_torch", "trl", "datasets", "vllm", "qwix", "grpo_jax"),
    *("nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvcc", "nvidia-nvvm"),
)


class Part(NamedTuple):
    """A file beside this one, its measurements to run, and its limit in seconds."""

    module: str
    arguments: tuple[str, ...] = ()
    limit: float = LIMIT


class Call(NamedTuple):
    """Parts by importance (there may be no time for the last ones), and the seconds of all of them."""

    parts: tuple[str, ...]
    budget: int


PARTS = {
    "run": Part("run", limit=150.0),
    "beside-0.5B": Part("beside", ("0.5B",), limit=190.0),
    "update": Part("update", limit=130.0),
    "decode-0.5B": Part("decode", ("0.5B",), limit=120.0),
    "kernels": Part("kernels", limit=60.0),
    "handover": Part("handover", limit=60.0),
    "correctness": Part("correctness", limit=190.0),
    "resuming": Part("resuming", limit=100.0),
    "plan": Part("plan", limit=100.0),
    "beside-1.5B": Part("beside", ("1.5B",), limit=190.0),
    "run-refinement": Part("run", ("prompt_refinement_miniature",)),
    "iteration": Part("iteration", limit=150.0),
    "long": Part("long", limit=150.0),
    "decode-7B": Part("decode", ("7B",)),
    "decode-1.5B": Part("decode", ("1.5B",)),
}
CALLS = {
    "A": Call(("run", "beside-0.5B"), 310),
    "B": Call(("update", "decode-0.5B", "kernels", "handover"), 370),
    "C": Call(("correctness", "resuming", "plan"), 340),
    "D": Call(("beside-1.5B", "run-refinement", "iteration", "long"), 370),
}


def describe() -> Figures:
    """Describe this machine, its first device and packages, in a process of its own, which takes the GPU."""
    import jax
    from iteration_work import versions

    device = jax.devices()[0]
    return {
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "driver": _driver(),
        "versions": {"python": sys.version.split()[0], **versions(PACKAGES)},
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cuda_paths() -> dict[str, str]:
    """Return variables that show XLA the CUDA toolkit beside nvcc, for a JAX without ptxas of its own."""
    root = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parents[1]
    if not (root / "bin" / "ptxas").exists() or not (root / "nvvm" / "libdevice").is_dir():
        return {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={root}".strip()
    return {"XLA_FLAGS": flags, "PATH": os.pathsep.join([os.environ["PATH"], str(root / "bin")])}


def environment(programs: Path, temporary: Path) -> dict[str, str]:
    """Return a part's environment: no preallocation, no network, and a shared cache of compiled programs."""
    platforms = os.environ.get("JAX_PLATFORMS", "")  # correctness compares with the CPU
    beside = {"JAX_PLATFORMS": f"{platforms},cpu"} if platforms and "cpu" not in platforms else {}
    return {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **os.environ,
        **cuda_paths(),
        **beside,
        "JAX_COMPILATION_CACHE_DIR": str(programs.resolve()),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(temporary / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "TMPDIR": str(temporary),  # an ended process does not remove its own files
    }


class Workers(NamedTuple):
    """The processes of the parts: the report that they write, their environment, and the size of their work."""

    out: Path
    variables: dict[str, str]
    tiny: bool

    @property
    def log(self) -> Path:
        """The file of all output."""
        return self.out.with_suffix(".log")

    def run(self, name: str, seconds: float) -> str:
        """Run a part, or "describe", in a process; end it and its children after the seconds; return its error."""
        words = ["--worker", name, "--seconds", str(SHARE * seconds), *(["--tiny"] if self.tiny else [])]
        command = [sys.executable, str(HERE), *words, "--out", str(self.out)]
        with self.log.open("a", encoding="utf-8") as stream:
            print(f"==== {name}, at most {seconds:.0f} s", file=stream, flush=True)
            process = subprocess.Popen(
                command, env=self.variables, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                code = process.wait(timeout=seconds)
                return "" if code == 0 else f"ended with {code}"
            except subprocess.TimeoutExpired:
                return f"ended after {seconds:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # children too, which may outlive it
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run_part(self, name: str, left: float) -> None:
        """Run a part in the time left; add its seconds and its error to the report, and print its tracebacks."""
        report, seconds = read(self.out), min(PARTS[name].limit * (PATIENCE if self.tiny else 1), left)
        part = report["parts"][name] = {"measurements": {}}
        keep(report, self.out)
        if seconds < LEAST:
            part["skipped"] = "no time was left"
        else:
            start, length = time.monotonic(), self.log.stat().st_size
            error = self.run(name, seconds)
            report = read(self.out)
            part = report["parts"][name]
            part["seconds"] = time.monotonic() - start
            if error:
                part |= {"failed": error, "said": self.log.read_bytes()[length:][-SHOWN:].decode(errors="replace")}
        report["parts"][name] = part
        keep(report, self.out)
        print_failures(name, part)


def print_failures(name: str, part: Figures) -> None:
    """Print the tracebacks of a part, and the last output of one that ended early."""
    rows = part["measurements"].items()
    failures = [(row, figures["traceback"]) for row, figures in rows if "traceback" in figures]
    failures += [(part["failed"], part["said"])] if "failed" in part else []
    for row, message in failures:
        print(f"{name}, {row}:\n{message}", file=sys.stderr, flush=True)


def read(path: Path) -> Figures:
    """Read the report."""
    return json.loads(path.read_text(encoding="utf-8"))


def end_with_parent() -> None:
    """End this process and its children once the driver has been killed: they would hold the GPU."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def work(name: str, tiny: bool, seconds: float, out: Path) -> None:
    """Make a part's measurements; the report has each as soon as it is made."""

    def tell(rows: dict[str, Figures]) -> None:
        report = read(out)
        report["parts"].setdefault(name, {})["measurements"] = rows
        keep(report, out)

    part = PARTS[name]
    try:
        measurements = importlib.import_module(part.module).measurements(tiny, *part.arguments)
    except ModuleNotFoundError as error:
        if error.name not in outcome.OPTIONAL:
            raise
        return tell({"all of it": {"absent": error.name}})
    outcome.work(measurements, seconds, tell)


def is_complete(part: Figures) -> bool:
    """Whether every measurement was made, or its package is not installed, and none disagreed."""
    rows = part["measurements"].values()
    missing = [word for figures in (part, *rows) for word in ("failed", "skipped") if word in figures]
    return bool(rows) and not missing and not any(row.get("agrees") is False for row in rows)


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
    for word in ("absent", "skipped", "failed"):
        if word in figures:
            return f"{word}: {figures[word]}".replace("|", "/")
    return {True: "agrees", False: "**differs**", None: ""}[figures.get("agrees")]


def _listed(figures: Figures) -> str:
    hidden = ("absent", "skipped", "failed", "agrees", "took", "traceback")
    shown = [f"{key.replace('_', ' ')} {_number(value)}" for key, value in figures.items() if key not in hidden]
    return ", ".join(word for word in shown if not word.endswith(" None")).replace("|", "/")


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; `names` are the parts to run, and `out` has its default."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu",
        description="Measurements that need a GPU; docs/development.md describes the calls.",
        epilog="; ".join(f"{name} ({call.budget} s): {', '.join(call.parts)}" for name, call in CALLS.items()),
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--call", choices=list(CALLS), help="the parts of one call (default: all calls)")
    group.add_argument("--parts", nargs="+", choices=list(PARTS), metavar="PART", help="these parts, in this order")
    parser.add_argument("--tiny", action="store_true", help="rehearse at tiny sizes on a CPU")
    parser.add_argument("--programs", type=Path, metavar="DIR", help="keep compiled programs here for the next call")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="seconds of all parts together (default: the call's)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file (default: benchmarks/gpu.json, gpu-A.json)")
    parser.add_argument("--worker", choices=[*PARTS, "describe"], help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=LIMIT, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    calls = [CALLS[chosen.call]] if chosen.call else list(CALLS.values())
    chosen.names = chosen.parts or [part for call in calls for part in call.parts]
    chosen.usual_budget = sum(PARTS[name].limit for name in chosen.parts or ()) or sum(call.budget for call in calls)
    stem = "-".join(filter(None, ["gpu", chosen.call, "tiny" if chosen.tiny else None]))
    chosen.out = chosen.out or HERE.with_name(f"{stem}.json")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if a measurement failed, disagreed or is missing, and 2 without a GPU."""
    chosen = options(arguments)
    if chosen.worker is None:
        # On SIGTERM, as on Ctrl-C, the worker ends with the driver.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        return drive(chosen)
    end_with_parent()
    if chosen.worker == "describe":
        keep(read(chosen.out) | describe(), chosen.out)
    else:
        work(chosen.worker, chosen.tiny, chosen.seconds, chosen.out)
    return 0


def drive(chosen: argparse.Namespace) -> int:
    """Describe the machine, run the parts, and print their table."""
    start, patience = time.monotonic(), PATIENCE if chosen.tiny else 1
    if chosen.tiny and "XLA_FLAGS" not in os.environ:
        os.environ["XLA_FLAGS"] = known_flags()  # as in the tests: a rehearsal compiles for most of its time
    with tempfile.TemporaryDirectory(prefix="grpo_jax_gpu_") as name:
        folder = Path(name)
        variables = environment(chosen.programs or folder / "programs", folder)
        machine = Workers(folder / "machine.json", variables, chosen.tiny)
        keep({}, machine.out)
        error = machine.run("describe", LIMIT * patience)
        if error:
            print(f"JAX did not start ({error}):\n{machine.log.read_text()[-SHOWN:]}", file=sys.stderr)
            return 1
        report = read(machine.out)
        if report["backend"] != "gpu" and not chosen.tiny:
            print("JAX sees no GPU here; --tiny rehearses the measurements on a CPU", file=sys.stderr)
            return 2
        report |= {"date": datetime.date.today().isoformat(), "call": chosen.call, "tiny": chosen.tiny, "parts": {}}
        words = [report["driver"] or report["device"], *(" ".join(item) for item in report["versions"].items())]
        print(f"{report['date']}: {', '.join(words)}", flush=True)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        workers = machine._replace(out=chosen.out.resolve())
        keep(report, workers.out)
        workers.log.write_text("", encoding="utf-8")
        budget = chosen.budget or chosen.usual_budget * patience
        for part in chosen.names:
            print(f"{part} …", file=sys.stderr, flush=True)
            workers.run_part(part, budget - (time.monotonic() - start))
    parts = read(workers.out)["parts"]
    print(table(parts))
    return 0 if all(map(is_complete, parts.values())) else 1
