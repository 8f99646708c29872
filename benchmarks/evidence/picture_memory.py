"""Temporary memory of an update whose prompts hold a picture, as XLA assigns it; nothing is run.

    python benchmarks/evidence/picture_memory.py [--case pictures] [--json FILE]

The shape is that of `grpo_iteration.py --cases pictures`: 4 prompts, each a picture of 448 x 448 (256 tokens) and 32
tokens of text, 32 new tokens, a Qwen2-VL of width 256. Compiled are the updates of `python -m grpo_jax.train`, by size
of the group, with the tower frozen (its states are arguments of the update) and trained (they are computed in it, and
gradients go through them), and with the same number of tokens as text alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpo_iteration
import iteration_work as work

from grpo_jax import make_config
from grpo_jax.models.families import read_config
from grpo_jax.training.memory import Shown, update_bytes

GROUPS = (4, 8, 16)
MIB = 2**20


def measured(case: work.Case, model: Any, group: int, *, vision: str, remat: str, shown: bool) -> int:
    """Temporary bytes of one update of the case with another size of group."""
    patches = (case.picture // 14) ** 2
    config = make_config(
        task="text",
        policy={"vision": vision, "remat": remat},
        data={"max_prompt_tokens": case.prompt_tokens + patches // 4},
        sampling={"group_size": group, "max_new_tokens": case.new_tokens},
        algorithm={"advantage": "grpo", "kl_coef": work.KL_COEF},
        training={"prompts_per_batch": case.prompts, "max_steps": 1},
    )
    return update_bytes(config, model, None, Shown(1, 0, patches) if shown else None)


def measure(case: work.Case, groups: tuple[int, ...] = GROUPS) -> list[dict[str, Any]]:
    """A row for each size of group and `policy.remat`."""
    with tempfile.TemporaryDirectory() as root:
        model = read_config(json.loads((grpo_iteration.make_folder(case, Path(root)) / "config.json").read_text()))
    rows = []
    for remat in ("products", "layer"):
        for group in groups:
            kinds = {"text": ("frozen", False), "frozen": ("frozen", True), "trained": ("train", True)}
            found = {
                name: measured(case, model, group, vision=vision, remat=remat, shown=shown)
                for name, (vision, shown) in kinds.items()
            }
            rows.append({"remat": remat, "group": group, **found})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, in MiB."""
    lines = ["| remat | G | the same tokens as text | tower frozen | tower trained |", "|---|---|---|---|---|"]
    for row in rows:
        cells = " | ".join(f"{row[name] / MIB:,.0f}" for name in ("text", "frozen", "trained"))
        lines.append(f"| {row['remat']} | {row['group']} | {cells} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case", choices=[name for name, case in work.CASES.items() if case.picture], default="pictures"
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args(arguments)
    rows = measure(work.CASES[options.case])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
