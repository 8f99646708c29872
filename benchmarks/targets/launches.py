"""Kernels and copies of a compiled program, read from XLA's optimised text.

A loop counts once per iteration: XLA writes down known numbers, and decoding has one iteration per token.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import jax

from grpo_jax.config.run import Config
from grpo_jax.models.architectures import ModelConfig
from grpo_jax.models.decoder import unstack_and_fuse
from grpo_jax.planning.programs import state_shapes, tree_bytes
from grpo_jax.sampling.decoding import cache_sizes
from grpo_jax.sampling.sampler import bucket_size

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_FREE |= {"opt-barrier", "add-dependency", "async-update"}
_VIEWS = {"reshape", "bitcast", "broadcast"}
_MOVES = {"copy", "transpose", "convert", "slice", "dynamic-slice", "concatenate", "pad"}
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16}
_BITS |= {"f32": 32, "s32": 32, "u32": 32, "f64": 64, "s64": 64, "u64": 64, "c64": 64, "token": 0}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_ON_CHIP = "S(1)"  # a TPU's memory beside its products
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ", re.MULTILINE)
_SMALLEST = 2**14  # elements of a matrix whose copies are counted
_LAYER = re.compile(r"/layers?_?\d*[/.]")


class Array(NamedTuple):
    """An array's shape in a program."""

    dtype: str
    shape: tuple[int, ...]
    on_chip: bool = False

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes that it takes of the device's memory; none on the chip itself."""
        if self.on_chip:
            return 0
        return self.size * _BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 32) // 8


class Instruction(NamedTuple):
    """A line of a computation; `attributes` is what stands behind its operands."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """The bytes of its result."""
        return sum(array.bytes for array in self.arrays)

    def called(self, *names: str) -> list[str]:
        """Return the computations that an attribute of one of these names calls."""
        found = []
        for name in names:
            for listed in re.findall(rf"\b{name}=\{{?((?:%[\w.\-]+(?:, )?)+)", self.attributes):
                found += re.findall(r"%([\w.\-]+)", listed)
        return found


Computation = dict[str, Instruction]


class Reading(NamedTuple):
    """The launches of one run of a program.

    Attributes:
        kernels: Launches, those of loops counted turn by turn.
        layer_kernels: Those of one layer: in each token of decoding, or of its forward and backward pass.
        weight_copies: Copies, transposes and casts of an array as large as a weight matrix in a turn of a loop.
        cache_copies: The same of an array as large as a layer's keys or values.
    """

    kernels: int
    layer_kernels: float
    weight_copies: int
    cache_copies: int


class Sizes(NamedTuple):
    """Sizes to find: numbers of elements of weight matrices and of a layer's caches, layers, decoding iterations."""

    weights: frozenset[int]
    caches: frozenset[int]
    layers: int
    turns: int = 0


def parse_program(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of optimised HLO by name, and the name of the entry."""
    text = re.sub(r"/\*index=\d+\*/", "", text)
    computations: dict[str, Computation] = {}
    entry = ""
    headers = list(_HEADER.finditer(text))
    for header in headers:
        body = text[header.end() : text.index("\n}", header.end()) + 1]
        starts = list(_INSTRUCTION.finditer(body))
        ends = [*(start.start() for start in starts[1:]), len(body)]
        lines = (_parse(start, body[start.end() : end]) for start, end in zip(starts, ends, strict=True))
        computations[header[2]] = {line.name: line for line in lines}
        entry = header[2] if header[1] else entry
    return computations, entry


def _parse(start: re.Match[str], line: str) -> Instruction:
    end = _closing(line, 0) if line.startswith("(") else line.index(" ")
    kind, rest = line[:end], line[end:].strip()
    opcode = rest[: rest.index("(")]
    close = _closing(rest, len(opcode))
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[len(opcode) : close]))
    arrays = tuple(
        Array(dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size), _ON_CHIP in layout)
        for dtype, sizes, layout in _ARRAY.findall(kind)
    )
    if opcode in ("parameter", "constant"):
        rest = f"{rest[len(opcode) : close]}{rest[close:]}"
        return Instruction(start[2], arrays, opcode, (), rest, bool(start[1]))
    return Instruction(start[2], arrays, opcode, operands, rest[close:], bool(start[1]))


def _closing(text: str, start: int) -> int:
    """Return the place behind the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"a parenthesis stays open in {text[:80]!r}")


