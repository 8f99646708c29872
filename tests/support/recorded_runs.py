"""Record the first iterations of runs that take all paths, to compare two versions of the code.

    PYTHONPATH=tests python -m support.recorded_runs record before.json [NAME …]
    PYTHONPATH=tests python -m support.recorded_runs compare before.json after.json

A record holds the metrics of each iteration without timings, the held-out measures, digest and norm of each array of
the final checkpoint, or of CartPole's parameters. `compare` says which runs are equal bit for bit, which within 1e-6,
and what differs.
"""

import hashlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml
from support.text_task import ROOT, make_place, rows

TOLERANCE = 1e-6
SHORT = ["--report_to", "[]", "--training.save_every", "0"]
TWO = [*SHORT, "--training.max_steps", "2", "--evaluation.every", "2"]
FEW = ["--evaluation.prompts", "16", "--evaluation.validation_prompts", "16", "--training.prompts_per_batch", "8"]
SMALL = [*TWO, *FEW]
TEXT: dict[str, list[str]] = {
    "text": [],
    "text_lora": ["--policy.lora.rank", "4"],
    # Completions that end early share rows.
    "text_packing": [
        *("--sampling.max_new_tokens", "96", "--sampling.stop", "[a, b, c, d, e, f, g, h]"),
        *("--training.grad_accumulation_steps", "2", "--training.minibatches", "1"),
    ],
    "text_kl": ["--algorithm.kl_coef", "0.1", "--algorithm.update_ref_every", "1", "--training.inner_epochs", "2"],
}
RUNS: dict[str, list[str]] = {
    "default": ["--config", "prompt_enhancement_miniature", *SMALL],
    "scenes": ["--config", "prompt_enhancement_scenes", *SMALL],
    "ppo": ["--config", "prompt_enhancement_ppo", *SMALL],
    "refinement": ["--config", "prompt_refinement_miniature", *SMALL],
    "recommendation_quick": ["--config", "recommendation_quick", "--algorithm.kl_coef", "0.05", *SMALL],
    "recommendation_dummy": ["--config", "recommendation_dummy", *SMALL],
    **{f"cartpole_{name}": ["--algorithm", name, "--iterations", "10"] for name in ("grpo", "ppo", "gdpo")},
    **TEXT,
}


def text_config(folder: Path) -> Path:
    """Write the tests' tiny policy, prompts and rewards, and a config of plain GRPO that names them."""
    place = make_place(folder, layers=2)
    values = yaml.safe_load(place.config.read_text()) | {"algorithm": {}, "evaluation": {"samples": 0}}
    values["policy"]["remat"] = "products"
    values["training"] = {"prompts_per_batch": 4, "minibatches": 2}
    place.config.write_text(yaml.safe_dump(values))
    return place.config


def weights_of(run: Path) -> dict[str, dict[str, object]]:
    """Return digest and Euclidean norm of every array of the run's final checkpoint, or of its parameters/."""
    import jax
    import orbax.checkpoint as ocp

    checkpointer = ocp.PyTreeCheckpointer()
    final = run / "checkpoints" / "final"
    final = next(final.glob("version_*"), final).resolve()  # where it lay before it became a link
    arrays = {}
    parts = {"": run / "parameters"} if (run / "parameters").is_dir() else {}
    for part, folder in (parts or {name: final / name for name in ("variables", "training")}).items():
        folder = folder.absolute()
        saved = checkpointer.metadata(folder).item_metadata.tree
        # As NumPy's: a run on several devices is read back on one.
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        tree = checkpointer.restore(folder, restore_args=as_numpy)
        for name, array in _leaves({part: tree} if part else tree).items():
            array = np.asarray(array)
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            arrays[name] = {"digest": digest, "norm": float(np.linalg.norm(array.astype(np.float64).ravel()))}
    return arrays


def _leaves(tree) -> dict[str, object]:
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def record(names: list[str]) -> dict[str, dict]:
    """Run each command and return what it computed."""
    records = {}
    with tempfile.TemporaryDirectory() as place:
        config = None
        for name in names:
            if name in TEXT and config is None:
                config = text_config(Path(place))
            arguments = ["--config", str(config), *TWO, *TEXT[name]] if name in TEXT else RUNS[name]
            run = Path(place) / name
            command = [sys.executable, "-m", "grpo_jax.train", *arguments, "--run_dir", str(run)]
            if name.startswith("cartpole"):
                command = [sys.executable, "-m", "grpo_jax.cartpole", *arguments, "--out", str(run)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: {' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
            metrics = rows(run)
            summary, measures = run / "summary.json", done.stdout.splitlines()[-3:]
            if summary.exists():
                measures = json.loads(summary.read_text())["evaluation"]
            records[name] = {"metrics": metrics, "evaluation": measures, "weights": weights_of(run)}
            print(f"{name}: {len(metrics)} rows, {len(records[name]['weights'])} arrays", flush=True)
    return records


def differences(before, after) -> list[tuple[str, float]]:
    """Return (path, relative difference) of every value that is not equal; inf where one side lacks it."""
    old, new = _leaves(before), _leaves(after)
    found = []
    for path in sorted(old.keys() | new.keys()):
        a, b = old.get(path), new.get(path)
        if a == b or (a != a and b != b):  # NaN is itself here
            continue
        number = isinstance(a, float) and isinstance(b, float)
        bits = path.endswith(".digest") and a and b  # how far apart they are the norm says
        found.append((path, abs(a - b) / max(abs(a), abs(b), 1e-30) if number else 0.0 if bits else math.inf))
    return found


def compare(before: Mapping[str, dict], after: Mapping[str, dict]) -> bool:
    """Print how each run compares; True if none differs by more than the tolerance."""
    sound = True
    for name in before:
        if name not in after:
            print(f"{name}: not recorded again")
            sound = False
            continue
        found = sorted(differences(before[name], after[name]), key=lambda item: -item[1])
        if not found:
            print(f"{name}: equal bit for bit")
            continue
        largest = found[0][1]
        sound = sound and largest <= TOLERANCE
        print(f"{name}: {len(found)} values differ, the most by {largest:.2g} (relative)")
        for path, difference in found[:8]:
            print(f"    {path}: {difference:.2g}")
    return sound


def main(arguments: list[str]) -> int:
    """Record or compare, as the module's docstring says."""
    match arguments:
        case ["record", file, *names]:
            Path(file).write_text(json.dumps(record(names or list(RUNS)), indent=1))
            return 0
        case ["compare", before, after]:
            return 0 if compare(*(json.loads(Path(file).read_text()) for file in (before, after))) else 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
