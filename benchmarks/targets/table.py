"""What devices that are not here hold: policies, methods and lengths, compiled for them and not run.

    python benchmarks/targets/table.py [--targets h100 v5e] [--sizes 0.5B 1.5B 7B] [--methods all lora int8]
        [--lengths 256 1024 4096] [--scaling [--layers 2]] [--output benchmarks/targets/table.json]

Needs `grpo_jax[targets]`. Every cell is one plan (`grpo_jax.planning`) of 8 prompts of 256 tokens with 8 completions
each, one prompt to a micro-batch, layers computed again, bfloat16. What the file holds is not compiled again, so
that a run that was stopped goes on; a policy whose weights and moments alone are too much is not compiled at all.
--scaling compiles large policies over many H100s instead, and lists their collectives. Prints the tables of the file.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from launches import Step, moved_bytes, parse_program, program_sizes, read_program, steps
from replica_groups import replica_groups

from grpo_jax.config.run import Config, make_config
from grpo_jax.models.families import ModelConfig, read_config
from grpo_jax.models.sharding import make_mesh
from grpo_jax.planning.cards import FREE, RUNTIME, plan_policy
from grpo_jax.planning.policy import held_memory
from grpo_jax.planning.programs import compile_program, read_memory, run_programs
from grpo_jax.planning.targets import Target, open_devices, parse_target, prepare
from grpo_jax.planning.work import count_work
from grpo_jax.training.memory import GIB, state_shapes

Cell = dict[str, Any]
PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 256
SIZES = {  # Qwen2.5's, and Llama 3's of 70 B: width, MLP, layers, heads, key heads, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "70B": (8192, 28672, 80, 64, 8, 128256, False),
}
METHODS: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"frozen_dtype": "bfloat16", "lora": {"rank": 16}},
    "int8": {"frozen_dtype": "bfloat16", "lora": {"rank": 16}, "quantised": "int8"},
}
LENGTHS = (256, 1024, 4096)
SCALING = {"7B": ("h100:8", 4, 2), "32B": ("h100:4x8", 8, 4), "70B": ("h100:8x8", 16, 4)}
"""Policy: target, fsdp, tensor."""
COLUMNS = {"h100": {"H100": 79.1, "A100": 79.3, "24 GiB": 24.0}, "v5e": {"v5e": 16.0}}
"""By the target compiled for, the devices whose memory its figure is compared with."""
NVLINK, NETWORK = 450e9, 50e9
"""Bytes a second that an H100 sends: NVLink 4 in one direction, and a 400 Gb/s port of its own."""


def model_of(size: str, depth: int | None = None) -> ModelConfig:
    """The shape of a policy, or of so many of its layers."""
    width, inner, whole, heads, kv_heads, vocabulary, tied = SIZES[size]
    layers = depth or whole
    fields = {"model_type": "qwen2", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return read_config(fields | heads_of | {"vocab_size": vocabulary, "tie_word_embeddings": tied})


def configured(method: str, length: int, fsdp: int = 1, tensor: int = 1) -> Config:
    """A run on texts; over a mesh each of its parts has one prompt of a micro-batch."""
    policy = {"path": "policy", "compute_dtype": "bfloat16", "remat": "layer", "mesh": {"fsdp": fsdp, "tensor": tensor}}
    prompts = math.lcm(PROMPTS, fsdp)
    return make_config(
        task="text",
        policy=policy | METHODS[method],
        data={"max_prompt_tokens": PROMPT_TOKENS},
        sampling={"group_size": GROUP, "max_new_tokens": length},
        training={"prompts_per_batch": prompts, "accumulation": prompts // fsdp},
    )


def plan_cell(size: str, method: str, length: int, target: Target) -> Cell:
    """The peak of one device in bytes, and the seconds of this machine that compiling took."""
    config, model = configured(method, length), model_of(size)
    held = held_memory(config, state_shapes(config, model, None)).held
    if held + RUNTIME > (1 - FREE) * target.kind.memory:
        return {"held": held, "peak": None}
    start = time.process_time()
    memory, reports = plan_policy(config, model, None, target)
    programs = {name: report.peak_bytes for name, report in reports.items()}
    return {
        "held": held,
        "peak": memory.peak + RUNTIME,
        "programs": programs,
        "seconds": time.process_time() - start,
    }


class Move(NamedTuple):
    """A kind of collective of one shape: its bytes in a run, how often it runs, and whether it leaves a host."""

    kind: str
    shape: str
    bytes: int
    count: int
    crosses: bool


def spread_cell(size: str, depth: int | None, length: int, target: Target, fsdp: int, tensor: int) -> Cell:
    """Each program over a mesh: its memory on one device and its collectives, the largest first."""
    config, model = configured("all", length, fsdp, tensor), model_of(size, depth)
    devices = open_devices(target)
    mesh = make_mesh(fsdp, tensor, devices)
    programs = run_programs(config, model, mesh, None, target.platform)
    sizes = program_sizes(config, model, mesh)
    found: Cell = {"target": str(target), "mesh": [fsdp, tensor], "length": length, "layers": model.num_layers}
    found["programs"] = {}
    for name in ("sample", "update"):
        start = time.process_time()
        compiled = compile_program(programs[name], target, devices[0])
        report = read_memory(compiled, count_work(programs[name], mesh.size))
        reading = read_program(compiled, sizes._replace(turns=programs[name].turns))
        moves = collectives(compiled.as_text() or "", programs[name].turns, target)
        found["programs"][name] = {
            "argument_bytes": report.argument_bytes,
            "peak_bytes": report.peak_bytes,
            "bound_seconds": report.bound_seconds(target),
            "kernels": reading.kernels,
            "weight_copies": reading.weight_copies,
            "cache_copies": reading.cache_copies,
            "nvlink_seconds": sum(move.bytes for move in moves if not move.crosses) / NVLINK,
            "network_seconds": sum(move.bytes for move in moves if move.crosses) / NETWORK,
            "collectives": [move._asdict() for move in moves],
            "seconds": time.process_time() - start,
        }
    return found


def collectives(text: str, turns: int, target: Target) -> list[Move]:
    """A program's collectives by kind, shape and reach."""
    computations, entry = parse_program(text)
    count: Counter[tuple[str, str, bool]] = Counter()
    size: Counter[tuple[str, str, bool]] = Counter()
    for step in steps(computations, entry, turns):
        kind = step.instruction.opcode.removesuffix("-start")
        if re.fullmatch(r"all-(reduce|gather|to-all)|reduce-scatter|collective-permute", kind):
            key = kind, _shape(step), _crosses(step.instruction.attributes, target)
            count[key] += step.times
            size[key] += step.times * moved_bytes(step.instruction)
    return [Move(*key[:2], size[key], count[key], key[2]) for key, _ in size.most_common()]


