"""Optimised HLO as XLA writes it out: its instructions, the floating-point operations of their products, their kinds.

The standard library alone.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

CONTAINERS = ("while", "call", "conditional")  # what they run is timed on its own
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)")

# The kinds of what multiplies no matrices, and the opcodes that make an instruction one.
NAMING = ("parameter", "bitcast", "tuple", "get-tuple-element")  # no work
FILLING = ("broadcast", "constant", "iota")
MOVING = (
    *("copy", "transpose", "reshape", "reverse", "concatenate", "pad"),
    *("slice", "dynamic-slice", "dynamic-update-slice"),
)
LOOKING_UP = ("gather", "scatter", "sort", "topk", "select-and-scatter")
REDUCING = ("reduce", "reduce-window", "all-reduce")
BROADCASTS, COPIES = "broadcasts (memory touched first)", "copies, transposes, slices"
LOOKUPS, REDUCTIONS, ELEMENTWISE = "gathers, scatters, sorts", "reductions", "elementwise"
CALLS = "custom calls"


class Instruction(NamedTuple):
    """One instruction: `shape` as written, a tuple's in parentheses; `rest` is all that follows its opening bracket."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def dims(self) -> tuple[int, ...]:
        """The sizes of the result, of a tuple's first part."""
        found = re.search(r"\[([\d,]*)\]", self.shape)
        return tuple(int(size) for size in found[1].split(",") if size) if found else ()

    @property
    def op_name(self) -> str:
        """Where in the JAX program it comes from; "" where XLA made it."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    def sizes(self, attribute: str) -> tuple[int, ...]:
        """An attribute such as `lhs_contracting_dims={1}`; () where it is not given."""
        found = re.search(attribute + r"=\{([\d,]*)\}", self.rest)
        return tuple(int(size) for size in found[1].split(",") if size) if found else ()


class Module(NamedTuple):
    """Instructions by name, and the names of each computation's."""

    instructions: dict[str, Instruction]
    computations: dict[str, list[str]]

    def inside(self, name: str) -> list[Instruction]:
        """The instruction, or those of the computation that it fuses."""
        instruction = self.instructions[name]
        fused = re.search(r"calls=%?([\w.\-]+)", instruction.rest)
        if instruction.opcode != "fusion" or fused is None:
            return [instruction]
        return [part for inner in self.computations[fused[1]] for part in self.inside(inner)]

    def products(self, name: str) -> list[Instruction]:
        """Its products of matrices."""
        return [part for part in self.inside(name) if part.opcode == "dot"]

    def left(self, dot: Instruction) -> tuple[int, ...]:
        """The sizes of a dot's first operand."""
        name = re.search(r"%?([\w.\-]+)[,)]", dot.rest)
        assert name is not None, dot
        return self.instructions[name[1]].dims

    def flops(self, name: str) -> int:
        """Floating-point operations of its products, a multiply-add as two; no other work is counted."""
        return sum(
            2 * math.prod(dot.dims) * math.prod(self.left(dot)[axis] for axis in dot.sizes("lhs_contracting_dims"))
            for dot in self.products(name)
        )

    def kind(self, name: str, vocabulary: int) -> str:
        """What sort of work it is, as the tables name it; `vocabulary` tells products with the head."""
        dots = self.products(name)
        if dots:
            part, stage = self._part(dots[0], vocabulary)
            return f"products: {part}, {stage}"
        # Scalars beside it say where a slice begins.
        codes = {one.opcode for one in self.inside(name) if math.prod(one.dims) > 1} - set(NAMING)
        if "custom-call" in codes:
            return CALLS
        if codes & set(LOOKING_UP):
            return LOOKUPS
        if codes & set(REDUCING):
            return REDUCTIONS
        if codes - {*FILLING, *MOVING}:
            return ELEMENTWISE
        return COPIES if codes & set(MOVING) else BROADCASTS

    def _part(self, dot: Instruction, vocabulary: int) -> tuple[str, str]:
        """With what a product is, and in which pass."""
        backward = "transpose(" in dot.op_name
        again = "rematted_computation" in dot.op_name
        if dot.sizes("lhs_batch_dims"):
            part, of_weights = "attention", False
        else:
            part = "head" if vocabulary in dot.dims + self.left(dot) else "layers"
            # Its sum is over tokens, the first axis of both; or over the same seen through a transposed copy.
            over_rows = dot.sizes("lhs_contracting_dims") == dot.sizes("rhs_contracting_dims") == (0,)
            of_weights = backward and (over_rows or dot.op_name.endswith("/transpose"))
            # The custom gradient of the log-probabilities computes a chunk's logits anew.
            again = again or (part == "head" and backward and not of_weights and dot.dims[-1] == vocabulary)
        if of_weights:
            return part, "gradients of weights"
        if again:
            return part, "computed again"
        return part, "gradients of inputs" if backward else "forward"


def read(text: str) -> Module:
    """A module as `--xla_dump_hlo_as_text` writes it."""
    module, names = Module({}, {}), []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            names = module.computations[line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]] = []
        elif found := INSTRUCTION.match(line):
            module.instructions[found[1]] = Instruction(*found.groups())
            names.append(found[1])
    return module
