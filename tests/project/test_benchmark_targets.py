"""The benchmark of absent devices: what it reads in a compiled program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "targets"))

from launches import Array, Sizes, parse_program, read_program, steps

TEXT = """HloModule program

%moved (p: bf16[4,8,8], i: s32[]) -> bf16[8,8] {
  %p = bf16[4,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,8,8]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}
  ROOT %flat = bf16[8,8]{1,0} bitcast(%slice)
}

%body (t: (s32[], bf16[4,8,8], f32[2,8])) -> (s32[], bf16[4,8,8], f32[2,8]) {
  %t = (s32[], bf16[4,8,8]{2,1,0}, /*index=2*/f32[2,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %w = bf16[4,8,8]{2,1,0} get-tuple-element(%t), index=1
  %x = f32[2,8]{1,0} get-tuple-element(%t), index=2
  %copied = bf16[8,8]{1,0} fusion(%w, %n), kind=kLoop, calls=%moved, metadata={op_name="a(b)"}
  %product = (f32[2,8]{1,0}, s8[64]{0}) custom-call(%x, %copied), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %y = f32[2,8]{1,0} get-tuple-element(%product), index=0
  %begun = f32[2,8]{1,0} all-reduce-start(%y), to_apply=%add
  %sum = f32[2,8]{1,0} all-reduce-done(%begun)
  ROOT %next = (s32[], bf16[4,8,8]{2,1,0}, f32[2,8]{1,0}) tuple(%n, %w, %sum)
}

%condition (t.1: (s32[], bf16[4,8,8], f32[2,8])) -> pred[] {
  %t.1 = (s32[], bf16[4,8,8]{2,1,0}, f32[2,8]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: bf16[4,8,8], b: f32[2,8]) -> f32[2,8] {
  %a = bf16[4,8,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[2,8]{1,0} parameter(1)
  %one = s32[] constant(0)
  %start = (s32[], bf16[4,8,8]{2,1,0}, f32[2,8]{1,0}) tuple(%one, %a, %b)
  %loop = (s32[], bf16[4,8,8]{2,1,0}, f32[2,8]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  ROOT %out = f32[2,8]{1,0} get-tuple-element(%loop), index=2
}
"""


class Compiled:
    def as_text(self):
        return TEXT


def test_kernels_and_copies_are_read_from_a_cards_program():
    computations, entry = parse_program(TEXT)
    assert computations["main"]["a"].arrays == (Array("bf16", (4, 8, 8)),)
    assert [(step.instruction.name, step.times) for step in steps(computations, entry)] == [
        *(("copied", 4), ("product", 4), ("begun", 4)),
    ]
    reading = read_program(Compiled(), Sizes(frozenset({64}), frozenset(), layers=4))
    assert reading.kernels == 12 and reading.layer_kernels == 3 and reading.weight_copies == 1