class Loop(NamedTuple):
    """A loop that an instruction lies in, and its turns; `tokens` where XLA does not know how many these are."""

    name: str
    turns: int
    tokens: bool


class Step(NamedTuple):
    """An instruction that is a kernel, its computation, and the loops around it, from without."""

    instruction: Instruction
    computation: Computation
    loops: tuple[Loop, ...]

    @property
    def times(self) -> int:
        """How often it runs."""
        return math.prod(loop.turns for loop in self.loops)

    def inside(self, loop: int) -> int:
        """How often it runs in one turn of one of its loops, by place."""
        return math.prod(inner.turns for inner in self.loops[loop + 1 :])


def steps(computations: Mapping[str, Computation], entry: str, turns: int = 0) -> list[Step]:
    """Return the launches of a run of the program.

    The loops of unknown length write `turns` tokens together, one for each size of the cache; those over fewer rows,
    which go on where half of the prompts are done, do not turn.
    """
    listed: list[Step] = []

    def walk(name: str, loops: tuple[Loop, ...]) -> None:
        computation = computations[name]
        for line in computation.values():
            if line.opcode in _FREE or line.opcode.endswith("-done"):
                continue
            if line.opcode == "while":
                known = _known_turns(line, computations)
                count = token_turns[line.name] if known is None else known
                for called in line.called("body", "condition"):
                    walk(called, (*loops, Loop(line.name, count, known is None)))
            elif line.opcode == "conditional":
                branches = line.called("branch_computations", "true_computation", "false_computation")
                walk(max(branches, key=lambda branch: len(computations[branch])), loops)
            elif line.opcode in ("call", "async-start"):
                for called in line.called("to_apply", "calls"):
                    walk(called, loops)
            else:
                listed.append(Step(line, computation, loops))

    token_turns = _token_turns(computations, turns)
    walk(entry, ())
    return listed