def _shape(step: Step) -> str:
    array = max(step.instruction.arrays, key=lambda array: array.bytes)  # gathered, or before it is scattered
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _crosses(attributes: str, target: Target) -> bool:
    """Whether a group of a collective has devices of several hosts."""
    groups = replica_groups(attributes, target.count)
    return any(len({device // target.devices for device in group}) > 1 for group in groups)


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


def spread_table(cells: dict[str, Cell]) -> str:
    """The cells of --scaling as Markdown, a row for each program."""
    lines = [
        "| policy, target, mesh | program | arguments, GiB | peak, GiB | collectives, GiB | of them across hosts "
        "| bound: card, s | NVLink, s | network, s |",
        "|" + "---|" * 9,
    ]
    for size, cell in cells.items():
        for name, program in cell["programs"].items():
            moves = program["collectives"]
            total, across = (sum(move["bytes"] for move in moves if move["crosses"] >= far) for far in (False, True))
            numbers = [program["argument_bytes"] / GIB, program["peak_bytes"] / GIB, total / GIB, across / GIB]
            numbers += [program[f"{bound}_seconds"] for bound in ("bound", "nvlink", "network")]
            label = f"{size} ({cell['layers']} layers), {cell['target']}, {cell['mesh'][0]} x {cell['mesh'][1]}"
            lines.append(f"| {label} | {name} | {' | '.join(f'{number:.2f}' for number in numbers)} |")
    return "\n".join(lines)


def main() -> None:
    """Compile the cells that the file lacks; print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--layers", type=int, help="with --scaling, of each policy; decoding compiles each by itself")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    chosen = parser.parse_args()
    prepare()
    found = json.loads(chosen.output.read_text()) if chosen.output.is_file() else {"cells": {}, "scaling": {}}
    found["versions"] = {name: version(name) for name in ("jax", "jaxlib")}

    def keep(kind: str, key: str, cell: Cell) -> None:
        found[kind][key] = cell
        chosen.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(key, f"{cell.get('seconds', 0):.0f} s", flush=True)

    if chosen.scaling:
        for size in chosen.sizes or SCALING:
            text, fsdp, tensor = SCALING[size]
            if size not in found["scaling"]:
                cell = spread_cell(size, chosen.layers, chosen.lengths[0], parse_target(text), fsdp, tensor)
                keep("scaling", size, cell)
    else:
        for target in chosen.targets:
            for size in chosen.sizes or list(SIZES)[:3]:
                for method in chosen.methods:
                    for length in chosen.lengths:
                        key = f"{size} {method} {length} {target}"
                        if key not in found["cells"]:
                            keep("cells", key, plan_cell(size, method, length, parse_target(target)))
    tables = {"cells": table, "scaling": spread_table}
    print(*(made(found[kind]) for kind, made in tables.items() if found[kind]), sep="\n\n")


if __name__ == "__main__":
    main()
