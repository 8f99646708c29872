"""Install the wheel with one extra at a time into a fresh environment, and test it there.

    python scripts/test_install.py                                        every extra, one after the other
    python scripts/test_install.py --extra recommendation --python python3.13

Source archive and wheel are built once, the wheel from the archive. Environments are in a temporary folder and are
removed after their extra; one with torch takes 5 GB and some minutes. Python 3.11 gets the versions of
constraints.txt, other Pythons pip's choice. The script needs the standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTED = "3.11"  # with the versions in constraints.txt
ALONE, SOURCE = "none", "source"  # the wheel, and the source archive, without extras


class Check(NamedTuple):
    """A command in the environment, in a folder that is not the checkout.

    Attributes:
        command: Program of the environment and arguments.
        code: Exit code.
        says: Must be in what it prints.
        leaves: Pattern of files, of which there must be one afterwards.
    """

    command: list[str]
    code: int = 0
    says: str = ""
    leaves: str = ""


TEXT = ["--task=text", "--policy.path=miniature", "--data.prompts=prompts.txt", "--rewards=[{name: reward.py:brief}]",
        "--training.prompts_per_batch=4", "--training.max_steps=1", "--training.inner_epochs=1",
        "--sampling.group_size=2", "--sampling.max_new_tokens=4"]  # fmt: skip


def text_task(run: str, *options: str, leaves: str = "summary.json") -> Check:
    """An iteration of a text task with a reward in Python, on the miniature's policy."""
    return Check(["grpo", "train", *TEXT, f"--run_dir={run}", *options], leaves=f"{run}/{leaves}")


def refused(extra: str, *options: str) -> Check:
    """A command that needs what is not installed."""
    return Check(["grpo", "train", "--run_dir=refused", *options], code=2, says=f'run pip install "grpo_jax[{extra}]"')


def absent(module: str) -> Check:
    """That a module is not there."""
    return Check(["python", "-c", f"import importlib.util; assert importlib.util.find_spec({module!r}) is None"])


REWRITE = "from grpo_jax.predict import load_rewriter; print('wrote', load_rewriter('run')('a huge crimson disc'))"
CHECKS = {
    ALONE: [
        absent("torch"),
        Check(["python", "-c", "import grpo_jax"]),
        Check(["grpo", "--version"], says="0."),
        Check(["grpo", "train", "--help"], says="--policy.path"),
        text_task("run"),
        Check(["grpo", "evaluate", "--run", "run"], says="held-out prompts"),
        Check(["grpo", "export", "--run", "run", "--out", "out"], leaves="out/model.safetensors"),
        Check(["python", "-c", REWRITE], says="wrote"),
        refused("diffusion"),
        refused("diffusion", "--plan"),
        refused("recommendation", "--config=recommendation_quick"),
        refused("environments", *TEXT, "--data.prompts=reasoning_gym:gcd"),
        refused("quantised", *TEXT, "--policy.lora.rank=2", "--policy.quantised=int8"),
    ],
    SOURCE: [Check(["grpo", "--version"], says="0."), text_task("run")],
    "cartpole": [
        absent("torch"),
        Check(["grpo", "cartpole", "--iterations=10", "--out=out"], says="of 10 solved", leaves="out/metrics.jsonl"),
    ],
    "logging": [
        text_task("events", leaves="tensorboard/events*"),
        text_task("wandb", "--report_to=[wandb]", leaves="wandb/offline-run*"),
    ],
    "demo": [
        text_task("run"),
        Check(["grpo", "demo", "--run=run", "--checkpoint=99"], code=2, says="no checkpoint"),
        Check(["python", "-c", "import gradio"]),
    ],
    "quantised": [
        text_task("run", "--policy.lora.rank=2", "--policy.quantised=int8", leaves="adapter/*.safetensors"),
    ],
    "ray": [
        text_task("run", "--judges.brief=function", "--judges.brief.name=reward.py:brief",
                  "--judges.brief.pool.replicas=2", "--rewards=[{name: brief}]"),
    ],
    "environments": [
        text_task("run", "--data.prompts=reasoning_gym:gcd?size=20", "--rewards=grpo_jax.rewards:reasoning_gym"),
    ],
    "recommendation": [
        Check(
            ["grpo", "train", "--config=recommendation_quick", "--sft.steps=10", "--training.max_steps=2",
             "--run_dir=run"],
            says="policy, after",
            leaves="run/summary.json",
        ),
    ],
    "diffusion": [
        Check(
            ["grpo", "train", "--training.max_steps=1", "--training.inner_epochs=1", "--evaluation.prompts=8",
             "--evaluation.validation_prompts=8", "--run_dir=run"],
            says="pixel_accuracy",
            leaves="run/images/*",
        ),
        Check(["grpo", "evaluate", "--run", "run"], says="pixel_accuracy"),
        Check(["python", "-c", REWRITE], says="wrote"),
        Check(["grpo", "train", "--plan", "--device_memory_gib=80,80,80"], says="fits"),
    ],
    "targets": [
        text_task("run"),
        Check(["grpo", "plan", *TEXT, "--target=h100"], says="It fits."),
        Check(["grpo", "plan", *TEXT, "--target=v5e"], says="It fits."),
    ],
    "cuda12": [Check(["python", "-c", "import grpo_jax, jax, jax_cuda12_plugin; print(jax.devices())"], says="Device")],
    "cuda13": [Check(["python", "-c", "import grpo_jax, jax, jax_cuda13_plugin; print(jax.devices())"], says="Device")],
}  # fmt: skip