def _known_turns(line: Instruction, computations: Mapping[str, Computation]) -> int | None:
    """Return how often a loop turns: as XLA wrote down, or as far as it counts; None where that is not known."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.attributes)
    if known:
        return int(known[1])
    condition = computations[line.called("condition")[0]]
    if {inner.opcode for inner in condition.values()} - {"parameter", "get-tuple-element", "constant", "compare"}:
        return None
    constants = [inner.attributes for inner in condition.values() if inner.opcode == "constant"]
    limits = [int(found[1]) for found in (re.match(r"\((\d+)\)", text) for text in constants) if found]
    return limits[0] if len(limits) == 1 and "direction=LT" in str(condition) else None


def _token_turns(computations: Mapping[str, Computation], turns: int) -> dict[str, int]:
    """Return how often each loop of unknown length turns."""
    rows = {}
    for computation in computations.values():
        for line in computation.values():
            if line.opcode == "while" and _known_turns(line, computations) is None:
                rows[line.name] = next((array.size for array in line.arrays if array.dtype == "pred"), 0)
    full = [name for name, size in rows.items() if size == max(rows.values())]
    return {name: -(-turns // len(full)) if name in full and turns else 0 if turns else 1 for name in rows}


def read_program(compiled: jax.stages.Compiled, sizes: Sizes) -> Reading:
    """Read a compiled program."""
    computations, entry = parse_program(compiled.as_text() or "")
    listed = steps(computations, entry, sizes.turns)
    return Reading(
        kernels=sum(step.times for step in listed),
        layer_kernels=_layer_kernels(listed, sizes),
        weight_copies=_copies(listed, computations, sizes.weights, sizes),
        cache_copies=_copies(listed, computations, sizes.caches, sizes),
    )


def _copies(listed: list[Step], computations: Mapping[str, Computation], counted: frozenset[int], sizes: Sizes) -> int:
    """Count the kernels in loops that only move an array of such a size; of loops over tokens the most in one.

    Of a pass through layers that are no loop, those of a layer.
    """
    moving = [
        step
        for step in listed
        if any(array.size in counted for array in step.instruction.arrays)
        and _only_moves(step.instruction, computations)
    ]
    by_loop = Counter(next((loop.name for loop in step.loops if loop.tokens), "") for step in moving if step.loops)
    in_layers = by_loop.pop("", 0)
    if not sizes.turns and not _is_loop(listed, sizes):
        in_layers += math.ceil(sum(not step.loops for step in moving) / sizes.layers)
    return in_layers + max(by_loop.values(), default=0)


def _is_loop(listed: list[Step], sizes: Sizes) -> bool:
    return any(loop.turns == sizes.layers for step in listed for loop in step.loops)


def _layer_kernels(listed: list[Step], sizes: Sizes) -> float:
    """Count the kernels of a layer: in the largest loop over tokens; in all over layers, where these are loops."""
    if not sizes.turns and not _is_loop(listed, sizes):
        return sum(step.times for step in listed if _in_a_layer(step.instruction)) / sizes.layers
    by_loop: Counter[str] = Counter()
    for step in listed:
        for place, loop in enumerate(step.loops):
            if loop.tokens if sizes.turns else loop.turns == sizes.layers:
                if not sizes.turns or _in_a_layer(step.instruction):
                    by_loop[loop.name] += step.inside(place)
                break
    return max(by_loop.values(), default=0) / sizes.layers if sizes.turns else float(sum(by_loop.values()))


def _in_a_layer(line: Instruction) -> bool:
    named = re.search(r'op_name="([^"]*)"', line.attributes)
    return named is None or bool(_LAYER.search(named[1]))


def _only_moves(line: Instruction, computations: Mapping[str, Computation]) -> bool:
    """Return whether a kernel computes nothing: it copies, transposes, slices, joins or casts."""
    if line.opcode != "fusion":
        return line.opcode in _MOVES
    (called,) = line.called("calls")
    opcodes = {inner.opcode for inner in computations[called].values()} - {"parameter", "constant", "tuple"}
    return opcodes <= _MOVES | _VIEWS and bool(opcodes & _MOVES)


def program_sizes(config: Config, model: ModelConfig, mesh: jax.sharding.Mesh | None) -> Sizes:
    """Return what counts as a copy of weights or of caches on one device."""
    state = state_shapes(config, model, mesh, platform="cpu")  # whose layers are stacked
    layers = state.variables["params"].get("layers", {})
    weights = {tree_bytes(leaf) // leaf.dtype.itemsize // model.num_layers for leaf in jax.tree.leaves(layers)}
    if mesh is None:
        decoded = jax.eval_shape(lambda params: unstack_and_fuse(params, model), state.variables["params"])
        weights |= {leaf.size for leaf in jax.tree.leaves(decoded.get("layers_0", {}))}
    section = config.sampling
    chunk = bucket_size(config.training.chunk_prompts or config.training.prompts_per_batch)
    per_token = chunk * model.num_kv_heads * model.head_dim
    lengths = {size * section.group_size for size in cache_sizes(section.max_new_tokens)}
    caches = {per_token * length for length in (*lengths, bucket_size(config.data.max_prompt_tokens, smallest=8))}
    split = 1 if mesh is None else mesh.size
    return Sizes(
        frozenset(size for size in weights if size >= _SMALLEST),
        frozenset(size // split for size in caches) | frozenset(caches),
        model.num_layers,
    )
