"""Memory of policies, methods and lengths on absent devices, compiled for them and not run.

    python benchmarks/targets/table.py [--targets h100 v5e] [--sizes 0.5B 1.5B 7B] [--methods all lora int8]
        [--lengths 256 1024 4096] [--output benchmarks/targets/table.json]

Needs `grpo_jax[targets]`. Every cell is one plan (`grpo_jax.planning`) of 8 prompts of 256 tokens with 8 completions
each, one prompt to a micro-batch, layers computed again, bfloat16. Cells in the file are not compiled again,
so a stopped run continues; a policy whose weights and moments alone are too much is not compiled at all.
Prints the file's table; the file also has each program's kernels and copies.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launches import program_sizes, read_program

from grpo_jax.config.run import Config, make_config
from grpo_jax.models.architectures import ModelConfig, read_model_config
from grpo_jax.planning import GIB
from grpo_jax.planning.memory import FREE, RUNTIME, held_memory
from grpo_jax.planning.programs import compile_program, count_work, read_memory, run_programs, state_shapes
from grpo_jax.planning.targets import Target, open_devices, parse_target, prepare

Cell = dict[str, Any]
PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 256
SIZES = {  # Qwen2.5's: width, MLP, layers, heads, key heads, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
METHODS: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"frozen_dtype": "bfloat16", "lora": {"rank": 16}},
    "int8": {"frozen_dtype": "bfloat16", "lora": {"rank": 16}, "quantised": "int8"},
}
LENGTHS = (256, 1024, 4096)
COLUMNS = {"h100": {"H100": 79.1, "A100": 79.3, "24 GiB": 24.0}, "v5e": {"v5e": 16.0}}
"""By the target compiled for, the devices whose memory its figure is compared with."""


def model_of(size: str) -> ModelConfig:
    """The shape of a policy."""
    width, inner, layers, heads, kv_heads, vocabulary, tied = SIZES[size]
    fields = {"model_type": "qwen2", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return read_model_config(fields | heads_of | {"vocab_size": vocabulary, "tie_word_embeddings": tied})


def configured(method: str, length: int) -> Config:
    """A run on texts, one prompt to a micro-batch."""
    policy = {"path": "policy", "compute_dtype": "bfloat16", "remat": "layer"}
    return make_config(
        task="text",
        policy=policy | METHODS[method],
        data={"max_prompt_tokens": PROMPT_TOKENS},
        sampling={"group_size": GROUP, "max_new_tokens": length},
        training={"prompts_per_batch": PROMPTS, "grad_accumulation_steps": PROMPTS},
    )


def plan_cell(size: str, method: str, length: int, target: Target) -> Cell:
    """The peak of one device in bytes, each program's kernels and copies, and the seconds that compiling took."""
    config, model = configured(method, length), model_of(size)
    held = held_memory(config, state_shapes(config, model, None)).held
    if held + RUNTIME > (1 - FREE) * target.kind.memory:
        return {"held": held, "peak": None}
    start, sizes, device = time.process_time(), program_sizes(config, model, None), open_devices(target)[0]
    programs: dict[str, Cell] = {}
    for name, program in run_programs(config, model, None, None, target.platform).items():
        compiled = compile_program(program, target, device)
        report = read_memory(compiled, count_work(program))
        reading = read_program(compiled, sizes._replace(turns=program.turns))
        memory = {"peak": report.peak_bytes, "working": report.working_bytes}
        programs[name] = memory | {"bound_seconds": report.bound_seconds(target)} | reading._asdict()
    peak = held + max(program["working"] for program in programs.values()) + RUNTIME
    return {"held": held, "peak": peak, "programs": programs, "seconds": time.process_time() - start}


def table(cells: dict[str, Cell]) -> str:
    """The cells as Markdown, a row for each policy, method and length."""
    compiled = [target for target in COLUMNS if any(key.endswith(f" {target}") for key in cells)]
    columns = [(target, name, room) for target in compiled for name, room in COLUMNS[target].items()]
    rows = dict.fromkeys(key.rsplit(" ", 1)[0] for key in cells)
    peaks_of = [f"peak on {target}, GiB" for target in compiled]
    heads = ["policy", "method", "tokens", *peaks_of, *(name for _, name, _ in columns)]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in sorted(rows, key=_order):
        peaks = {target: _peak(cells.get(f"{row} {target}")) for target in compiled}
        verdicts = [_verdict(cells.get(f"{row} {target}"), room) for target, _, room in columns]
        lines.append(f"| {' | '.join([*row.split(), *peaks.values(), *verdicts])} |")
    return "\n".join(lines)


def _order(row: str) -> tuple[int, int, int]:
    size, method, length = row.split()
    return list(SIZES).index(size), list(METHODS).index(method), int(length)


def _peak(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"> {cell['held'] / GIB:.1f}" if cell["peak"] is None else f"{cell['peak'] / GIB:.1f}"


def _verdict(cell: Cell | None, room: float) -> str:
    if cell is None:
        return ""
    fits = cell["peak"] is not None and cell["peak"] <= (1 - FREE) * room * GIB
    return "fits" if fits else "no"


def main() -> None:
    """Compile the cells that the file lacks; print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    chosen = parser.parse_args()
    prepare()
    found = json.loads(chosen.output.read_text()) if chosen.output.is_file() else {"cells": {}}
    found["versions"] = {name: version(name) for name in ("jax", "jaxlib")}
    for target in chosen.targets:
        for size in chosen.sizes:
            for method in chosen.methods:
                for length in chosen.lengths:
                    key = f"{size} {method} {length} {target}"
                    if key in found["cells"]:
                        continue
                    found["cells"][key] = cell = plan_cell(size, method, length, parse_target(target))
                    chosen.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                    print(key, f"{cell.get('seconds', 0):.0f} s", flush=True)
    print(table(found["cells"]))


if __name__ == "__main__":
    main()