def call(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs a command in a folder: exit code, and all that it printed."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=environment, **output)
    return done.returncode, done.stdout


def environment(python: str, folder: Path, *wanted: str) -> tuple[Path, str]:
    """Makes an environment with some packages.

    Returns:
        Its programs' folder, and "" or what went wrong.
    """
    bin_folder = folder / "environment" / "bin"
    code, told = call([python, "-m", "venv", "environment"], folder)
    if code == 0:
        pip = [str(bin_folder / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        code, told = call([*pip, "install", *wanted], folder)
    return bin_folder, told if code else ""


def build(python: str, folder: Path) -> str:
    """Builds the checkout's source archive, and the wheel from it, into folder/dist; "" or what went wrong."""
    bin_folder, wrong = environment(python, folder, "build")
    if wrong:
        return wrong
    code, told = call([str(bin_folder / "python"), "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)], folder)
    return told if code else ""


def verdict(check: Check, bin_folder: Path, folder: Path) -> str:
    """Runs a check; "" or what went wrong."""
    hidden = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = hidden | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    program, *arguments = check.command
    code, told = call([str(bin_folder / program), *arguments], folder, environment)
    if code != check.code or (code and "Traceback" in told):
        return f"exit code {code}, expected {check.code}\n{told}"
    if check.says not in told:
        return f"it does not say {check.says!r}\n{told}"
    if check.leaves and not list(folder.glob(check.leaves)):
        return f"it leaves no {check.leaves}\n{told}"
    return ""


def test(extra: str, python: str, constraints: Path | None, archives: Path) -> bool:
    """Installs an extra and runs its checks, a line for each; whether all went well."""
    (archive,) = archives.glob("*.tar.gz" if extra == SOURCE else "*.whl")
    name = "grpo_jax" if extra in (ALONE, SOURCE) else f"grpo_jax[{extra}]"
    limits = [] if constraints is None else ["--constraint", str(constraints)]
    folder = Path(tempfile.mkdtemp(prefix=f"grpo_jax_{extra}_"))
    work = folder / "work"
    work.mkdir()
    (work / "reward.py").write_text("def brief(completions):\n    return [-len(text) for text in completions]\n")
    (work / "prompts.txt").write_text("".join(f"a tree on hill {i}\n" for i in range(24)))
    try:
        started = time.monotonic()
        bin_folder, wrong = environment(python, folder, *limits, f"{name} @ {archive.as_uri()}")
        fine = tell(f"{extra}: installed", wrong, started)
        for check in CHECKS[extra] if fine else ():
            started = time.monotonic()
            wrong = verdict(check, bin_folder, work)
            fine = tell(f"{extra}: {' '.join(check.command)}", wrong, started) and fine
        return fine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tell(what: str, wrong: str, started: float) -> bool:
    """Prints how it went, and what went wrong; whether nothing did."""
    print(f"{'FAILED' if wrong else 'ok':<7}{time.monotonic() - started:4.0f} s  {what}\n{wrong[-4000:]}", end="")
    sys.stdout.flush()
    return not wrong


def main() -> int:
    """The command: 0 if every extra installs and does what is promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extra", action="append", choices=list(CHECKS), help="one; may be given again (default: all)")
    parser.add_argument("--python", default=sys.executable, help="of the environments (%(default)s)")
    parser.add_argument("--constraints", help=f"file, or none (default: constraints.txt on Python {TESTED})")
    options = parser.parse_args()
    chosen = options.constraints
    if chosen is None:
        code, told = call([options.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], ROOT)
        chosen = "constraints.txt" if (code, told.strip()) == (0, TESTED) else "none"
    constraints = None if chosen == "none" else (ROOT / chosen).resolve()
    with tempfile.TemporaryDirectory(prefix="grpo_jax_build_") as folder:
        started = time.monotonic()
        if not tell("source archive and wheel: built", build(options.python, Path(folder)), started):
            return 1
        archives = Path(folder) / "dist"
        fine = [test(extra, options.python, constraints, archives) for extra in options.extra or CHECKS]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
