"""The GPU benchmark without a GPU: its imports exist, a part of each call agrees, and nothing is missing unnoticed."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parents[2] / "benchmarks"
WORKERS = [HERE / f"{name}.py" for name in ("grpo_iteration", "iteration_work", "iteration_ours")]
TRL = pytest.param(HERE / "iteration_trl.py", marks=pytest.mark.wide)  # importing it takes long
# One measurement of each call: its part, and its place there.
CHEAP = {"A": ("beside-0.5B", 0), "B": ("handover", 2), "C": ("plan", 0), "D": ("long", 0)}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(HERE / "gpu"), str(HERE), *sys.path])
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if str(HERE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def command(*words):
    """The command, with the programs that the tests compiled before."""
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return [sys.executable, str(HERE / "gpu"), "--tiny", *words, *(["--programs", kept] if kept else [])]


@pytest.mark.filterwarnings("ignore")  # of other people's packages, when they are imported
@pytest.mark.parametrize("path", [*sorted((HERE / "gpu").glob("*.py")), *WORKERS, TRL], ids=lambda path: path.stem)
def test_every_import_exists(scripts, path):
    """Of measurements too, which import inside functions; a package that a GPU machine may lack may be absent here."""
    optional = scripts("outcome").OPTIONAL
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            try:
                exec(ast.unparse(node), {})
            except ModuleNotFoundError as error:
                assert error.name in optional, f"{path.name}:{node.lineno} {error}"


def test_a_call_has_its_parts_and_a_file_of_its_own(scripts):
    driver = scripts("driver")
    every = [part for call in driver.CALLS.values() for part in call.parts]
    assert driver.options([]).names == every and len(every) == len(set(every))
    for name, call in driver.CALLS.items():
        chosen = driver.options(["--call", name])
        assert chosen.names == list(call.parts) and chosen.out == HERE / f"gpu-{name}.json"
    for part in driver.PARTS.values():
        assert scripts(part.module).measurements(True, *part.arguments)


@pytest.mark.parametrize("call", [pytest.param("A", marks=pytest.mark.wide), "B", "C", "D"])
def test_a_measurement_of_each_call_agrees(scripts, call):
    part, place = CHEAP[call]
    driver, outcome = scripts("driver"), scripts("outcome")
    assert part in driver.CALLS[call].parts
    module = scripts(driver.PARTS[part].module)
    measure = [*module.measurements(True, *driver.PARTS[part].arguments).values()][place]
    figures = outcome.outcome(measure, left=1)
    assert driver.is_complete({"measurements": {"": figures}}) and "absent" not in figures, figures


def test_only_an_absent_package_excuses_a_measurement(scripts):
    driver, outcome = scripts("driver"), scripts("outcome")

    def missing(name):
        def measure():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return measure

    def is_complete(*rows):
        return driver.is_complete({"measurements": dict(enumerate(rows))})

    fine, absent = outcome.outcome(lambda: {"agrees": True}, 1), outcome.outcome(missing("vllm"), 1)
    moved = outcome.outcome(missing("bridge"), 1)  # a module of ours
    assert absent == {"absent": "vllm"} and "No module named 'bridge'" in moved["traceback"]
    assert is_complete(fine, absent) and not is_complete()
    for row in (moved, outcome.outcome(lambda: {}, 0), {"agrees": False}):
        assert not is_complete(fine, row)


def test_a_missing_measurement_is_the_exit_code(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        command("--parts", "plan", "--budget", "1", "--out", str(out)), capture_output=True, text=True
    )
    assert done.returncode == 1 and "| plan | | skipped: no time was left | |" in done.stdout, done.stderr
    assert json.loads(out.read_text())["versions"]["jax"] and "jax" in done.stdout


def test_without_a_gpu_it_is_refused(tmp_path):
    words = [word for word in command("--call", "A", "--out", str(tmp_path / "gpu.json")) if word != "--tiny"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    message = "JAX sees no GPU here; --tiny rehearses the measurements on a CPU\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.wide
def test_a_killed_driver_keeps_what_was_measured(tmp_path):
    """A part that fails before prints its traceback and does not stop the next one."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is broken')")
    out, errors = tmp_path / "gpu.json", tmp_path / "errors.txt"
    with errors.open("w") as stream:
        words = command("--parts", "handover", "kernels", "--out", str(out))
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
        driver = subprocess.Popen(words, stderr=stream, env=env)
        parts, deadline = {}, time.monotonic() + 400
        while not parts.get("kernels", {}).get("measurements") and time.monotonic() < deadline:
            parts = json.loads(out.read_text())["parts"] if out.exists() else {}
            time.sleep(0.02)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert all("torch is broken" in row["failed"] for row in parts["handover"]["measurements"].values())
    assert "Traceback" in errors.read_text() and "torch is broken" in errors.read_text()
    assert all(row["agrees"] for row in json.loads(out.read_text())["parts"]["kernels"]["measurements"].values())
    while [process for process in psutil.process_iter(["cmdline"]) if str(out) in (process.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, "the worker outlived its driver"
        time.sleep(0.1)


@pytest.mark.wide
@pytest.mark.parametrize("call", CHEAP)
def test_a_call_is_rehearsed(scripts, call, tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(command("--call", call, "--out", str(out)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert tuple(parts) == scripts("driver").CALLS[call].parts
    absent = {row.get("absent") for part in parts.values() for row in part["measurements"].values()}
    assert absent <= {None, "vllm"}
